"""Converts a GGUF file to a Hugging Face style folder: dequantized weights in transformers' names and layouts."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES

from octavo.kernels.gguf_rows import GGUFRows
from octavo.loader.gguf_architectures import architecture_of
from octavo.loader.gguf_config import generation_config, model_config
from octavo.loader.gguf_file import GGUFFile
from octavo.loader.gguf_keys import Keys
from octavo.loader.gguf_tokenizer import write_tokenizer
from octavo.loader.gguf_weights import Weight, weights_of

if TYPE_CHECKING:
    from torch import Tensor

_SAFETENSORS = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}


def convert_gguf(path: Path, folder: Path, dtype: str) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer's files into ``folder``.

    Args:
        path: the GGUF file.
        folder: exists and is empty.
        dtype: float32 (exactly the dequantized values) or bfloat16 (these, rounded to nearest even).

    Raises:
        WeightError: the file is damaged, or a tensor is missing or of the wrong shape.
        UnsupportedModelError: its architecture, a setting, a tensor type or a tensor is not supported.
        TokenizerError: its tokenizer is incomplete or of an unknown kind.
    """
    file, config, weights = _read_header(path, dtype)
    write_tokenizer(file, folder, config["vocab_size"])
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(file))
    _write_safetensors(folder / "model.safetensors", file, weights, dtype)


def read_gguf(path: Path) -> Iterator[tuple[str, Tensor | GGUFRows]]:
    """The (name, tensor) pairs of a GGUF file, with transformers' names and layouts.

    Quantised matrices come in the file's blocks, everything else in float32.

    Raises:
        As ``convert_gguf``.
    """
    import torch

    file, _, weights = _read_header(path, "float32")
    for weight in weights:
        kind = weight.source.type
        block = GGML_QUANT_SIZES[kind][0]
        if block > 1 and len(weight.shape) == 2 and weight.beside is None:
            columns = weight.source.shape[-1]
            yield weight.name, GGUFRows(kind.name, weight.blocks(file), columns, block, weight.entry.transposed)
        else:
            values = np.concatenate([piece.reshape(-1) for piece in weight.pieces(file)])
            yield weight.name, torch.from_numpy(values.reshape(weight.shape))


def _read_header(path: Path, dtype: str) -> tuple[GGUFFile, dict[str, Any], list[Weight]]:
    """The file, the content of config.json, and all tensors of the network."""
    file = GGUFFile(path)
    keys = Keys(file)
    architecture = architecture_of(keys)
    config = model_config(keys, architecture, dtype)
    return file, config, weights_of(keys, architecture, config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def _write_safetensors(path: Path, file: GGUFFile, weights: list[Weight], dtype: str) -> None:
    """Streams the tensors to disk: the safetensors library needs all of them in memory at once.

    Format: 8 bytes with the header's length, the header in JSON, the data in the header's order.
    """
    code, size = _SAFETENSORS[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight in weights:
        end = offset + int(np.prod(weight.shape, dtype=object)) * size
        header[weight.name] = {"dtype": code, "shape": list(weight.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        _reserve(out.fileno(), 8 + len(text) + offset)
        out.write(len(text).to_bytes(8, "little") + text)
        for weight in weights:
            for piece in weight.pieces(file):
                out.write(_encoded(piece, dtype).data)


def _reserve(descriptor: int, size: int) -> None:
    """Takes the disk space of a file, so that a disk that cannot hold the weights says so before they are read.

    Raises:
        OSError: there is not enough, or the file may not be so long.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # else the file system cannot reserve
            raise OSError(e.errno, f"{os.strerror(e.errno)}: the weights take {size / (1 << 20):.0f} MiB") from None


def _encoded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Contiguous little-endian values as bytes: float32 as they are, or bfloat16 (uint16)."""
    if dtype == "float32":
        return np.ascontiguousarray(values, dtype="<f4")
    import torch

    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().astype("<i2", copy=False)
