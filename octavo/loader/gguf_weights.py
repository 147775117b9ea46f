"""The tensors of a GGUF file under the names of a network.

The gguf package's map leads from names of networks to those in files, and the network says which tensors it needs, of
which shapes. Written here are the exceptions: names that the map does not know, matrices that a file has in one or in
pieces, and layouts that llama.cpp's converter changes.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Container, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES
from gguf.tensor_mapping import get_tensor_name_map

from octavo.core.dtypes import DType, rounded
from octavo.core.errors import UnsupportedModelError, WeightError
from octavo.core.model_config import ModelConfig
from octavo.kernels.gguf_rows import GGUFRows, dequantize
from octavo.kernels.quantized_rows import QuantizedRows
from octavo.loader.gguf_file import GGUFFile, GGUFTensor
from octavo.loader.gguf_metadata import ROPE_TABLES
from octavo.models.checkpoint import (
    CheckpointEntry,
    Pairs,
    Permute,
    Shapes,
    Transform,
    halve_pairs,
    is_transposed,
    transposed,
)

#: Names that the map, or that of an older package, does not know, of layers those of the first.
_ALIASES = {
    "model.embed_positions.weight": "position_embd.weight",
    "model.embed_norm.weight": "token_embd_norm.weight",
    "model.embed_norm.bias": "token_embd_norm.bias",
    "model.layers.0.mlp.gate.e_score_correction_bias": "blk.0.exp_probs_b.bias",
    "model.embed_types.weight": "token_types.weight",
    **{f"model.layers.0.attention_norm.{kind}": f"blk.0.attn_output_norm.{kind}" for kind in ("weight", "bias")},
    **{f"model.layers.0.mlp_norm.{kind}": f"blk.0.layer_output_norm.{kind}" for kind in ("weight", "bias")},
    **{f"head.out.{kind}": f"cls.output.{kind}" for kind in ("weight", "bias")},
}
#: The norms of a Falcon that has two of them, which are the other way round.
_FALCON_NORMS = {"input_layernorm": "attn_norm_2", "post_attention_layernorm": "attn_norm"}
#: Matrices that some architectures have one below the other, by the name of the whole.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
#: Keys and values of latent attention, which files have in one matrix, or in two for each head.
_KEYS_VALUES, _KEYS, _VALUES = "attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_BLOCK = re.compile(r"blk\.\d+\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")


def tensors_by_source(arch: str, names: Sequence[str], held: Iterable[str]) -> dict[str, list[str]]:
    """A network's tensors by the name of the tensor that has them in a file, one below the other in this order.

    Args:
        arch: the value of general.architecture.
        names: of all tensors of the network.
        held: names of the file's tensors, which say whether matrices are fused.

    Raises:
        UnsupportedModelError: files of the architecture have no such tensor.
    """
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == arch)
    known = get_tensor_name_map(kind, 1)
    held = {_BLOCK.sub("blk.0.", name) for name in held}
    has_two_norms = arch == "falcon" and any(".post_attention_layernorm." in name for name in names)

    def source_of(stem: str, ending: str) -> str | None:
        return known.get_name(f"{stem}.{ending}", (".weight", ".bias"))

    @functools.cache
    def find(name: str) -> str:
        """The source of a tensor, of layers that of the first, of experts that of all of them."""
        stem, _, ending = name.rpartition(".")
        before, _, part = stem.rpartition(".")
        if has_two_norms and part in _FALCON_NORMS:
            return f"blk.0.{_FALCON_NORMS[part]}.{ending}"
        for whole, parts in _FUSED.items():
            if part in parts and (fused := source_of(f"{before}.{whole}", ending)) in held:
                apart = [source_of(f"{before}.{other}", ending) for other in parts]
                if apart[0] is None or fused not in apart:
                    return str(fused)
        source = _ALIASES.get(name) or source_of(stem, ending)
        if source is None:
            raise UnsupportedModelError(f"GGUF files of architecture {arch!r} have no tensor for {name!r}")
        return source

    sources: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.search(name)
        source = find(_EXPERT.sub(".experts.", _LAYER.sub(".layers.0.", name)))
        sources.setdefault(_BLOCK.sub(f"blk.{layer and layer[1]}.", source), []).append(name)
    return sources


def layouts(arch: str, config: ModelConfig) -> list[CheckpointEntry]:
    """What leads from the layout of files to that of checkpoints in transformers, under the network's names."""
    if arch == "llama":  # the rows of a head's two halves take turns
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        return [Permute(rf"\.{name}\.", halve_pairs(count, config.head_dim)) for name, count in heads.items()]
    if arch.startswith("gemma"):
        return [Transform(r"norm\.weight$", lambda weight: weight - 1)]
    return []


@dataclass(frozen=True)
class _TensorPlace:
    """Where a tensor of the network is: consecutive rows of one in the file; of one dimension, consecutive values."""

    shape: tuple[int, ...]
    source: GGUFTensor
    part: slice


class GGUFCheckpoint:
    """The tensors of a network in a GGUF file; all are found before one is read."""

    def __init__(self, path: Path, config: ModelConfig, shapes: Shapes) -> None:
        """Finds the tensors of ``shapes``, those of the whole network of ``config``.

        Raises:
            WeightError: the file is damaged, or a tensor is missing or of the wrong shape.
            UnsupportedModelError: there is one that the network does not have, or of a type that is not supported.
        """
        self.file = GGUFFile(path)
        self._config, self._shapes = config, shapes
        self._arch = str(self.file.metadata.get("general.architecture"))
        self._places: dict[str, _TensorPlace] = {}
        #: Keys [H, R, N] and values [H, W, R] of latent attention, where they are two tensors.
        self._split: dict[str, tuple[GGUFTensor, GGUFTensor]] = {}
        self._unused = set(self.file.tensors) - ROPE_TABLES
        for source, names in tensors_by_source(self._arch, [*shapes], self.file.tensors).items():
            if source.endswith(_KEYS_VALUES) and source not in self.file.tensors:
                self._find_split(source, names[0])
            else:
                self._find(source, names)
        if self._unused:
            raise UnsupportedModelError(
                f"{path} has tensors that a {config.architecture} does not: {', '.join(sorted(self._unused)[:5])}"
            )

    def read(
        self,
        names: Container[str],
        checkpoint_map: Sequence[CheckpointEntry],
        dtype: DType | None,
    ) -> Generator[tuple[str, np.ndarray | QuantizedRows]]:
        """The tensors ``names`` of the network, in the layouts that its checkpoint map expects.

        Args:
            names: of the tensors that are read.
            checkpoint_map: of the network. What it transposes is passed transposed, as files do not have it so.
            dtype: of the values; None: quantised matrices stay in their blocks, everything else is float32.
        """
        pairs: Pairs = ((name, self._read(name, dtype)) for name in self._shapes if name in names)
        for entry in layouts(self._arch, self._config):
            pairs = entry.apply(pairs, self._shapes)
        for name, tensor in pairs:
            if isinstance(tensor, np.ndarray) and dtype is not None:
                tensor = rounded(tensor, dtype)
            yield name, transposed(tensor) if is_transposed(name, checkpoint_map) else tensor

    def read_all(self) -> Iterator[tuple[str, np.ndarray]]:
        """All tensors of the file under their names there, float32."""
        return ((name, self._values(tensor)) for name, tensor in self.file.tensors.items())

    def _find(self, source: str, names: Sequence[str]) -> None:
        shapes = [self._shapes[name] for name in names]
        if "_exps." in source:
            tensor = self._tensor(source, (len(names), *shapes[0]))
        else:
            tensor = self._tensor(source, (sum(shape[0] for shape in shapes), *shapes[0][1:]))
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            stop = start + math.prod(shape if len(tensor.shape) == 1 else shape[:-1])
            self._places[name] = _TensorPlace(shape, tensor, slice(start, stop))
            start = stop

    def _find_split(self, source: str, name: str) -> None:
        rows, rank = self._shapes[name]
        prefix, heads = source.removesuffix(_KEYS_VALUES), self._config.num_heads
        keys = self._tensor(prefix + _KEYS, (heads, rank, None))
        values = self._tensor(prefix + _VALUES, (heads, rows // heads - keys.shape[-1], rank))
        self._split[name] = keys, values

    def _tensor(self, name: str, shape: tuple[int | None, ...]) -> GGUFTensor:
        """A tensor of this shape; sizes of 1 do not count, which files do not hold everywhere."""
        tensor = self.file.tensors.get(name)
        if tensor is None:
            raise WeightError(f"{self.file.path} has no tensor {name!r}")
        sizes, expected = ([size for size in sizes if size != 1] for sizes in (tensor.shape, shape))
        if len(sizes) != len(expected) or any(b not in (None, a) for a, b in zip(sizes, expected, strict=True)):
            raise WeightError(
                f"{self.file.path}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        self._unused.discard(name)
        return tensor

    def _read(self, name: str, dtype: DType | None) -> np.ndarray | QuantizedRows:
        if name in self._split:
            keys, values = (self._values(tensor).reshape(tensor.shape) for tensor in self._split[name])
            joined = np.concatenate([keys.transpose(0, 2, 1), values], axis=1)
            return joined.reshape(-1, joined.shape[2])
        place = self._places[name]
        source, shape = place.source, place.shape
        if len(source.shape) == 1:
            return self._values(source).ravel()[place.part].reshape(shape)
        block = GGML_QUANT_SIZES[source.type][0]
        if dtype is None and block > 1:
            return GGUFRows(source.type.name, self.file.read_rows(source, place.part), shape[-1], block)
        rows = self.file.read_rows(source, place.part)
        return dequantize(source.type.name, rows, dtype or DType.FLOAT32).reshape(shape)

    def _values(self, tensor: GGUFTensor) -> np.ndarray:
        """All values, float32 [rows, columns]."""
        return dequantize(tensor.type.name, self.file.read_rows(tensor))
