"""The number of blocks of each KV group, and how a memory budget is split into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """The blocks of one KV group: layers with equal KV entries, which share block tables."""

    num_blocks: int
    num_host_blocks: int = 0
    #: Sliding window in tokens, the token itself included; None: a token attends to all tokens before it.
    window: int | None = None


def window_blocks(window: int, block_size: int) -> int:
    """Blocks of a windowed group that one sequence holds at most, in addition to those of its chunk's tokens.

    These are the blocks that a window overlaps, one more as a chunk may begin and end inside a block, and one for a
    copy-on-write.
    """
    return -(-(window - 1) // block_size) + 3


def max_window_seqs(num_blocks: int, window: int, block_size: int, max_num_batched_tokens: int) -> int:
    """Sequences of any length for which a windowed group of ``num_blocks`` always suffices (0 or less: none)."""
    return (num_blocks - -(-max_num_batched_tokens // block_size)) // window_blocks(window, block_size)


def split_memory(
    num_bytes: int,
    block_bytes: Sequence[int],
    windows: Sequence[int | None],
    *,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> list[int]:
    """Splits a memory budget into blocks of each group.

    All groups get the same number of blocks, as each new token needs one in every group; but a windowed group gets at
    most as many as ``max_num_seqs`` sequences can use, and the others share the rest. The first group has no such
    limit, so a single group gets ``num_bytes // block_bytes``.

    Args:
        num_bytes: The budget.
        block_bytes: For each group, bytes of one block in all its layers.
        windows: For each group, its attention window in tokens; None: all tokens are kept.
        block_size: Tokens per block.
        max_num_seqs: Sequences that run at once.
        max_num_batched_tokens: Tokens of all steps in flight.
        max_model_len: Tokens of the longest sequence.

    Returns:
        Blocks of each group; together they take at most ``num_bytes``.
    """
    chunks = -(-max_num_batched_tokens // block_size)
    limits = {
        group: max_num_seqs * window_blocks(min(window, max_model_len), block_size) + chunks
        for group, window in enumerate(windows)
        if group and window is not None
    }
    limited: dict[int, int] = {}
    while True:  # each group that is limited raises the share of the others, perhaps above another group's limit
        left = num_bytes - sum(count * block_bytes[group] for group, count in limited.items())
        share = max(left, 0) // sum(size for group, size in enumerate(block_bytes) if group not in limited)
        above = {group: limit for group, limit in limits.items() if limit < share and group not in limited}
        if not above:
            return [limited.get(group, share) for group in range(len(block_bytes))]
        limited |= above
