"""What the formats of LoRA adapters have in common: pairs of matrices for modules of a network (Hu et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.errors import AdapterError
from octavo.loader.adapters.targets import AdapterTargets

#: By layer, then by part: A [rank, in] and B [out, rank], whole matrices in float32, the scale in B.
LoraWeights = dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The product B A that an adapter adds to a module's weight, times a scale."""

    #: Of transformers' network.
    module: str
    #: Names of the tensors A [rank, in] and B [out, rank] in the file, and these shapes.
    down: str
    up: str
    down_shape: tuple[int, ...]
    up_shape: tuple[int, ...]
    scale: float
    #: Which row of the file's B each row of B is; None: the same.
    row_order: np.ndarray | None = None
    #: Whether the file has A transposed.
    down_transposed: bool = False

    @property
    def rank(self) -> int:
        """Rows of A."""
        return self.down_shape[0]


def check_pairs(pairs: Sequence[LoraPair], targets: AdapterTargets, max_rank: int, where: str) -> int:
    """The largest rank of the pairs, which all fit the network.

    Raises:
        AdapterError: one does not, or has a rank above ``max_rank``; the message names the tensor.
    """
    if not pairs:
        raise AdapterError(f"{where} holds no low-rank matrices")
    adapted: dict[tuple[str, str], str] = {}
    for pair in pairs:
        if len(pair.down_shape) != 2 or len(pair.up_shape) != 2:
            name, shape = (pair.down, pair.down_shape) if len(pair.down_shape) != 2 else (pair.up, pair.up_shape)
            raise AdapterError(f"{where}: tensor {name!r} has shape {list(shape)}; expected two dimensions")
        rank = pair.rank
        if not 1 <= rank <= max_rank:
            raise AdapterError(
                f"{where}: tensor {pair.down!r} has rank {rank}; served are ranks of 1 to {max_rank} (max_lora_rank)"
            )
        if pair.up_shape[1] != rank:
            raise AdapterError(
                f"{where}: tensor {pair.up!r} has {pair.up_shape[1]} columns, expected the rank {rank} of {pair.down!r}"
            )
        try:
            found = targets.find(pair.module, np.empty((pair.up_shape[0], 0), np.float32))
        except AdapterError as e:
            raise AdapterError(f"{where}: tensor {pair.up!r} cannot be used: {e}") from None
        for target, _ in found:
            if pair.down_shape[1] != target.inputs:
                raise AdapterError(
                    f"{where}: tensor {pair.down!r} has {pair.down_shape[1]} columns, but {pair.module!r} has "
                    f"{target.inputs} inputs"
                )
            place = (target.layer, target.part)
            if place in adapted:
                raise AdapterError(f"{where}: tensors {adapted[place]!r} and {pair.up!r} are for the same matrix")
            adapted[place] = pair.up
    return max(pair.rank for pair in pairs)


def assemble(
    pairs: Sequence[LoraPair], tensors: Mapping[str, np.ndarray], targets: AdapterTargets, where: str
) -> LoraWeights:
    """The weights of an adapter whose pairs were checked.

    Args:
        pairs: of the file.
        tensors: of the file, float32, by name.
        targets: of the network.
        where: the file, for errors.

    Raises:
        AdapterError: a value is infinite or not a number.
    """
    weights: LoraWeights = {}
    for pair in pairs:
        down, up = tensors[pair.down], tensors[pair.up]
        for name, tensor in ((pair.down, down), (pair.up, up)):
            # A sum of finite numbers is finite, unless they are so large that they are counted; it is one quick pass.
            with np.errstate(all="ignore"):
                total = tensor.sum()
            if not math.isfinite(total) and (bad := tensor.size - np.count_nonzero(np.isfinite(tensor))):
                raise AdapterError(f"{where}: {bad} of the values of tensor {name!r} are infinite or not a number")
        if pair.down_transposed:
            down = np.ascontiguousarray(down.T)
        if pair.row_order is not None:
            up = up[pair.row_order]
        up = up * pair.scale
        for target, rows in targets.find(pair.module, up):
            weights.setdefault(target.layer, {})[target.part] = (down, rows)
    return weights
