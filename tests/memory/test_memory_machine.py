"""Random operations over the block manager, checked against simulated contents of every device and host block.

A KV entry depends on all tokens before it, so its stand-in here is the whole prefix. A worker that does the moves and
writes of each step in the documented order must leave every sequence, and every cached block, with its own entries.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from octavo.memory.block_manager import BlockManager
from octavo.memory.moves import Moves
from octavo.memory.prefix_cache import PrefixMatch

Entry = tuple[str, tuple[int, ...]]
Block = list[Entry | None]

MAX_SEQUENCES = 6
#: Mostly alike, so that prefixes are found: all zeros but for one token at most.
TOKENS = st.builds(
    lambda length, odd: [int(position == odd) for position in range(length)], st.integers(1, 14), st.integers(0, 20)
)
SALTS = st.sampled_from(["", "", "", "x"])
PICK = st.integers(0, MAX_SEQUENCES - 1)
PICKS = st.lists(PICK, min_size=1, max_size=4)


@dataclass
class Sequence:
    """What a scheduler knows of a sequence, and what a worker knows of its table."""

    seq_id: int
    salt: str
    token_ids: list[int]
    computed: int = 0
    table: list[int] = field(default_factory=list)
    swapped: bool = False
    #: This step: computed at its end; whether its own tokens are written; whether another one is forked from it.
    after: int | None = None
    writes: bool = False
    forked: bool = False
    #: Some of its blocks may come by the moves of this step.
    arrives: bool = False

    def entry(self, position: int) -> Entry:
        return self.salt, tuple(self.token_ids[: position + 1])


class Worker:
    """Blocks with contents."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.device: list[Block] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[Block] = [[None] * block_size for _ in range(num_host_blocks)]

    def move(self, moves: Moves) -> None:
        host_targets = [target for _, target in moves.swap_out]
        device_targets = [target for _, target in (*moves.swap_in, *moves.copy)]
        assert len(set(host_targets)) == len(host_targets)
        assert len(set(device_targets)) == len(device_targets)
        for source, target in moves.swap_out:
            self.host[target] = list(self.device[source])
        for source, target in moves.swap_in:
            self.device[target] = list(self.host[source])
        # Copies may be done all at once or one by one.
        assert not {source for source, _ in moves.copy} & {target for _, target in moves.copy}
        for source, target in moves.copy:
            self.device[target] = list(self.device[source])


class MemoryMachine(RuleBasedStateMachine):
    """One scheduler and one worker over tiny pools."""

    @initialize(
        num_blocks=st.sampled_from([6, 8, 10, 12, 4, 3, 2]),
        block_size=st.sampled_from([2, 3, 4, 1]),
        num_host_blocks=st.sampled_from([6, 9, 3, 1, 0]),
        prefix_caching=st.sampled_from([True, True, False]),
        host_cache=st.sampled_from([True, True, False]),
    )
    def build(
        self, num_blocks: int, block_size: int, num_host_blocks: int, prefix_caching: bool, host_cache: bool
    ) -> None:
        self.manager = BlockManager(
            num_blocks,
            block_size,
            num_host_blocks=num_host_blocks,
            prefix_caching=prefix_caching,
            host_cache=host_cache,
        )
        self.prefix_caching = prefix_caching
        self.block_size = block_size
        self.worker = Worker(num_blocks, num_host_blocks, block_size)
        self.sequences: dict[int, Sequence] = {}
        self.next_id = 0
        self.start([0] * (2 * block_size), "")
        self.turn(0, 2 * block_size)

    # --- helpers ----------------------------------------------------------------------------------------------------

    def new(self, salt: str, token_ids: list[int], computed: int = 0) -> Sequence:
        sequence = Sequence(self.next_id, salt, token_ids, computed)
        self.next_id += 1
        self.sequences[sequence.seq_id] = sequence
        return sequence

    def pick(self, picks: Iterable[int], suits: Callable[[Sequence], bool]) -> list[Sequence]:
        suitable = [s for s in self.sequences.values() if suits(s)]
        return list({(s := suitable[i % len(suitable)]).seq_id: s for i in picks}.values()) if suitable else []

    def make_room(self) -> bool:
        """Ends the oldest sequence if there are many."""
        if len(self.sequences) >= MAX_SEQUENCES:
            self.free(0)
        return len(self.sequences) < MAX_SEQUENCES

    def look_up(self, token_ids: list[int], salt: str) -> PrefixMatch:
        return self.manager.match(token_ids, self.manager.chain(token_ids, salt))

    # --- rules ------------------------------------------------------------------------------------------------------

    @rule(token_ids=TOKENS, salt=SALTS)
    def start(self, token_ids: list[int], salt: str) -> None:
        if not self.make_room():
            return
        if self.manager.num_available < 2:
            self.free(0)
        found = self.look_up(token_ids, salt)
        assert found.num_tokens < len(token_ids)
        cost, available = self.manager.cost(found), self.manager.num_available
        if not self.manager.fits(cost):
            return
        sequence = self.new(salt, token_ids, found.num_tokens)
        self.manager.adopt(sequence.seq_id, found)
        assert self.manager.num_available == available - cost
        sequence.table = self.manager.table(sequence.seq_id)
        assert len(sequence.table) == self.manager.blocks_for(found.num_tokens)
        sequence.arrives = True

    @rule(picks=PICKS, count=st.integers(1, 9), token=st.integers(0, 1))
    def grow(self, picks: list[int], count: int, token: int) -> None:
        self.grow_group(self.pick(picks, lambda s: not s.swapped and s.after is None), count, token)

    def grow_group(self, group: list[Sequence], count: int, token: int) -> None:
        writes = []
        for sequence in group:
            if sequence.computed == len(sequence.token_ids):
                sequence.token_ids.append(token)
            stop = min(sequence.computed + count, len(sequence.token_ids))
            writes.append((sequence.seq_id, sequence.computed, stop))
        needed, available = self.manager.needed(writes), self.manager.num_available
        self.check_needed(writes, needed)
        growths = self.manager.grow(writes)
        if growths is None:
            assert needed > available
            assert self.manager.num_available == available
            return
        assert self.manager.num_available == available - min(needed, available)
        for (seq_id, _computed, stop), growth in zip(writes, growths, strict=True):
            sequence = self.sequences[seq_id]
            if growth.blocks:
                sequence.table[growth.index :] = growth.blocks
            assert len(sequence.table) == self.manager.blocks_for(stop)
            sequence.after, sequence.writes = stop, True
        holders = Counter(block for s in self.sequences.values() for block in s.table)
        for seq_id, computed, _ in writes:
            for block in self.sequences[seq_id].table[computed // self.block_size :]:
                assert holders[block] == 1
                assert not self.manager.device.is_kept(block)

    def check_needed(self, writes: list[tuple[int, int, int]], needed: int) -> None:
        """Exact without prefix caching; with it, writing into a known block takes one more."""
        holders = Counter(block for s in self.sequences.values() for block in s.table)
        writers: Counter[int] = Counter()
        expected = 0
        for seq_id, computed, stop in writes:
            table = self.sequences[seq_id].table
            expected += self.manager.blocks_for(stop) - len(table)
            writers.update(table[computed // self.block_size :][:1])
        expected += sum(min(count, holders[block] - 1) for block, count in writers.items())
        known = sum(self.manager.device.is_kept(block) for block in writers)
        assert expected <= needed <= expected + known
        assert self.prefix_caching or not known

    @rule(token=st.integers(0, 1), count=st.integers(1, 9))
    def turn(self, token: int, count: int) -> None:
        """An ordinary step: who has room computes, who has none is preempted."""
        self.swap_in([0])
        for sequence in list(self.sequences.values()):
            if not sequence.swapped and sequence.after is None:
                self.grow_group([sequence], count, token)
                if sequence.after is None:
                    self.swap_out_group([sequence])
                    if not sequence.swapped and not sequence.forked:
                        self.end(sequence)
        self.step([0] * 9, "", True)

    @rule(pick=PICK, token=st.integers(0, 1))
    def fork(self, pick: int, token: int) -> None:
        for parent in self.pick([pick], lambda s: not s.swapped and bool(s.table)):
            if not self.make_room() or parent.seq_id not in self.sequences:
                return
            after = parent.computed if parent.after is None else parent.after
            child = self.new(parent.salt, [*parent.token_ids[:after], token], parent.computed)
            self.manager.fork(parent.seq_id, child.seq_id)
            child.table = list(parent.table)
            child.after, child.arrives = parent.after, parent.arrives
            parent.forked = True

    @rule(pick=PICK, share=st.integers(0, 4), more=TOKENS)
    def fork_prefix(self, pick: int, share: int, more: list[int]) -> None:
        for parent in self.pick([pick], lambda s: not s.swapped):
            if not self.make_room() or parent.seq_id not in self.sequences:
                return
            count = min(share, parent.computed // self.block_size)
            computed = count * self.block_size
            child = self.new(parent.salt, [*parent.token_ids[:computed], *more], computed)
            self.manager.fork_prefix(parent.seq_id, child.seq_id, count)
            child.table = parent.table[:count]
            child.arrives = parent.arrives

    @rule(pick=PICK)
    def free(self, pick: int) -> None:
        for sequence in self.pick([pick], lambda s: not s.forked):
            self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        self.manager.free(sequence.seq_id)
        del self.sequences[sequence.seq_id]

    @rule(picks=PICKS)
    def swap_out(self, picks: list[int]) -> None:
        self.swap_out_group(self.pick(picks, lambda s: not s.swapped and s.after is None))

    def swap_out_group(self, group: list[Sequence]) -> None:
        room = self.manager.host_free
        moved = self.manager.swap_out([s.seq_id for s in group])
        if len({block for s in group for block in s.table}) > room:
            assert not moved
        if not moved:
            assert self.manager.host_free == room
            assert len({block for s in group for block in s.table}) > room or any(s.arrives for s in group)
            return
        for sequence in group:
            sequence.swapped = bool(sequence.table)
            sequence.table = []

    @rule(picks=PICKS)
    def swap_in(self, picks: list[int]) -> None:
        group = self.pick(picks, lambda s: s.swapped)
        seq_ids = [s.seq_id for s in group]
        count, available = self.manager.blocks_to_swap_in(seq_ids), self.manager.num_available
        moved = self.manager.swap_in(seq_ids)
        assert moved == (count <= available)
        assert self.manager.num_available == available - (count if moved else 0)
        if moved:
            for sequence in group:
                sequence.table = self.manager.table(sequence.seq_id)
                sequence.swapped, sequence.arrives = False, True

    @rule(picks=PICKS)
    def register(self, picks: list[int]) -> None:
        for sequence in self.pick(picks, lambda s: True):
            self.manager.register(sequence.seq_id, sequence.token_ids, sequence.computed, sequence.salt)

    @rule(really=st.integers(0, 9))
    def reset(self, really: int) -> None:
        if really == 9:
            self.manager.reset_prefix_cache()
            assert self.manager.num_cached == 0

    @rule(probe=TOKENS, salt=SALTS, register=st.sampled_from([True, True, False]))
    def step(self, probe: list[int], salt: str, register: bool) -> None:
        self.worker.move(self.manager.take_moves())
        for sequence in self.sequences.values():
            if sequence.writes:
                assert sequence.after is not None
                for position in range(sequence.computed, sequence.after):
                    index, offset = divmod(position, self.block_size)
                    self.worker.device[sequence.table[index]][offset] = sequence.entry(position)
        for sequence in self.sequences.values():
            if sequence.after is not None:
                sequence.computed = sequence.after
            sequence.after = None
            sequence.writes = sequence.forked = sequence.arrives = False
            if register:
                self.manager.register(sequence.seq_id, sequence.token_ids, sequence.computed, sequence.salt)
        self.check_contents()
        self.check_references()
        self.check_cached(probe, salt)
        for sequence in self.sequences.values():
            self.check_cached(sequence.token_ids, sequence.salt)

    # --- checks -----------------------------------------------------------------------------------------------------

    def check_contents(self) -> None:
        for sequence in self.sequences.values():
            if not sequence.swapped:
                for position in range(sequence.computed):
                    index, offset = divmod(position, self.block_size)
                    assert self.worker.device[sequence.table[index]][offset] == sequence.entry(position)

    def check_references(self) -> None:
        holders = Counter(block for s in self.sequences.values() for block in s.table)
        for block in range(self.manager.num_blocks):
            assert self.manager.device.references(block) == holders[block]
        assert self.manager.num_used == len(holders)
        swapped = [s.seq_id for s in self.sequences.values() if s.swapped]
        assert self.manager.host_used == self.manager.blocks_to_swap_in(swapped)

    def check_cached(self, token_ids: list[int], salt: str) -> None:
        """What a look-up finds holds what it should, wherever it is."""
        found = self.look_up(token_ids, salt)
        wanted = Sequence(-1, salt, token_ids)
        for position in range(found.num_tokens):
            index, offset = divmod(position, self.block_size)
            hit = found.hits[index]
            blocks = self.worker.device if hit.pool is self.manager.device else self.worker.host
            assert blocks[hit.block][offset] == wanted.entry(position)

    @invariant()
    def accounting_is_exact(self) -> None:
        manager = self.manager
        assert manager.num_used + manager.num_free + manager.num_cached == manager.num_blocks
        assert manager.num_available == manager.num_free + manager.num_cached
        assert manager.host_used + manager.host_free == manager.num_host_blocks
        assert manager.num_tables == sum(bool(s.table) or s.swapped for s in self.sequences.values())
        for sequence in self.sequences.values():
            assert manager.table(sequence.seq_id) == sequence.table
            assert manager.is_swapped(sequence.seq_id) == sequence.swapped

    def teardown(self) -> None:
        for seq_id in self.sequences:
            self.manager.free(seq_id)
        self.manager.take_moves()
        assert (self.manager.num_used, self.manager.host_used, self.manager.num_tables) == (0, 0, 0)
        self.manager.reset_prefix_cache()
        assert self.manager.num_free == self.manager.num_blocks
        assert self.manager.host.num_free == self.manager.num_host_blocks


def run_machine(max_examples: int, steps: int) -> None:
    run_state_machine_as_test(
        MemoryMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def run_seed(seed: int, steps: int) -> None:
    """The same rules drawn by a plain generator: many times faster, so that rare coincidences come about."""
    draw = random.Random(seed)
    machine = MemoryMachine()
    machine.build(draw.randint(2, 14), draw.randint(1, 4), draw.choice((0, 2, 5, 9)), draw.random() < 0.8, True)

    def tokens() -> list[int]:
        odd = draw.randint(0, 20)
        return [int(position == odd) for position in range(draw.randint(1, 14))]

    def picks() -> list[int]:
        return draw.sample(range(MAX_SEQUENCES), draw.randint(1, 3))

    def salt() -> str:
        return draw.choice(("", "", "", "x"))

    operations: list[tuple[int, Callable[[], None]]] = [
        (6, lambda: machine.start(tokens(), salt())),
        (6, lambda: machine.grow(picks(), draw.randint(1, 6), draw.randint(0, 1))),
        (3, lambda: machine.turn(draw.randint(0, 1), draw.randint(1, 6))),
        (3, lambda: machine.fork(draw.choice(picks()), draw.randint(0, 1))),
        (1, lambda: machine.fork_prefix(draw.choice(picks()), draw.randint(0, 4), tokens())),
        (3, lambda: machine.free(draw.choice(picks()))),
        (2, lambda: machine.swap_out(picks())),
        (4, lambda: machine.swap_in(picks())),
        (1, lambda: machine.register(picks())),
        (3, lambda: machine.step(tokens(), salt(), draw.random() < 0.7)),
        (1, lambda: machine.reset(draw.randint(0, 9))),
    ]
    weights = [weight for weight, _ in operations]
    for _, operation in draw.choices(operations, weights, k=steps):
        operation()
        machine.accounting_is_exact()
    machine.teardown()


def test_every_sequence_reads_its_own_entries_whatever_happens() -> None:
    run_machine(200, 40)


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_every_sequence_reads_its_own_entries_over_many_seeds(first: int) -> None:
    for seed in range(first, first + 500):
        run_seed(seed, 60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_sequence_reads_its_own_entries_for_long() -> None:
    run_machine(2000, 100)
    for seed in range(10_000, 50_000):
        run_seed(seed, 100)
