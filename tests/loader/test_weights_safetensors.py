"""Safetensors files: tensors over the mapped file with the package's bits, and every way in which one is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo.core.errors import WeightError
from octavo.kernels.torch_backend import to_torch
from octavo.loader.weights import read_headers, read_safetensors

ONE = "model.safetensors"
TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int8]


def written(folder: Path, header: Any, data: bytes = b"", pad: int = 0) -> Path:
    """A folder with a file of this header, after which ``pad`` spaces follow."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    (folder / ONE).write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def entry(start: int = 0, stop: int = 8, shape: tuple[Any, ...] = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def test_every_type_has_the_bits_of_the_package(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {str(dtype): (torch.randn(3, 5) * 50).to(dtype) for dtype in TYPES}
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5), "flags": torch.tensor([True, False])}
    save_file(tensors, tmp_path / ONE)
    found, headers = dict(read_safetensors(tmp_path)), read_headers(tmp_path)
    assert found.keys() == tensors.keys() == headers.keys()
    for name, tensor in tensors.items():
        assert found[name].shape == tuple(tensor.shape) == headers[name].shape
        assert found[name].tobytes() == bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()), name
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        assert torch.equal(to_torch(found[str(dtype)]).float(), tensors[str(dtype)].float())


def test_arrays_are_views_of_the_file_that_outlive_the_reader(tmp_path: Path) -> None:
    path = tmp_path / ONE
    numbers = np.arange(3 << 20, dtype=np.float32)
    save_file({name: torch.from_numpy(numbers + i) for i, name in enumerate("abcd")}, path)
    found = dict(read_safetensors(tmp_path))  # 48 MB: the file is mapped anew meanwhile
    path.unlink()
    for i, name in enumerate("abcd"):
        assert not found[name].flags.writeable and not found[name].flags.owndata
        assert np.array_equal(found[name], numbers + i)


@pytest.mark.parametrize("pad", range(8))
def test_a_header_of_any_length_is_read(tmp_path: Path, pad: int) -> None:
    data = np.array([1.5, -2], np.float32)
    header = {"__metadata__": {"format": "pt"}, "x": entry()}
    ((name, found),) = read_safetensors(written(tmp_path, header, data.tobytes(), pad))
    assert name == "x"
    assert found.flags.aligned and np.array_equal(found, data)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"\xff\xfe",
        b"[" * 50_000,
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "x": 1}',
        {"x": 3},
        {"x": {}},
        {"x": entry(dtype=4)},
        {"x": entry(shape=(-2,))},
        {"x": entry(shape=(2.0,))},
        {"x": entry(shape=(True, 2))},
        {"x": entry(shape=("2",))},
        {"x": entry(shape=(1,) * 40)},
        {"x": entry(shape=(1 << 40, 1 << 40, 1 << 40))},
        {"x": entry(0, 8, (3,))},
        {"x": entry(8, 0)},
        {"x": entry(-8, 0)},
        {"x": entry(0, 1 << 62, (1 << 60,))},
        {"x": entry(), "y": entry()},
        {"x": entry(0, 4, (1,)), "y": entry(0, 8)},
        {"x": entry(0, 4, (1,))},
        {"x": entry(4, 8, (1,))},
        {},
    ],
    ids=repr,
)
def test_a_header_that_does_not_fit_the_file_is_refused(tmp_path: Path, header: Any) -> None:
    with pytest.raises(WeightError, match=r"model\.safetensors is truncated or no safetensors file"):
        read_headers(written(tmp_path, header, b"\0" * 8))


@pytest.mark.parametrize("length", [0, 3, 8, 20, 1 << 40, 1 << 63, (1 << 64) - 1])
def test_a_length_that_exceeds_the_file_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / ONE).write_bytes(length.to_bytes(8, "little") + b"{}"[: length or 2])
    if length == 0:
        (tmp_path / ONE).write_bytes(b"\0" * 8)
    with pytest.raises(WeightError, match=r"model\.safetensors is truncated or no safetensors file"):
        read_headers(tmp_path)


def test_a_type_that_numpy_lacks_is_named_when_it_is_read(tmp_path: Path) -> None:
    written(tmp_path, {"x": entry(dtype="F4", shape=(16,))}, b"\0" * 8)
    assert read_headers(tmp_path)["x"].dtype == "F4"
    with pytest.raises(WeightError, match="tensor 'x' is of type F4, which is not supported"):
        list(read_safetensors(tmp_path))
