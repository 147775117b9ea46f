"""Recurrent states in plain torch: token by token where the order matters, the standard for faster backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import LayerCache


class StateSpan(NamedTuple):
    """The tokens of one sequence in a step, and where their states are."""

    rows: slice
    #: Block with the state before the first token; None: it is zero.
    read: int | None
    #: (block, n): the block gets the state after the first n of these tokens; ascending n.
    writes: list[tuple[int, int]]


def state_spans(cache: LayerCache, batch: ForwardBatch) -> Iterator[StateSpan]:
    """The sequences of a step as a layer with states sees them; see ``Kernels``."""
    size, tables = cache.state_tokens, batch.block_tables[cache.group].tolist()
    starts, positions = batch.query_start_loc.tolist(), batch.positions.tolist()
    for table, start, stop in zip(tables, starts, starts[1:], strict=False):
        if start == stop:
            continue
        first = positions[start]
        end = first + stop - start
        read = table[(first - 1) // size] if first else None
        blocks = range(first // size, (end - 1) // size + 1)
        yield StateSpan(slice(start, stop), read, [(table[i], min(end, (i + 1) * size) - first) for i in blocks])


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: LayerCache,
    batch: ForwardBatch,
    *,
    offset: int = 0,
    activation: Literal["silu"] | None = None,
    in_gate: Tensor | None = None,
    out_gate: Tensor | None = None,
) -> Tensor:
    """See ``Kernels.causal_conv``."""
    taps, channels = weight.shape
    states = cache.key.view(len(cache.key), -1)[:, offset : offset + (taps - 1) * channels]
    inputs = x.float() if in_gate is None else x.float() * in_gate.float()
    out = torch.zeros_like(inputs) if bias is None else bias.expand_as(inputs).clone()
    for rows, read, writes in state_spans(cache, batch):
        before = x.new_zeros(taps - 1, channels, dtype=torch.float32)
        if read is not None:
            before = states[read].view(taps - 1, channels)
        window, length = torch.cat((before, inputs[rows])), rows.stop - rows.start
        for tap in range(taps):
            out[rows] += window[tap : tap + length] * weight[tap]
        for block, count in writes:
            states[block] = window[count : count + taps - 1].reshape(-1)
    out = out if activation is None else F.silu(out)
    return (out if out_gate is None else out * out_gate.float()).to(x.dtype)
