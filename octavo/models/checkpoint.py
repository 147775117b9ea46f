"""Maps the tensors of a checkpoint to those that a network's layers expect (as vLLM's WeightsMapper does).

``Network.checkpoint_map`` is a list of entries, each of which transforms the stream of (name, tensor) pairs; pairs that
an entry does not match pass unchanged. Checkpoints that use the names of the layers need no entries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from octavo.core.errors import WeightError
from octavo.kernels.weight_rows import GGUFRows, QuantizedRows, to_values

Tensor = np.ndarray | QuantizedRows
Pairs = Iterable[tuple[str, Tensor]]
#: Names of the tensors that the whole network expects, with their shapes.
Shapes = Mapping[str, tuple[int, ...]]


class SplitError(WeightError):
    """A tensor of the checkpoint has other rows than its parts in the network together."""

    def __init__(self, problem: str = "", *, file: str | Path | None = None, parts: Sequence[str] = ()) -> None:
        """``parts``: the network's names of the parts."""
        super().__init__(problem, file=file)
        self.parts = parts


class CheckpointEntry(Protocol):
    """One transformation of names or tensors."""

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        """The transformed stream."""


@dataclass(frozen=True)
class Drop:
    """Skips tensors with names that contain a match of the pattern, unless the network expects them."""

    pattern: str

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in pairs if name in shapes or not re.search(self.pattern, name))


@dataclass(frozen=True)
class DropPart:
    """Skips tensors with names that begin with ``prefix``, if the network expects none of such names."""

    prefix: str

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        unused = not any(name.startswith(self.prefix) for name in shapes)
        return ((name, tensor) for name, tensor in pairs if not (unused and name.startswith(self.prefix)))


@dataclass(frozen=True)
class Rename:
    """Replaces matches of the pattern in names, as ``re.sub`` does."""

    pattern: str
    replacement: str

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        return ((self.renamed(name), tensor) for name, tensor in pairs)

    def renamed(self, name: str) -> str:
        return re.sub(self.pattern, self.replacement, name)


@dataclass(frozen=True)
class Split:
    """Splits a tensor of the checkpoint by rows: ``Split("qkv_proj", ("q_proj", "k_proj", "v_proj"))``.

    ``whole`` and ``parts`` are components of dotted names. Each part gets as many rows as the network expects.
    """

    whole: str
    parts: tuple[str, ...]

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs:
            before, matches, after = _partition(name, self.whole)
            if not matches:
                yield name, tensor
                continue
            names = [f"{before}{part}{after}" for part in self.parts]
            if unknown := [part for part in names if part not in shapes]:
                raise WeightError(f"tensor {name!r} holds {unknown[0]!r}, which belongs to no layer of this network")
            counts = [shapes[part][0] for part in names]
            if tensor.shape[0] != sum(counts):
                parts = " + ".join(f"{count} ({part})" for part, count in zip(self.parts, counts, strict=True))
                problem = f"tensor {name!r} has {tensor.shape[0]} rows, expected {sum(counts)} = {parts}"
                raise SplitError(problem, parts=names)
            start = 0
            for part, count in zip(names, counts, strict=True):
                rows = slice(start, start + count)
                yield part, tensor.take(rows, slice(None)) if isinstance(tensor, QuantizedRows) else tensor[rows]
                start += count


@dataclass(frozen=True)
class Unstack:
    """Splits a tensor [experts, rows, columns] by experts, and each of them by rows into equal parts.

    ``Unstack("gate_up_proj", ("gate_proj", "up_proj"))`` makes ``experts.0.gate_proj.weight`` and so on of
    ``experts.gate_up_proj``. ``transposed``: the tensor is [experts, columns, rows]; None: either, as its shape says.
    """

    whole: str
    parts: tuple[str, ...]
    transposed: bool | None = False

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs:
            before, matches, _ = _partition(name, f"experts.{self.whole}")
            if not matches or not isinstance(tensor, np.ndarray) or tensor.ndim != 3:
                yield name, tensor
                continue
            transposed = self.transposed
            if transposed is None:
                expected = shapes.get(f"{before}experts.0.{self.parts[0]}.weight", (0, tensor.shape[2]))
                transposed = tensor.shape[2] != expected[1]
            if transposed:
                tensor = tensor.transpose(0, 2, 1)
            if tensor.shape[1] % len(self.parts):
                raise WeightError(f"tensor {name!r} has {tensor.shape[1]} rows, no multiple of {len(self.parts)}")
            for index, expert in enumerate(tensor):
                for part, rows in zip(self.parts, np.split(expert, len(self.parts)), strict=True):
                    yield f"{before}experts.{index}.{part}.weight", rows


@dataclass(frozen=True)
class Join:
    """Concatenates the rows of several tensors of the checkpoint, in the order of ``parts``.

    ``parts`` and ``whole`` are components of dotted names. Parts are kept in memory until the last one is read. With
    ``stack`` each part becomes a row.
    """

    parts: tuple[str, ...]
    whole: str
    stack: bool = False

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        waiting: dict[str, dict[str, np.ndarray]] = {}
        for name, tensor in pairs:
            for part in self.parts:
                before, matches, after = _partition(name, part)
                if matches:
                    break
            else:
                yield name, tensor
                continue
            whole = f"{before}{self.whole}{after}"
            held = waiting.setdefault(whole, {})
            if part in held:
                raise WeightError(f"tensor {name!r} occurs twice")
            values = to_values(tensor)
            held[part] = values[None] if self.stack else values
            if len({values.shape[1:] for values in held.values()}) > 1:
                raise WeightError(
                    f"tensor {name!r} of shape {list(tensor.shape)} has other columns than the other parts of tensor "
                    f"{whole!r}"
                )
            if len(held) == len(self.parts):
                del waiting[whole]
                parts = [held[part] for part in self.parts]
                if all(map(has_values, parts)):
                    yield whole, np.concatenate(parts)
                else:
                    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
                    yield whole, without_values(shape, parts[0].dtype)
        for whole, held in waiting.items():
            absent = next(part for part in self.parts if part not in held)
            raise WeightError(f"the checkpoint lacks the part {absent!r} of tensor {whole!r}")


@dataclass(frozen=True)
class Only:
    """Drops the first dimension of size 1 of tensors with names that match, such as a bias [1, outputs]."""

    pattern: str

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs:
            if isinstance(tensor, np.ndarray) and tensor.shape[:1] == (1,) and re.search(self.pattern, name):
                tensor = tensor[0] if tensor.ndim > 1 else tensor
            yield name, tensor


@dataclass(frozen=True)
class ZerosFor:
    """Zeros for tensors with names that match, where the network expects them and the checkpoint lacks them."""

    pattern: str

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        missing = {name for name in shapes if re.search(self.pattern, name)}
        for name, tensor in pairs:
            missing.discard(name)
            yield name, tensor
        for name in sorted(missing):
            yield name, np.zeros(shapes[name], np.float32)


@dataclass(frozen=True)
class SameAs:
    """The tensor ``other`` also as ``name``, where the network expects that name and the checkpoint lacks it."""

    name: str
    other: str

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        source: Tensor | None = None
        is_missing = self.name in shapes
        for name, tensor in pairs:
            is_missing = is_missing and name != self.name
            source = tensor if name == self.other else source
            yield name, tensor
        if is_missing and source is not None:
            yield self.name, source


@dataclass(frozen=True)
class Transform:
    """Applies a function to tensors with names that match: ``Transform(r"c_attn\\.weight$", transpose)``.

    All functions but ``transpose`` keep the shape.
    """

    pattern: str
    function: Callable[[np.ndarray], np.ndarray]

    def transposes(self, name: str) -> bool:
        return self.function is transpose and re.search(self.pattern, name) is not None

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs:
            if not re.search(self.pattern, name):
                yield name, tensor
            elif self.transposes(name):
                yield name, transpose(tensor)
            else:
                values = to_values(tensor)
                yield name, self.function(values) if has_values(values) else values


@dataclass(frozen=True)
class Permute:
    """Reorders the rows of tensors with names that match, such as ``Permute(r"query_key_value", ungroup_heads(4, 4))``.

    ``order`` gives, for a number of rows, the row to take for each row of the result. It raises ValueError if it does
    not fit that number: the tensor is then passed on, for the layer or a ``Split`` to refuse its shape by name.
    """

    pattern: str
    order: Callable[[int], np.ndarray]
    #: Whether columns are reordered instead.
    columns: bool = False

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs:
            if re.search(self.pattern, name):
                with suppress(ValueError):
                    order = self.order(tensor.shape[-1 if self.columns else 0])
                    if isinstance(tensor, GGUFRows) and self.columns:
                        tensor = tensor.reorder_columns(order)
                    elif self.columns:
                        tensor = to_values(tensor)[..., order]
                    elif isinstance(tensor, QuantizedRows):
                        tensor = tensor.reorder(order)
                    elif has_values(tensor):
                        tensor = tensor[order]
            yield name, tensor


def ungroup_heads(heads: int, kv_heads: int) -> Callable[[int], np.ndarray]:
    """For rows that are grouped by KV head: in each group its query heads, then a key and a value head.

    The order has all queries first, then the keys, then the values.
    """

    def order(rows: int) -> np.ndarray:
        groups = np.arange(rows).reshape(kv_heads, heads // kv_heads + 2, -1)
        return np.concatenate([part.ravel() for part in (groups[:, :-2], groups[:, -2], groups[:, -1])])

    return order


def halve_pairs(heads: int, rotated: int) -> Callable[[int], np.ndarray]:
    """For rows of heads whose first ``rotated`` dimensions are rotated in pairs of neighbours: 0 and 1, 2 and 3.

    The order has the first of each pair, then the second ones, as ``Kernels.rotary`` pairs them. Queries and keys that
    are permuted alike have the same products.
    """

    def order(rows: int) -> np.ndarray:
        dims = np.arange(rows).reshape(heads, -1)
        return np.concatenate((dims[:, 0:rotated:2], dims[:, 1:rotated:2], dims[:, rotated:]), axis=1).ravel()

    return order


def without_values(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A stand-in for a tensor of which only the header is read; it takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def has_values(tensor: np.ndarray) -> bool:
    """Whether the tensor is no stand-in made by ``without_values``."""
    return tensor.size <= 1 or any(tensor.strides)


def is_transposed(name: str, entries: Iterable[CheckpointEntry]) -> bool:
    """Whether a ``checkpoint_map`` transposes the checkpoint's tensor ``name``."""
    for entry in entries:
        if isinstance(entry, Rename):
            name = entry.renamed(name)
        elif isinstance(entry, Transform) and entry.transposes(name):
            return True
    return False


def transpose(tensor: Any) -> Any:
    """[N, K] to [K, N] as a view, for checkpoints such as those of GPT-2's Conv1D; quantised rows keep their bits."""
    return tensor.t() if isinstance(tensor, QuantizedRows) else tensor.T


def _partition(name: str, component: str) -> tuple[str, bool, str]:
    """The text before a component of a dotted name, whether the component occurs, and the text after it."""
    match = re.search(rf"(?:^|(?<=\.)){re.escape(component)}(?=\.|$)", name)
    return (name[: match.start()], True, name[match.end() :]) if match else (name, False, "")
