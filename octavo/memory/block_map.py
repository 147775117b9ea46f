"""The blocks of all pools for ``octavo`` viewers: which sequence has which block, in runs or in bins."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from octavo.core.stats import MAX_EXACT_BLOCKS, MAX_RUNS, NOBODY, NUM_BINS, BlockMap, BlockRun, BlockState
from octavo.memory.block_manager import BlockManager
from octavo.memory.block_pool import NO_BLOCK, BlockPool, BlockTables

#: Sequence id, group id.
Holder = tuple[int, int]


def block_maps(blocks: BlockManager, holders: Iterable[Holder]) -> list[BlockMap]:
    """The device pool of each KV group, and its host pool if it has blocks; the first of ``holders`` owns a block."""
    holders = list(holders)
    maps = []
    for group in blocks.groups:
        for tables, on_host in ((group.on_device, False), (group.on_host, True)):
            pool = tables.pool
            if pool.num_blocks or not on_host:
                numbers = group.number, on_host, group.block_size, group.window, pool.first, pool.num_blocks
                maps.append(_fill(BlockMap(*numbers, [], has_states=group.has_states), tables, holders))
    return maps


def _fill(shown: BlockMap, tables: BlockTables, holders: list[Holder]) -> BlockMap:
    states, references = _states(tables.pool)
    shown.counts = np.bincount(states, minlength=len(BlockState)).tolist()
    if shown.num_blocks <= MAX_EXACT_BLOCKS:
        shown.runs = _runs(tables, holders, shown.block_size, states, references)
    if shown.num_blocks > MAX_EXACT_BLOCKS or len(shown.runs) > MAX_RUNS:
        shown.runs = []
        shown.bin_size = -(-shown.num_blocks // NUM_BINS)
        starts = np.arange(0, shown.num_blocks, shown.bin_size)
        columns = [np.add.reduceat(states == state, starts, dtype=np.int64) for state in BlockState]
        shown.bins = np.stack(columns, axis=1).tolist()
    return shown


def _states(pool: BlockPool) -> tuple[np.ndarray, np.ndarray]:
    """``BlockState`` of each block, int8, and its references, int32: [blocks]."""
    counts, kept = pool.references_and_kept()
    references = np.frombuffer(counts, np.intc)
    # Numbers of ``BlockState``: without references 1 if the content is kept, else 0; 2 with one reference, 3 with more.
    states = np.minimum(references, 2).astype(np.int8) + (references > 0)
    np.copyto(states, np.frombuffer(kept, np.int8), where=references == 0)
    states[np.array(pool.pinned, np.int64) - pool.first] = BlockState.PINNED
    return states, references


def _runs(
    tables: BlockTables, holders: list[Holder], block_size: int, states: np.ndarray, references: np.ndarray
) -> list[BlockRun]:
    num_blocks = len(states)
    if not num_blocks:
        return []
    owners, indexes = np.full(len(states), NOBODY), np.zeros(len(states), np.int64)
    first, taken = tables.pool.first, bytearray(len(states))
    for seq_id, group_id in holders:
        table = tables.by_id.get(seq_id)
        if not table:
            continue
        # Sequences share the beginning of their tables: from the end back to a block that another has.
        start = len(table)
        while start and table[start - 1] != NO_BLOCK and not taken[table[start - 1] - first]:
            start -= 1
            taken[table[start] - first] = 1
        own = np.array(table[start:], np.int64) - first
        owners[own], indexes[own] = group_id, np.arange(start, len(table))
    # Free blocks fill the gaps between the others, which are few in a large pool.
    held = np.flatnonzero(states != BlockState.FREE)
    if not len(held):
        return [_free(num_blocks)]
    states, references, owners, indexes = states[held], references[held], owners[held], indexes[held]
    turns, owned = np.diff(indexes), owners[1:] != NOBODY
    differs = (np.diff(states) != 0) | (np.diff(owners) != 0) | (np.diff(references) != 0) | (np.diff(held) != 1)
    differs |= owned & (np.abs(turns) != 1)
    # Tables grow from either end of the ids that are allocated at once; within a run in one direction.
    differs[1:] |= ~differs[1:] & ~differs[:-1] & (np.diff(turns) != 0)
    starts = np.concatenate(([0], np.flatnonzero(differs) + 1))
    counts = np.diff(np.append(starts, len(held)))
    directions = np.where((counts > 1) & (owners[starts] != NOBODY), np.append(turns, 0)[starts], 0)
    columns = (counts, states[starts], references[starts], owners[starts], indexes[starts] * block_size, directions)
    runs, end = [], 0
    for begin, *values in zip(held[starts].tolist(), *(column.tolist() for column in columns), strict=True):
        if begin > end:
            runs.append(_free(begin - end))
        runs.append(BlockRun(*values))
        end = begin + values[0]
    return [*runs, _free(num_blocks - end)] if end < num_blocks else runs


def _free(count: int) -> BlockRun:
    return BlockRun(count, BlockState.FREE, 0, NOBODY, 0, 0)
