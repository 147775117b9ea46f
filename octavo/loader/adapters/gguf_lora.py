"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them.

Tensors are named as the model's, with ``.lora_a`` [rank, in] and ``.lora_b`` [out, rank] behind; of the embedding the
first is transposed. Rows are in the order of the model's GGUF files, which differs from transformers' for some.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.core.errors import AdapterError, OctavoError
from octavo.core.model_config import ModelConfig
from octavo.loader.adapters.lora import LoraPair
from octavo.loader.gguf_architectures import ARCHITECTURES
from octavo.loader.gguf_entries import Entry
from octavo.loader.gguf_file import GGUFFile
from octavo.loader.gguf_weights import row_order

_DOWN, _UP = ".lora_a", ".lora_b"
_EMBEDDING = "token_embd.weight"


def open_adapter(path: Path) -> GGUFFile:
    """The header of a GGUF file that is an adapter.

    Raises:
        AdapterError: it is none, damaged, or an adapter of another kind.
    """
    try:
        file = GGUFFile(path)
    except OctavoError as e:
        raise AdapterError(str(e)) from None
    facts = file.metadata
    kind, method = facts.get("general.type"), facts.get("adapter.type")
    if kind != "adapter":
        raise AdapterError(f"{path}: general.type is {kind!r}, expected 'adapter': it holds no adapter")
    if method != "lora":
        raise AdapterError(f"{path}: adapter.type={method!r} is not supported; supported: 'lora'")
    if other := sorted(key for key in facts if key.startswith("adapter.alora.")):
        raise AdapterError(f"{path}: {other[0]} is not supported: activated LoRA is not supported")
    return file


def read_pairs(file: GGUFFile, config: ModelConfig) -> list[LoraPair]:
    """The pairs of matrices of a file, for a model.

    Raises:
        AdapterError: it is for another architecture, or a tensor is none of its matrices or lacks its partner.
    """
    names = _Names(file, config)
    for tensor in file.tensors:
        if not tensor.endswith((_DOWN, _UP)):
            raise AdapterError(
                f"{file.path}: tensor {tensor!r} is no low-rank matrix: expected names such as "
                "blk.0.attn_q.weight.lora_a"
            )
    modules = dict.fromkeys(tensor.removesuffix(_DOWN).removesuffix(_UP) for tensor in file.tensors)
    return [_pair(file, source, names, config) for source in modules]


def read_values(file: GGUFFile) -> dict[str, Tensor]:
    """All tensors of the file, float32.

    Raises:
        AdapterError: it became shorter, or cannot be read.
    """
    try:
        return {
            name: torch.from_numpy(np.concatenate([*file.read_pieces(tensor)]).reshape(tensor.shape))
            for name, tensor in file.tensors.items()
        }
    except (OctavoError, OSError) as e:
        raise AdapterError(str(e)) from None


def _pair(file: GGUFFile, source: str, names: _Names, config: ModelConfig) -> LoraPair:
    down, up = file.tensors.get(source + _DOWN), file.tensors.get(source + _UP)
    if down is None or up is None:
        present, absent = (_UP, _DOWN) if down is None else (_DOWN, _UP)
        raise AdapterError(f"{file.path}: tensor {source + present!r} has no partner {source + absent!r}")
    transposed = source == _EMBEDDING
    down_shape = down.shape[::-1] if transposed else down.shape
    alpha = names.alpha
    # As llama.cpp has it, no alpha means no scaling.
    scale = alpha / up.shape[-1] if alpha else 1.0
    entry = names.entry(source)
    order = None
    if entry.order is not None:
        try:
            order = row_order(entry.order, up.rows, config.num_heads, config.num_kv_heads, config.head_dim)
        except ValueError:
            raise AdapterError(f"{file.path}: tensor {up.name!r} has {up.rows} rows, which no heads have") from None
    module = entry.name.removesuffix(".weight")
    return LoraPair(module, down.name, up.name, down_shape, up.shape, scale, order, transposed)


@dataclass(frozen=True)
class _Kind:
    """What an architecture calls the matrices of its layers, and the others."""

    prefix: str
    layer: dict[str, Entry]
    others: dict[str, Entry]


class _Names:
    """Leads from the names of tensors in a model's GGUF files to those in transformers."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._path = file.path
        named = {
            name.split()[0]: kind for name, kind in ARCHITECTURES.items() if kind.architecture == config.architecture
        }
        arch = file.metadata.get("general.architecture")
        if arch not in named:
            expected = " or ".join(map(repr, named)) or "none: the model's architecture has no GGUF files here"
            raise AdapterError(
                f"{file.path} is an adapter for the architecture {arch!r}; the model ({config.architecture}) takes "
                f"{expected}"
            )
        kind = named[arch]
        self._kind = _Kind(kind.prefix, _by_source(kind.layer), _by_source(kind.others))
        self.alpha = _alpha(file)

    def entry(self, source: str) -> Entry:
        """The matrix of this name, under its whole name in transformers."""
        layer = re.fullmatch(r"blk\.(\d{1,6})\.(.+)", source)
        found = self._kind.layer.get(layer[2]) if layer else self._kind.others.get(source)
        if found is None or "{e}" in found.name or found.beside is not None:
            raise AdapterError(f"{self._path}: there are no adapters of the tensor {source!r} for this model")
        name = self._kind.prefix.format(i=int(layer[1])) + found.name if layer else found.name
        return Entry(source, name, found.shape, found.order)


def _by_source(entries: tuple[Entry, ...]) -> dict[str, Entry]:
    return {entry.source: entry for entry in entries}


def _alpha(file: GGUFFile) -> float:
    alpha: Any = file.metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not abs(alpha) < 1e30:
        raise AdapterError(f"{file.path}: adapter.lora.alpha must be a number, not {alpha!r}")
    return float(alpha)
