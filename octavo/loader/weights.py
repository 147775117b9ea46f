"""Streams the tensors of a checkpoint of safetensors, or of CTranslate2, into a network, one at a time.

Files are memory-mapped, and remapped every few MB: the pages of a mapping count as the process's memory until it is
dropped, which it is when the layers have packed its tensors.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from octavo.core.errors import WeightError
from octavo.core.untracked import return_freed_memory
from octavo.kernels.quantized_rows import QuantizedRows
from octavo.layers.layer import Layer
from octavo.loader.ctranslate2_magic import MODEL_NAME, is_ctranslate2
from octavo.loader.ctranslate2_whisper import whisper_tensors
from octavo.loader.stored import DTYPES, Stored

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOATS = ("float32", "bfloat16", "float16")
#: Largest index that is read, in bytes.
_MAX_INDEX_BYTES = 64 << 20
_PICKLES = ("*.bin", "*.pt", "*.pth")
#: A file is remapped after this many bytes.
_MAPPED_BYTES = 16 << 20


def load_weights(
    network: Layer, tensors: Iterable[tuple[str, np.ndarray | QuantizedRows]], other_stages: Container[str] = ()
) -> None:
    """Loads all weights of a network from (name, whole tensor) pairs.

    Args:
        network: a network without loaded weights.
        tensors: in any order, each name once, under the names that the layers expect.
        other_stages: names of tensors that other pipeline stages expect; skipped if no layer here expects them.

    Raises:
        WeightError: a tensor is missing, unexpected, duplicate, or of the wrong shape or type; the message names it.
    """
    expected = {name: (layer, shard) for name, layer, shard in network.tensors()}
    shapes = {name: layer.expected[shard] for name, (layer, shard) in expected.items()}
    seen: set[str] = set()
    for name, tensor in tensors:
        if name not in expected and name in other_stages:
            continue
        if problem := tensor_problem(name, tensor, shapes, seen):
            raise WeightError(f"tensor {name!r} {problem}")
        layer, shard = expected[name]
        try:
            layer.load(shard, tensor)
        except WeightError as e:
            raise WeightError(f"tensor {name!r}: {e}") from None
        seen.add(name)
    if missing := [name for name in expected if name not in seen]:
        raise missing_tensors(missing)


def tensor_problem(
    name: str, tensor: np.ndarray | QuantizedRows, shapes: Mapping[str, tuple[int, ...]], seen: Container[str]
) -> str | None:
    """Why a tensor cannot be loaded; None if nothing speaks against it.

    Args:
        name: of the tensor.
        tensor: whole.
        shapes: of the tensors that the network expects.
        seen: names of the tensors before it.
    """
    if name not in shapes:
        return "belongs to no layer of this network; is config.json of this checkpoint?"
    if name in seen:
        return "occurs twice"
    if isinstance(tensor, np.ndarray) and tensor.dtype.name not in _FLOATS:
        return f"is of type {tensor.dtype}; expected float32, bfloat16 or float16"
    if tuple(tensor.shape) != shapes[name]:
        return f"does not fit: its shape is {list(tensor.shape)}, expected {list(shapes[name])}"
    return None


def missing_tensors(names: Sequence[str]) -> WeightError:
    """The error for tensors that the checkpoint does not have."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return WeightError(f"the checkpoint lacks the tensors {', '.join(names[:3])}{more}")


def read_headers(folder: Path) -> dict[str, Stored]:
    """All tensors that ``read_safetensors`` gives, by name, without their values.

    Raises:
        WeightError: as ``read_safetensors``, or a tensor is in two files.
    """
    found: dict[str, Stored] = {}
    for file, expected in _files(folder).items():
        try:
            tensors = _stored(file, expected)
        except (SafetensorError, OSError) as e:
            raise _unreadable(file, e) from None
        if twice := found.keys() & tensors.keys():
            raise WeightError(f"tensor {min(twice)!r} occurs twice")
        found |= tensors
    return found


def read_safetensors(folder: Path) -> Generator[tuple[str, np.ndarray]]:
    """The (name, tensor) pairs of model.safetensors, or of the files that model.safetensors.index.json names.

    Where there are none, those of CTranslate2's model.bin under the names of transformers.

    A tensor is a view of the mapped file, which stays mapped as long as one of its tensors is held.

    Raises:
        WeightError: a file is missing, truncated or no safetensors file, or lacks a tensor that the index says it has.
    """
    for file, expected in _files(folder).items():
        try:
            yield from _tensors(file, _stored(file, expected))
        except (SafetensorError, OSError) as e:
            raise _unreadable(file, e) from None


def _stored(file: Path, expected: set[str]) -> dict[str, Stored]:
    """The tensors in a file, in their order there.

    Raises:
        WeightError: one of ``expected`` is not among them.
    """
    if file.name == MODEL_NAME:
        return whisper_tensors(file)
    with safe_open(file, framework="np"):  # checks that sizes and offsets fit each other and the file
        pass
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    if absent := expected.difference(header):
        raise WeightError(f"{file} lacks the tensor {min(absent)!r} that {INDEX_FILE} says it holds")
    found = {
        name: Stored(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }
    return dict(sorted(found.items(), key=lambda item: item[1].offset))


def _unreadable(file: Path, error: Exception) -> WeightError:
    if isinstance(error, SafetensorError):
        return WeightError(f"{file} is truncated or no safetensors file: {error}")
    return WeightError(f"{file} cannot be read: {error}")


def _tensors(file: Path, stored: Mapping[str, Stored]) -> Iterator[tuple[str, np.ndarray]]:
    mapping, mapped = None, 0
    for name, tensor in stored.items():
        if tensor.dtype not in DTYPES:
            raise WeightError(f"tensor {name!r} is of type {tensor.dtype}, which is not supported")
        if mapping is None or mapped > _MAPPED_BYTES:
            mapping, mapped = _map(file, tensor.offset), 0
            # An aligned matrix does not fit into the chunk that the C library keeps of a freed one of its size.
            return_freed_memory()
        mapped += tensor.nbytes
        count = math.prod(tensor.shape)
        flat = np.frombuffer(mapping, DTYPES[tensor.dtype], count, tensor.offset) if count else np.empty(0)
        values = flat.astype(DTYPES[tensor.dtype], copy=False).reshape(tensor.shape)
        yield name, values if values.flags.aligned else values.copy()
        del flat, values


def _map(file: Path, start: int) -> mmap.mmap:
    """The whole file; what follows ``start`` is read ahead."""
    with file.open("rb") as opened:
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_WILLNEED"):
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        mapping.madvise(mmap.MADV_WILLNEED, page, min(2 * _MAPPED_BYTES, len(mapping) - page))
    return mapping


def checkpoint_bytes(folder: Path) -> int:
    """Bytes of the files that ``read_safetensors`` reads."""
    return sum(file.stat().st_size for file in _files(folder))


def _files(folder: Path) -> dict[Path, set[str]]:
    """The checkpoint's files, each with the tensors that the index lists for it."""
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: set()}
    if (folder / INDEX_FILE).is_file():
        return _indexed_files(folder)
    if is_ctranslate2(folder / MODEL_NAME):
        return {folder / MODEL_NAME: set()}
    if len(others := [*folder.glob("*.safetensors")]) == 1:  # such as AutoGPTQ's gptq_model-4bit-128g.safetensors
        return {others[0]: set()}
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise WeightError(
            f"{folder} holds {pickles[0]} but no safetensors: such files are pickles, which can run code and are never "
            "loaded; convert the checkpoint: transformers' from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    raise WeightError(
        f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; for measurements load_format='dummy' needs no weights"
    )


def _indexed_files(folder: Path) -> dict[Path, set[str]]:
    index = folder / INDEX_FILE
    if index.stat().st_size > _MAX_INDEX_BYTES:
        raise WeightError(f"{index} has {index.stat().st_size} bytes; at most {_MAX_INDEX_BYTES} are read")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(tensor), str(file)) for tensor, file in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WeightError(f"{index} is no index: expected a JSON object with weight_map, tensor to file") from None
    files: dict[Path, set[str]] = {}
    for tensor, file in pairs:
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise WeightError(f"{index} puts {tensor!r} into {file!r}: expected the name of a file in the same folder")
        if not file.endswith(".safetensors"):
            raise WeightError(f"{index} puts {tensor!r} into {file!r}: expected a .safetensors file")
        files.setdefault(folder / file, set()).add(tensor)
    for path in files:
        if not path.is_file():
            raise WeightError(f"{path} is missing; {INDEX_FILE} names it")
    return files
