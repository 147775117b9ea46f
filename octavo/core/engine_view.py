"""What somebody who watches an engine sees of it: its blocks, its queues, its last steps, and what has changed.

A view is made between two steps and is plain data: an engine core sends it, ``/engine/events`` streams it, a recording
(``core/recordings.py``) is a file of it, and a simulated engine makes the same.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from octavo.core.stats import SchedulerState

#: Steps of which an engine keeps records.
NUM_STEPS = 1000
#: Groups of each queue in a view, the first ones; their number is in its counts.
MAX_GROUPS = 128
#: Changes in a view, the last ones; see ``EngineView.num_changes``.
MAX_CHANGES = 128
#: Adapters in slots that a view names, at most, those with most running requests first; and names of each.
MAX_ADAPTER_SLOTS = 64
MAX_ADAPTER_NAMES = 4
#: Requests that a view names, at most, and characters of an id or a name; a longer one is cut.
MAX_REQUEST_IDS = 512
MAX_ID_LENGTH = 128
#: A map of more blocks, or of more runs, is sent in bins.
MAX_EXACT_BLOCKS = 8192
MAX_RUNS = 4096
NUM_BINS = 2048
#: Of ``BlockRun``: no group has the block, and the group's number is not known.
NOBODY = -1


class BlockState(enum.IntEnum):
    """What a block is: the same cases as in ``/metrics``, where ``SHARED`` ones count as used."""

    FREE = 0
    CACHED = 1
    USED = 2
    #: Used, in several block tables.
    SHARED = 3
    PINNED = 4


class BlockRun(msgspec.Struct, array_like=True, gc=False):
    """Blocks with consecutive ids that are alike, and neighbours in the block table of one sequence, if any has them.

    Of its block ``i`` the first token is at ``start + i * direction * block_size``.
    """

    count: int
    state: int
    #: Block tables that have each of them; moves in flight count, too.
    references: int
    #: The group whose sequence has them, the first of several; ``NOBODY``: none.
    group_id: int
    #: Position in its sequence of the first token of the first of them.
    start: int
    #: 1 or -1: the table has them in the order of their ids, or in the opposite one; 0 if there is one, or no table.
    direction: int


class BlockMap(msgspec.Struct):
    """All blocks of one pool, in the order of their ids: as runs, or in bins where there are too many."""

    #: Number of the KV group.
    group: int
    on_host: bool
    block_size: int
    #: Attention window of the group's layers, in tokens; None: they keep all.
    window: int | None
    #: Id of the first block.
    first: int
    num_blocks: int
    #: Blocks by ``BlockState``.
    counts: list[int]
    #: Empty if there are bins.
    runs: list[BlockRun] = []
    #: Blocks of each bin (the last has what is left), and how many of them are in each ``BlockState``.
    bin_size: int = 0
    bins: list[list[int]] = []


class GroupRow(msgspec.Struct, array_like=True, gc=False):
    """An unfinished group."""

    group_id: int
    status: Literal["waiting", "running", "swapped"]
    num_seqs: int
    prompt_tokens: int
    #: Of all its sequences.
    output_tokens: int
    #: With KV entries, over its sequences.
    computed_tokens: int
    #: Of the prompt, found in the prefix cache.
    cached_tokens: int
    #: Seconds since its arrival.
    age: float
    # How often it was preempted in each way, and what that has cost so far:
    recomputes: int
    recomputed_tokens: int
    swaps: int
    swapped_blocks: int
    #: The group that it was preempted for the last time; None: the running ones lacked blocks, or it never was.
    preempted_for: int | None


class StepRecord(msgspec.Struct, array_like=True, gc=False):
    """One step, and the counts after it."""

    step: int
    #: Seconds on the engine's clock at its end.
    at: float
    seconds: float
    #: Of ``seconds``: in the worker, and there in kernels (0 where they are not timed).
    worker_seconds: float
    kernel_seconds: float
    #: Between the step before and this one, while there was work.
    between_seconds: float
    prefill_tokens: int
    decode_tokens: int
    num_running: int
    num_waiting: int
    num_swapped: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    # Totals since the engine's start:
    preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int


class Change(msgspec.Struct, array_like=True, gc=False):
    """Something that happened to blocks or to a group."""

    kind: Literal["fork", "copy", "evict", "swap_out", "swap_in", "recompute", "swap"]
    step: int
    #: ``NOBODY`` where blocks of several groups are concerned.
    group_id: int
    #: Device blocks: those that were evicted, moved, or shared by a fork; of a copy its source and its target.
    blocks: list[int] = []
    #: Of a preemption: tokens to compute again, or blocks that were moved.
    cost: int = 0
    #: Of a preemption: the group that it was for; None: the running ones lacked blocks.
    preempted_for: int | None = None


class AdapterSlot(msgspec.Struct, array_like=True, gc=False):
    """A slot with an adapter in it."""

    slot: int
    #: Digest of the adapter's content.
    key: str
    #: Requests that run with it.
    num_running: int
    #: Those that requests may call it by; none: it was unloaded, or its name means another content now.
    names: list[str] = []


class EngineView(msgspec.Struct):
    """One engine core between two steps."""

    replica: int
    #: Seconds on the engine's clock.
    at: float
    token_budget: int
    max_num_seqs: int
    state: SchedulerState
    blocks: list[BlockMap]
    groups: list[GroupRow]
    #: Those since the view before.
    steps: list[StepRecord]
    changes: list[Change]
    #: Changes since the view before; ``changes`` are the last of them.
    num_changes: int
    #: Blocks evicted since the engine's start.
    evicted_blocks: int
    #: Seconds that it took to make this view.
    cost: float = 0.0
    #: How many there are is in ``state``.
    adapters: list[AdapterSlot] = []
    #: By group: the ids by which clients and logs know the open requests that the view mentions. Of a simulation: none.
    request_ids: dict[int, str] = {}


class ReplicaRow(msgspec.Struct):
    """A place for an engine core."""

    number: int
    status: str
    open_requests: int
    restarts: int


class Histogram(msgspec.Struct):
    """Observations since the start by upper bound of their bucket; the last bucket, without a bound, has the rest."""

    name: str
    bounds: list[float]
    counts: list[int]


class EngineEvent(msgspec.Struct):
    """One update of everything that is behind a front end."""

    #: Seconds since 1970; of a simulation those on its clock.
    time: float
    replicas: list[ReplicaRow]
    views: list[EngineView]
    #: Seconds to the first token, between tokens and of requests.
    latencies: list[Histogram] = []
    #: Whether the views have all steps that are known: those before are to be forgotten.
    whole: bool = False
