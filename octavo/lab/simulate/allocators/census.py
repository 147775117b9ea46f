"""What the slots of the KV cache hold, and how many sequences a step computes: means over a run."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from octavo.core.plan import StepPlan
from octavo.lab.simulate.allocators.contiguous import ContiguousBlocks
from octavo.lab.simulate.engine import SimulatedEngine


class Slots(msgspec.Struct, frozen=True):
    """Token slots by state, of a moment or on average; together all slots (Kwon et al. 2023, section 3.1, figure 2)."""

    #: Slots with the KV entries of a token.
    tokens: float
    #: Slots that their request will fill later.
    reserved: float
    #: Slots that were asked for and are never filled: internal fragmentation.
    internal: float
    #: What the allocator adds to round an extent up, and slots that no request has: external fragmentation and others.
    rounding: float
    free: float

    @property
    def external(self) -> float:
        """The last two, which figure 2 shows as one: external fragmentation and others."""
        return self.rounding + self.free


def count_slots(engine: SimulatedEngine) -> Slots:
    """The slots now; a request that has ended holds none. Requests have one sequence and state their true length."""
    blocks = engine.blocks
    size, tables = blocks.block_size, blocks.groups[0].tables
    reserve = blocks.reserve if isinstance(blocks, ContiguousBlocks) else None
    tokens = reserved = internal = rounding = 0
    for group in engine.scheduler.queues.running:
        [seq] = group.seqs
        held = len(tables[seq.seq_id]) * size
        asked = held if reserve is None else reserve(seq.seq_id)
        filled_in_the_end = min(asked, group.max_length)
        tokens += seq.num_computed
        reserved += filled_in_the_end - seq.num_computed
        internal += asked - filled_in_the_end
        rounding += held - asked
    return Slots(tokens, reserved, internal, rounding, blocks.state.free * size)


class Census:
    """Means over the time of steps that begin in a part of a run; ``observe`` is an engine's ``on_plan``."""

    def __init__(self, start: float, stop: float) -> None:
        """Counts steps from ``start`` to ``stop``, in seconds of the engine's clock."""
        self._start, self._stop = start, stop
        #: Counts the slots of a moment.
        self.count: Callable[[SimulatedEngine], Slots] = count_slots
        self._sums = [0.0] * len(Slots.__struct_fields__)
        self._batch = self._seconds = 0.0

    def observe(self, engine: SimulatedEngine, plan: StepPlan, seconds: float) -> None:
        """Counts a step that was just planned."""
        if not self._start <= engine.now <= self._stop:
            return
        for i, slots in enumerate(msgspec.structs.astuple(self.count(engine))):
            self._sums[i] += slots * seconds
        self._batch += len(plan.seq_ids) * seconds
        self._seconds += seconds

    @property
    def shares(self) -> Slots:
        """The states as shares of all slots; 0 without a step."""
        everything = sum(self._sums)
        return Slots(*(slots / everything if everything else 0.0 for slots in self._sums))

    @property
    def batch(self) -> float:
        """Sequences that a step computes."""
        return self._batch / self._seconds if self._seconds else 0.0
