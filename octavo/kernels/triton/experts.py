"""Experts on a GPU: grouped products, one launch for gate and up of all experts, one for down, and one for the sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.kernels.interface import Activation, PackedExperts, PackedHeads, PackedWeight
from octavo.kernels.triton.elementwise import FUNCTIONS, GATED_FUNCTIONS, rounded
from octavo.kernels.triton.mxfp4 import TritonMXFP4Weight, product_of_rows
from octavo.kernels.triton.quant import TritonDenseWeight

#: Rows of a tile for experts with few pairs, and with many.
_FEW_PAIRS, _MANY_PAIRS = 16, 64
_COLUMNS = 64


@dataclass(frozen=True)
class TritonExperts(PackedExperts):
    """Experts that are not quantised, or of MXFP4."""

    #: [experts, 2 * inner or, without gates, inner, E] and [experts, E, inner]; of MXFP4 the last dimension is bytes.
    gate_up: Tensor
    down: Tensor
    #: (gate and up, down) of each expert that every token has, of any size.
    shared: Sequence[tuple[PackedWeight, PackedWeight]]
    deterministic: bool
    #: Of gate and up, [experts, 2 * inner].
    bias: Tensor | None = None
    activation: Activation = "silu"
    weighs_input: bool = False
    gated: bool = True

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, add: Tensor | None = None) -> Tensor:
        """Shared experts are ordinary products, added last."""
        routed = experts.shape[1] - len(self.shared)
        out = self._routed(x, experts[:, :routed], weights[:, :routed].contiguous(), add)
        for i, (gate_up, down) in enumerate(self.shared):
            out += down(gate_up(x, activation=self.activation), DType.FLOAT32) * weights[:, routed + i, None]
        return out

    def _routed(self, x: Tensor, chosen: Tensor, weights: Tensor, add: Tensor | None) -> Tensor:
        (tokens, slots), (count, hidden, _) = chosen.shape, self.down.shape
        inner = self.gate_up.shape[1] // 2 if self.gated else self.gate_up.shape[1]
        out = add if add is not None else torch.empty((tokens, hidden), dtype=torch.float32, device=x.device)
        pairs = tokens * slots
        if not pairs:
            return out
        if self.gate_up.dtype != torch.uint8:  # of MXFP4
            x = x.to(self.gate_up.dtype)
        few = self.deterministic or pairs <= _FEW_PAIRS * count
        rows, depth = _FEW_PAIRS if few else _MANY_PAIRS, 32 if x.dtype == torch.float32 else 64
        place, of_tile = sort_pairs(chosen, count, rows)
        parts = torch.empty((pairs, hidden), dtype=torch.float32, device=x.device)
        slots_of_row = slots
        if self.weighs_input:
            x = (x.unsqueeze(1) * weights.unsqueeze(2)).to(x.dtype).flatten(0, 1)
            slots_of_row, weights = 1, torch.ones_like(weights)
        inner_rows = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
        shape = {"ROWS": rows, "COLUMNS": _COLUMNS, "DEPTH": depth, "num_warps": 4, "enable_fp_fusion": False}
        tiles = len(of_tile)
        _gate_up_kernel[(tiles, triton.cdiv(inner, _COLUMNS))](
            x, self.gate_up, self.bias, inner_rows, place, of_tile, pairs, slots_of_row, inner, x.shape[1], x.stride(0),
            FUNCTION=(GATED_FUNCTIONS if self.gated else FUNCTIONS)[self.activation], GATED=self.gated, **shape,
        )  # fmt: skip
        _down_kernel[(tiles, triton.cdiv(hidden, _COLUMNS))](
            inner_rows, self.down, weights, parts, place, of_tile, pairs, hidden, inner, **shape
        )
        block = min(1024, triton.next_power_of_2(hidden))
        _sum_kernel[(tokens, triton.cdiv(hidden, block))](
            parts, chosen.argsort(1), add, out, hidden, SLOTS=slots, BLOCK=block, num_warps=4, enable_fp_fusion=False
        )
        return out


def pack_experts(
    gate_up: Sequence[PackedWeight],
    down: Sequence[PackedWeight],
    shared: int,
    activation: Activation,
    *,
    weighs_input: bool,
    deterministic: bool,
) -> TritonExperts:
    """See ``Kernels.pack_experts``; stacks the matrices of the routed experts."""
    routed = len(gate_up) - shared
    first, second = (torch.stack([_matrix(weight) for weight in weights[:routed]]) for weights in (gate_up, down))
    biases = [weight.bias for weight in gate_up[:routed] if isinstance(weight, (TritonDenseWeight, TritonMXFP4Weight))]
    bias = torch.stack([one for one in biases if one is not None]) if biases[0] is not None else None
    shared_experts = [*zip(gate_up[routed:], down[routed:], strict=True)]
    gated = gate_up[0].gated
    return TritonExperts(first, second, shared_experts, deterministic, bias, activation, weighs_input, gated)


def _matrix(weight: PackedWeight) -> Tensor:
    if isinstance(weight, TritonMXFP4Weight):
        return weight.blocks
    if isinstance(weight, TritonDenseWeight):
        return weight.weight
    raise ConfigError(
        "the triton kernels have products of experts of MXFP4, and of none that are quantised otherwise: set "
        "quantization='none', or kernels='cpu'"
    )


class TritonHeads(PackedHeads):
    """A matrix for each head, as an expert that every token has: the same bits in any batch."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [heads, N, K]

    def __call__(self, x: Tensor) -> Tensor:
        (tokens, heads, depth), columns = x.shape, self.weight.shape[1]
        out = torch.empty((tokens, heads, columns), dtype=torch.float32, device=x.device)
        if not tokens:
            return out.to(x.dtype)
        chosen = torch.arange(heads, device=x.device).expand(tokens, heads)
        place, of_tile = sort_pairs(chosen, heads, _FEW_PAIRS)
        _down_kernel[(len(of_tile), triton.cdiv(columns, _COLUMNS))](
            x.contiguous(), self.weight, torch.ones((tokens, heads), device=x.device), out, place, of_tile,
            tokens * heads, columns, depth,
            ROWS=_FEW_PAIRS, COLUMNS=_COLUMNS, DEPTH=32 if x.dtype == torch.float32 else 64, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
        return out.to(x.dtype)


def sort_pairs(chosen: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Sorts the pairs of token and slot by expert, into tiles of ``rows`` rows with one expert each.

    Args:
        chosen: int [T, slots], the experts of each token.
        experts: their number.

    Returns:
        Int32 [tiles * rows], pair t * slots + s or, of rows without one, T * slots; and int32 [tiles], the expert, or
        -1 of tiles without pairs. The number of tiles suffices for any choice.
    """
    flat = chosen.flatten().long()
    pairs = len(flat)
    tiles = min(pairs, (pairs + experts * (rows - 1)) // rows)
    counts = flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))
    ends = ((counts + rows - 1) // rows * rows).cumsum(0)
    starts = ends - (counts + rows - 1) // rows * rows
    of_pair, order = flat.sort(stable=True)
    within = torch.arange(pairs, device=flat.device) - (counts.cumsum(0) - counts)[of_pair]
    sorted_pairs = torch.full((tiles * rows,), pairs, dtype=torch.int32, device=flat.device)
    sorted_pairs[starts[of_pair] + within] = order.int()
    expert = torch.searchsorted(ends, torch.arange(tiles, device=flat.device) * rows, right=True)
    return sorted_pairs, expert.masked_fill(expert == experts, -1).int()


@triton.jit
def _pairs_of_tile(pairs_ptr, experts_ptr, pairs, ROWS: tl.constexpr):
    """(expert, or -1 of a tile without pairs; pairs of the tile's rows; which rows are pairs)."""
    tile = tl.program_id(0)
    pair = tl.load(pairs_ptr + tile * ROWS + tl.arange(0, ROWS))
    return tl.load(experts_ptr + tile), pair, pair < pairs


@triton.jit(do_not_specialize=["pairs"])
def _gate_up_kernel(
    x_ptr, weight_ptr, bias_ptr, hidden_ptr, pairs_ptr, experts_ptr, pairs, slots, inner, depth, x_stride,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """hidden[pair] = FUNCTION(gate, up) of the pair's token, or FUNCTION(up); weight [experts, (2 *) inner, depth]."""
    expert, pair, inside = _pairs_of_tile(pairs_ptr, experts_ptr, pairs, ROWS)
    if expert >= 0:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        x_rows = x_ptr + (pair // slots).to(tl.int64) * x_stride
        row = expert.to(tl.int64) * (2 if GATED else 1) * inner + tl.minimum(column, inner - 1)
        first = product_of_rows(x_rows, weight_ptr, row, inside, depth, ROWS, COLUMNS, DEPTH)
        if bias_ptr is not None:
            first += tl.load(bias_ptr + row).to(tl.float32)[None, :]
        if GATED:
            up = product_of_rows(x_rows, weight_ptr, row + inner, inside, depth, ROWS, COLUMNS, DEPTH)
            if bias_ptr is not None:
                up += tl.load(bias_ptr + row + inner).to(tl.float32)[None, :]
            result = FUNCTION(first, up)
        else:
            result = FUNCTION(first)
        out = rounded(result, hidden_ptr.dtype.element_ty)
        place = pair.to(tl.int64)[:, None] * inner + column[None, :]
        tl.store(hidden_ptr + place, out, inside[:, None] & (column < inner)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def _down_kernel(
    hidden_ptr, weight_ptr, scales_ptr, out_ptr, pairs_ptr, experts_ptr, pairs, columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[pair] = scale * down of the pair's hidden row; weight [experts, columns, depth]."""
    expert, pair, inside = _pairs_of_tile(pairs_ptr, experts_ptr, pairs, ROWS)
    if expert >= 0:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        hidden_rows = hidden_ptr + pair.to(tl.int64) * depth
        row = expert.to(tl.int64) * columns + tl.minimum(column, columns - 1)
        total = product_of_rows(hidden_rows, weight_ptr, row, inside, depth, ROWS, COLUMNS, DEPTH)
        total *= tl.load(scales_ptr + pair, inside, other=0.0)[:, None]
        place = pair.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(out_ptr + place, total, inside[:, None] & (column < columns)[None, :])


@triton.jit
def _sum_kernel(parts_ptr, order_ptr, add_ptr, out_ptr, columns, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """out = add + a token's parts [SLOTS, columns], in the order of ``order_ptr``."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(SLOTS):
        slot = tl.load(order_ptr + token * SLOTS + i)
        total += tl.load(parts_ptr + (token * SLOTS + slot) * columns + column, inside, other=0.0)
    if add_ptr is not None:
        total += tl.load(add_ptr + token * columns + column, inside, other=0.0)
    tl.store(out_ptr + token * columns + column, total, inside)
