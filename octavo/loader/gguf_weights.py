"""The tensors of a GGUF file under transformers' names and in its layouts, checked against the architecture's table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.core.errors import UnsupportedModelError, WeightError
from octavo.loader.gguf_architectures import Architecture
from octavo.loader.gguf_entries import Entry
from octavo.loader.gguf_file import GGUFFile, GGUFTensor, dequantized
from octavo.loader.gguf_keys import Keys


@dataclass(frozen=True)
class Weight:
    """A tensor with its name and shape in transformers, and how the file holds it."""

    name: str
    shape: tuple[int, ...]
    source: GGUFTensor
    entry: Entry
    #: Rows of the source.
    rows: slice
    #: Query heads, KV heads and the size of a head, where the rows must be reordered.
    heads: tuple[int, int, int]
    beside: GGUFTensor | None = None

    def blocks(self, file: GGUFFile) -> np.ndarray:
        """The rows in transformers' order and the file's format, uint8 [rows, bytes of a row]."""
        rows = file.read_rows(self.source, self.rows)
        if self.entry.order is None:
            return rows
        if len(self.source.shape) == 1:  # a bias is one row of the file: its values are reordered
            rows = rows.reshape(self.source.shape[0], -1)
        return rows[row_order(self.entry.order, len(rows), *self.heads)]

    def pieces(self, file: GGUFFile) -> Iterator[np.ndarray]:
        """The values in transformers' layout, float32: contiguous arrays that follow each other in memory."""
        if self.beside is not None:
            yield self._latent_keys_and_values(file, self.beside)
        elif self.entry.transposed:
            rows = np.concatenate([*file.read_pieces(self.source, self.rows)])
            yield np.ascontiguousarray(rows.T)
        elif self.entry.order is not None:
            yield dequantized(self.blocks(file), self.source.type)
        else:
            for piece in file.read_pieces(self.source, self.rows):
                yield piece - np.float32(self.entry.added)

    def _latent_keys_and_values(self, file: GGUFFile, beside: GGUFTensor) -> np.ndarray:
        """Each head's rows for keys [N, R], which the file has transposed, and then for values [W, R]."""
        keys, values = (np.concatenate([*file.read_pieces(t)]).reshape(t.shape) for t in (self.source, beside))
        return np.ascontiguousarray(np.concatenate([keys.swapaxes(1, 2), values], axis=1))


def row_order(order: str, rows: int, heads: int, kv_heads: int, head: int) -> np.ndarray:
    """The rows of a file in the order of transformers, int64 [rows]; see ``RowOrder``."""
    index = np.arange(rows)
    if order == "interleaved":
        return index.reshape(-1, head // 2, 2).swapaxes(1, 2).reshape(-1)
    query, key, value = np.split(index, np.cumsum([heads * head, kv_heads * head]))
    parts = [part.reshape(kv_heads, -1) for part in (query, key, value)]
    return np.concatenate(parts, axis=1).reshape(-1)


def weights_of(keys: Keys, architecture: Architecture, config: dict[str, Any]) -> list[Weight]:
    """All tensors of the network, checked before any is read.

    Raises:
        WeightError: one is missing or of the wrong shape.
        UnsupportedModelError: there is one that the architecture does not have.
    """
    file, sizes = keys.file, keys.sizes | {k: v for k, v in config.items() if isinstance(v, int)}
    weights: list[Weight] = []
    used = set(keys.used_tensors)
    heads = (sizes["H"], sizes["G"], sizes["D"])

    def find(source: str, shape: tuple[int, ...]) -> GGUFTensor:
        tensor = file.tensors.get(source)
        if tensor is None:
            raise WeightError(f"{file.path} has no tensor {source!r}")
        if _squeezed(tensor.shape) != _squeezed(shape):
            raise WeightError(f"{file.path}: tensor {source!r} has shape {list(tensor.shape)}, expected {list(shape)}")
        used.add(source)
        return tensor

    for entry in _entries(architecture, config, keys):
        shape = _shape(entry.shape, sizes)
        tensor = find(entry.source, shape)
        if entry.beside is None:
            weights += _split(entry, tensor, shape, heads)
        else:
            source, words = entry.beside
            beside = find(source, _shape(words, sizes))
            heads_, rank, rows = shape
            joined = (heads_ * (rows + beside.shape[1]), rank)
            weights.append(Weight(entry.name, joined, tensor, entry, slice(0, tensor.rows), heads, beside))
    if unknown := sorted(file.tensors.keys() - used):
        raise UnsupportedModelError(
            f"{file.path} has tensors that a {config['model_type']} model does not: {', '.join(unknown[:5])}"
        )
    return weights


def _entries(architecture: Architecture, config: dict[str, Any], keys: Keys) -> Iterator[Entry]:
    """The tensors that a model of this configuration has, under whole names."""
    facts = config | keys.traits
    for entry in architecture.others:
        if _applies(entry, facts):
            yield entry
    for i in range(keys.sizes["L"]):
        prefix = architecture.prefix.format(i=i)
        for entry in architecture.layer:
            if _applies(entry, facts, i):
                beside = entry.beside and (f"blk.{i}.{entry.beside[0]}", entry.beside[1])
                yield replace(entry, source=f"blk.{i}.{entry.source}", name=prefix + entry.name, beside=beside)


def _applies(entry: Entry, facts: dict[str, Any], layer: int = 0) -> bool:
    if entry.when is None:
        return True
    fact = facts.get(entry.when.removeprefix("!"))
    return bool(fact[layer] if isinstance(fact, list) else fact) != entry.when.startswith("!")


def _shape(words: str, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(_size(word, sizes) for word in words.split())


def _size(word: str, sizes: dict[str, int]) -> int:
    """The number that a word of ``Entry.shape`` means."""
    total = 0
    for term in word.split("+"):
        name = term.lstrip("0123456789")
        factor = term.removesuffix(name)
        total += int(factor or 1) * (sizes[name] if name else 1)
    return total


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without sizes of 1, which files do not hold everywhere."""
    return tuple(size for size in shape if size != 1)


def _split(entry: Entry, tensor: GGUFTensor, shape: tuple[int, ...], heads: tuple[int, int, int]) -> Iterator[Weight]:
    """The tensor itself, or the matrix of each expert."""
    if "{e}" not in entry.name:
        shape = shape[::-1] if entry.transposed else shape
        yield Weight(entry.name, shape, tensor, entry, slice(0, tensor.rows), heads)
        return
    rows = shape[1]
    for e in range(shape[0]):
        part = slice(e * rows, (e + 1) * rows)
        yield Weight(entry.name.replace("{e}", str(e)), shape[1:], tensor, entry, part, heads)
