"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them.

Tensors are named as the model's, with ``.lora_a`` [rank, in] and ``.lora_b`` [out, rank] behind; of the embedding the
first is transposed. Rows are in the order of the model's GGUF files, which differs from transformers' for some.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.errors import AdapterError, OctavoError
from octavo.kernels.gguf_rows import dequantize
from octavo.loader.adapters.lora_pairs import LoraPair
from octavo.loader.adapters.targets import AdapterTargets
from octavo.loader.gguf_config import ARCHITECTURES
from octavo.loader.gguf_file import GGUFFile
from octavo.loader.gguf_weights import layouts, tensors_by_source
from octavo.models.checkpoint import Permute

_DOWN, _UP = ".lora_a", ".lora_b"
_EMBEDDING = "token_embd.weight"
_BLOCK = re.compile(r"blk\.(\d{1,6})\.")
_LAYER = re.compile(r"\.layers\.\d+\.")


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


def read_pairs(file: GGUFFile, targets: AdapterTargets) -> list[LoraPair]:
    """The pairs of matrices of a file, for a model.

    Raises:
        AdapterError: it is for another architecture, or a tensor is none of its matrices or lacks its partner.
    """
    arch, architecture = file.metadata.get("general.architecture"), targets.config.architecture
    kinds = {kind.split()[0] for kind, (name, _) in ARCHITECTURES.items() if name == architecture}
    if arch not in kinds:
        expected = " or ".join(map(repr, kinds)) or "none: the model's architecture has no GGUF files here"
        raise AdapterError(
            f"{file.path} is an adapter for the architecture {arch!r}; the model ({architecture}) takes {expected}"
        )
    alpha = _alpha(file)
    for tensor in file.tensors:
        if not tensor.endswith((_DOWN, _UP)):
            raise AdapterError(
                f"{file.path}: tensor {tensor!r} is no low-rank matrix: expected names such as "
                "blk.0.attn_q.weight.lora_a"
            )
    sources = dict.fromkeys(tensor.removesuffix(_DOWN).removesuffix(_UP) for tensor in file.tensors)
    # Of any layer, so that one that the model does not have is named.
    by_source = {
        _BLOCK.sub("blk.{}.", source): [_LAYER.sub(".layers.{}.", name) for name in names]
        for source, names in tensors_by_source(arch, [*targets.shapes], sources).items()
    }
    pairs: list[LoraPair] = []
    for source in sources:
        names = by_source.get(_BLOCK.sub("blk.{}.", source))
        if names is None or "_exps." in source:
            raise AdapterError(f"{file.path}: there are no adapters of the tensor {source!r} for this model")
        block = _BLOCK.match(source)
        modules = [name.format(block and block[1]) for name in dict.fromkeys(names)]
        pairs += _pairs(file, source, modules, alpha, targets)
    return pairs


def read_values(file: GGUFFile) -> dict[str, np.ndarray]:
    """All tensors of the file, float32.

    Raises:
        AdapterError: it became shorter, or cannot be read.
    """
    try:
        return {
            name: dequantize(tensor.type.name, file.read_rows(tensor)).reshape(tensor.shape)
            for name, tensor in file.tensors.items()
        }
    except (OctavoError, OSError) as e:
        raise AdapterError(str(e)) from None


def _pairs(
    file: GGUFFile, source: str, names: Sequence[str], alpha: float, targets: AdapterTargets
) -> Iterator[LoraPair]:
    """A pair for each of the network's tensors ``names``, which ``source`` has one below the other."""
    down, up = file.tensors.get(source + _DOWN), file.tensors.get(source + _UP)
    if down is None or up is None:
        present, absent = (_UP, _DOWN) if down is None else (_DOWN, _UP)
        raise AdapterError(f"{file.path}: tensor {source + present!r} has no partner {source + absent!r}")
    transposed = source == _EMBEDDING
    down_shape = down.shape[::-1] if transposed else down.shape
    # As llama.cpp has it, no alpha means no scaling.
    scale = alpha / up.shape[-1] if alpha else 1.0
    counts = [up.rows] if len(names) == 1 else [targets.shapes.get(name, (0,))[0] for name in names]
    if sum(counts) != up.rows:
        raise AdapterError(f"{file.path}: tensor {up.name!r} has {up.rows} rows, expected {sum(counts)}")
    start = 0
    for name, count in zip(names, counts, strict=True):
        order = np.arange(start, start + count)
        for entry in layouts(str(file.metadata["general.architecture"]), targets.config):
            if isinstance(entry, Permute) and re.search(entry.pattern, name):
                try:
                    order = order[entry.order(count)]
                except ValueError:
                    raise AdapterError(
                        f"{file.path}: tensor {up.name!r} has {count} rows, which no heads have"
                    ) from None
        module, up_shape = name.removesuffix(".weight"), (count, *up.shape[1:])
        yield LoraPair(module, down.name, up.name, down_shape, up_shape, scale, order, transposed)
        start += count


def _alpha(file: GGUFFile) -> float:
    alpha: Any = file.metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not abs(alpha) < 1e30:
        raise AdapterError(f"{file.path}: adapter.lora.alpha must be a number, not {alpha!r}")
    return float(alpha)
