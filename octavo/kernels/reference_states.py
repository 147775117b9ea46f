"""Recurrent states in plain torch: token by token where the order matters, the standard for faster backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import LayerCache, conv_numbers


class StateSpan(NamedTuple):
    """The tokens of one sequence in a step, and where their states are."""

    rows: slice
    #: Of the first token.
    position: int
    #: Block with the state before the first token; None: it is zero.
    read: int | None
    #: (block, n): the block gets the state after the first n of these tokens, and the changes of drafts behind them;
    #: ascending n. The last n counts the tokens that are no drafts.
    writes: list[tuple[int, int]]

    def accepted(self, last: Tensor, cache: LayerCache) -> int:
        """Changes of the block ``read`` to apply; ``last``: its position q, in one number or more."""
        # A block that no step wrote, of a dummy step, has any position.
        return max(0, min(self.position - 1 - int(last.ravel()[0]), cache.draft_tokens)) if cache.draft_tokens else 0


def state_spans(cache: LayerCache, batch: ForwardBatch) -> Iterator[StateSpan]:
    """The sequences of a step as a layer with states sees them; see ``Kernels``."""
    size, tables = cache.state_tokens, batch.block_tables[cache.group].tolist()
    starts, positions, drafts = batch.query_start_loc.tolist(), batch.positions.tolist(), batch.num_drafts.tolist()
    for table, start, stop, drafted in zip(tables, starts, starts[1:], drafts, strict=False):
        if start == stop:
            continue
        if drafted > cache.draft_tokens:
            raise ValueError(f"a sequence has {drafted} draft tokens, but blocks keep those of {cache.draft_tokens}")
        first = positions[start]
        end = first + stop - start
        read = table[(first - 1) // size] if first else None
        writes = [
            (table[i], min(end - drafted, (i + 1) * size) - first) for i in range(first // size, (end - 1) // size + 1)
        ]
        yield StateSpan(slice(start, stop), first, read, writes)


def walk_heads(
    span: StateSpan,
    cache: LayerCache,
    numbers: Tensor,
    shape: tuple[int, int, int],
    change_of: Callable[[Tensor, int], Tensor],
    advance: Callable[[Tensor, Tensor], Tensor],
) -> Iterator[tuple[int, Tensor]]:
    """Yields each row of the span with the states of all heads after its token; reads and writes blocks.

    Args:
        numbers: [blocks, n] of the layer's kernel: the states, then for each head its position and changes.
        shape: [heads, ., .] of the states.
        change_of: the change [heads, c] of a row's token, from the states before it.
        advance: the states after a token, from those before it and its change.
    """
    kept, size = cache.draft_tokens, shape[0] * shape[1] * shape[2]
    states, tail = numbers[:, :size].unflatten(1, shape), numbers[:, size:]
    changes = tail.unflatten(1, (shape[0], tail.shape[1] // shape[0]))  # empty without draft tokens
    width = (changes.shape[2] - 1) // kept if kept else 0
    state, certain = torch.zeros_like(states[0]), span.writes[-1][1]
    if span.read is not None:
        state = states[span.read]
        for i in range(span.accepted(changes[span.read], cache)):
            state = advance(state, changes[span.read, :, 1 + i * width : 1 + (i + 1) * width])
    for count, row in enumerate(range(span.rows.start, span.rows.stop), 1):
        change = change_of(state, row)
        state = advance(state, change)
        yield row, state
        for block, end in span.writes:
            if count == end:
                states[block] = state
                if kept:
                    changes[block, :, 0] = span.position + count - 1
            elif count > end == certain:
                at = 1 + (count - end - 1) * width
                changes[block, :, at : at + width] = change


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
    (taps, channels), kept = weight.shape, cache.draft_tokens
    numbers = cache.key.view(len(cache.key), -1)[:, offset : offset + conv_numbers(taps, channels, kept)]
    states = numbers.unflatten(1, (-1, channels))
    inputs = x.float() if in_gate is None else x.float() * in_gate.float()
    out = torch.zeros_like(inputs) if bias is None else bias.expand_as(inputs).clone()
    for span in state_spans(cache, batch):
        rows, before = span.rows, x.new_zeros(taps - 1, channels, dtype=torch.float32)
        if span.read is not None:
            first = span.accepted(states[span.read, -1], cache)
            before = states[span.read, first : first + taps - 1]
        window, length = torch.cat((before, inputs[rows])), rows.stop - rows.start
        for tap in range(taps):
            out[rows] += window[tap : tap + length] * weight[tap]
        for block, count in span.writes:
            after = window[count : count + taps - 1 + kept]
            states[block, : len(after)] = after
            if kept:
                states[block, -1] = span.position + count - 1
    out = out if activation is None else F.silu(out)
    return (out if out_gate is None else out * out_gate.float()).to(x.dtype)
