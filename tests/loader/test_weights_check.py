"""What a checkpoint's headers say before it is loaded, and what a check of all its weights finds."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.core.errors import WeightError
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.loader.weights import check_model, load_model
from octavo.models.config_files import read_model_config

ONE = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """A copy of the tiny model in two files."""
    tensors = load_file(tiny_model / ONE)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: value for name, value in tensors.items() if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    return tmp_path


def edit(folder: Path, **changes: Callable[[Tensor], Tensor] | None) -> None:
    """Changes, or removes, tensors that end with the names (with __ for a dot) in the files that hold them."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in list(tensors):
            for end, change in changes.items():
                if name.endswith(end.replace("__", ".")):
                    value = tensors.pop(name)
                    if change is not None:
                        tensors[name] = change(value).contiguous()
        save_file(tensors, file)


def forget(folder: Path, end: str) -> None:
    """Removes tensors from the index."""
    file = folder / "model.safetensors.index.json"
    files = json.loads(file.read_text())["weight_map"]
    file.write_text(json.dumps({"weight_map": {name: of for name, of in files.items() if not name.endswith(end)}}))


class Untouched(ReferenceKernels):
    """Kernels that are given no weight."""

    def pack(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("a weight was packed")


def load(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    load_model(folder, read_model_config(folder), LayerContext(Untouched(), DType.FLOAT32))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"vocab_size": 300},
            r"'model\.embed_tokens\.weight' .*\[258, 32\], expected \[300, 32\].*vocab_size = 300, the tensor 258",
        ),
        (
            {"intermediate_size": 96},
            r"'model\.layers\.\d\.mlp\..* expected .*96.*config\.json has intermediate_size = 96, the tensor 64",
        ),
        (
            {"num_hidden_layers": 1},
            r"'model\.layers\.1\..*belongs to no layer of this network: config\.json has num_hidden_layers = 1, but "
            r"the checkpoint has 2 layers \(the last is model\.layers\.1\)",
        ),
        (
            {"num_hidden_layers": 3},
            r"lacks the tensors model\.layers\.2\.input_layernorm\.weight.*: config\.json has num_hidden_layers = 3, "
            r"but the checkpoint has 2 layers",
        ),
    ],
)
def test_a_config_that_contradicts_the_weights_is_refused_before_one_is_read(
    folder: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(WeightError, match=says):
        load(folder, **changes)


@pytest.mark.parametrize("written", ["F4", "I5"])
def test_a_type_that_is_not_read_is_named_with_its_tensor(written: str, tmp_path: Path) -> None:
    """A type of safetensors, and one that it does not know."""
    entry = {"dtype": written, "shape": [16, 16], "data_offsets": [0, 128]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    (tmp_path / ONE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(128))
    small = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = small | {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 1, "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightError, match=rf"tensor 'model\.embed_tokens\.weight' is of type {written}[;,]"):
        load(tmp_path)


def test_a_file_that_is_cut_off_is_refused_before_a_weight_of_another_is_read(folder: Path) -> None:
    last = max(folder.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-8])
    with pytest.raises(WeightError, match=rf"{last.name} is truncated"):
        load(folder)


def test_a_whole_checkpoint_has_no_problems(folder: Path, tiny_model: Path) -> None:
    report = check_model(folder, read_model_config(folder))
    tensors = load_file(tiny_model / ONE)
    assert report.problems == []
    assert report.tensors == len(tensors)
    assert report.size_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_every_problem_is_named_with_its_tensor(folder: Path) -> None:
    def broken(value: Tensor) -> Tensor:
        value[3, 4], value[0, 0] = float("nan"), float("-inf")
        return value.half()

    edit(folder, layers__0__mlp__up_proj__weight=broken, layers__1__mlp__down_proj__weight=lambda v: v[:, 1:])
    edit(folder, layers__1__self_attn__q_proj__weight=None)
    forget(folder, "layers.1.self_attn.q_proj.weight")
    found = {problem.tensor: problem.problem for problem in check_model(folder, read_model_config(folder)).problems}
    at = "model.layers."
    assert found == {
        f"{at}0.mlp.up_proj.weight": "2 of 2048 values are infinite or not a number",
        f"{at}1.mlp.down_proj.weight": "does not fit: its shape is [32, 63], expected [32, 64]: "
        "config.json has intermediate_size = 64, the tensor 63",
        f"{at}1.self_attn.q_proj.weight": "is missing",
    }


def test_a_file_that_cannot_be_read_is_a_problem(folder: Path) -> None:
    last = max(folder.glob("*.safetensors"))
    last.unlink()
    (problem,) = check_model(folder, read_model_config(folder)).problems
    assert problem.tensor is None
    assert f"{last.name} is missing" in problem.problem


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("terminal", "rank", "pause"), [(True, 0, 0.3), (True, 0, 0), (True, 1, 0.3), (False, 0, 0.3)])
def test_a_long_load_shows_its_progress_on_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, rank: int, pause: float
) -> None:
    from octavo.loader import weights as model

    def slowly(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
        for i, pair in enumerate(read(folder)):
            yield pair
            if i == 5:
                time.sleep(pause)

    read = model.read_safetensors
    monkeypatch.setattr(model, "_BAR_DELAY", 0.2)
    monkeypatch.setattr(model, "read_safetensors", slowly)
    shown = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    context = LayerContext(ReferenceKernels(), DType.FLOAT32, tp_rank=rank, tp_size=2)
    load_model(folder, read_model_config(folder), context)
    assert ("loading weights" in shown.getvalue()) == (terminal and not rank and pause > 0)
