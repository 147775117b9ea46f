"""Random operations over the block manager, checked against simulated contents of every device and host block.

A KV entry depends on all tokens and features before it, so its stand-in here is the whole prefix. A worker that does
the moves and writes of each step in the documented order must leave every sequence, and every cached block, with its
own entries, in every group as far as its window reaches.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from octavo.config.kv_spec import GroupBlocks
from octavo.core.plan import StepPlan
from octavo.memory.block_manager import BlockManager
from octavo.memory.block_pool import NO_BLOCK
from octavo.memory.kv_group import AllocStatus, Moves
from octavo.memory.prefix_cache import FeatureSpan, PrefixChain, PrefixMatch
from octavo.memory.stored import StoreLimits

#: Group, salt, and all tokens up to a position, those of a feature with its key and their place in it.
Entry = tuple[int, str, tuple[object, ...]]


class State(NamedTuple):
    """A block of a recurrent state: after the token at ``position``, and after each draft token behind it."""

    position: int
    entries: list[Entry]

    def after(self, position: int) -> Entry | None:
        """None: the state cannot be cut back so far, or has not come so far."""
        index = position - self.position
        return self.entries[index] if 0 <= index < len(self.entries) else None


Block = list[Entry | State | None]

MAX_SEQUENCES = 6
#: Mostly alike, so that prefixes are found: all zeros but for one token at most.
TOKENS = st.builds(
    lambda length, odd: [int(position == odd) for position in range(length)], st.integers(1, 14), st.integers(0, 20)
)
SALTS = st.sampled_from(["", "", "", "x"])
FEATURES = [
    [],
    [],
    [FeatureSpan(2, 3, b"a")],
    [FeatureSpan(2, 3, b"b")],
    [FeatureSpan(0, 1, b"a"), FeatureSpan(5, 2, b"b")],
]
#: For each group its window, and by how many blocks it is smaller than the first one; of states also how many blocks of
#: others a block is as long as.
GROUPS: list[list[tuple[int | None, int] | tuple[int | None, int, int]]] = [
    [(None, 0)],
    [(None, 0)],
    [(None, 0), (3, 1)],
    [(None, 0), (6, 2), (1, 0)],
    [(None, 0), (None, 1)],
    [(4, 0)],
    [(5, 2), (2, 3)],
    [(None, 0), (4, 3), (2, 4)],
    [(None, 0), (2, 2, 2)],
    [(None, 0), (2, 1, 3)],
    [(None, 0), (4, 2), (2, 3, 2)],
    [(2, 0, 1)],
]
PICK = st.integers(0, MAX_SEQUENCES - 1)
PICKS = st.lists(PICK, min_size=1, max_size=4)


@dataclass
class Sequence:
    """What a scheduler knows of a sequence, and what a worker knows of its table."""

    seq_id: int
    salt: str
    token_ids: list[int]
    features: list[FeatureSpan]
    computed: int = 0
    #: By group. Blocks given back since are still in them.
    tables: list[list[int]] = field(default_factory=list)
    swapped: bool = False
    #: This step: computed at its end; whether its own tokens are written; whether another one is forked from it.
    after: int | None = None
    writes: bool = False
    forked: bool = False
    #: This step: draft tokens at the end of those computed, and those of them that are accepted.
    drafts: int = 0
    accepted: int = 0
    #: Some of its blocks may come by the moves of this step.
    arrives: bool = False

    def entry(self, group: int, position: int) -> Entry:
        content: list[object] = list(self.token_ids[: position + 1])
        for feature in self.features:
            for i in range(feature.offset, min(feature.end, position + 1)):
                content[i] = (content[i], feature.key, i - feature.offset)
        return group, self.salt, tuple(content)


class Worker:
    """Blocks with contents."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.device: list[Block] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[Block] = [[None] * block_size for _ in range(num_host_blocks)]

    def move(self, moves: Moves, arrived: dict[int, Block]) -> None:
        """``arrived``: blocks from elsewhere, by device block."""
        host_targets = [target for _, target in moves.swap_out]
        device_targets = [*(target for _, target in (*moves.swap_in, *moves.copy)), *arrived]
        assert len(set(host_targets)) == len(host_targets)
        assert len(set(device_targets)) == len(device_targets)
        for source, target in moves.swap_out:
            self.host[target] = list(self.device[source])
        for source, target in moves.swap_in:
            self.device[target] = list(self.host[source])
        for target, content in arrived.items():
            self.device[target] = list(content)
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
        groups=st.sampled_from(GROUPS),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int,
        prefix_caching: bool,
        host_cache: bool,
        groups: list[tuple[int | None, int] | tuple[int | None, int, int]],
    ) -> None:
        sizes = [
            GroupBlocks(max(2, num_blocks - less), num_host_blocks, window, state_tokens=ratio and ratio * block_size)
            for window, less, ratio in ((*group, None)[:3] for group in groups)
        ]
        self.manager = BlockManager(
            sizes,
            block_size,
            max_num_batched_tokens=3 * block_size,
            prefix_caching=prefix_caching,
            host_cache=host_cache,
            stores=StoreLimits(step_bytes=3, max_known=6),
        )
        #: By digest, the tokens whose last block it names; and of this step, what is read from the stores.
        self.names: dict[bytes, Sequence] = {}
        self.fetched: list[tuple[int, bytes]] = []
        self.prefix_caching = prefix_caching
        self.block_size = block_size
        self.worker = Worker(sum(s.num_blocks for s in sizes), num_host_blocks * len(sizes), block_size)
        self.sequences: dict[int, Sequence] = {}
        #: By name, a sequence with the tokens of a pinned prefix, all computed.
        self.pinned: dict[str, Sequence] = {}
        self.next_id = 0
        self.was_reset = False
        self.start([0] * (2 * block_size), "", [])
        self.turn(0, 2 * block_size)

    # --- helpers ----------------------------------------------------------------------------------------------------

    def new(self, salt: str, token_ids: list[int], features: list[FeatureSpan], computed: int = 0) -> Sequence:
        sequence = Sequence(self.next_id, salt, token_ids, features, computed, [[] for _ in self.manager.groups])
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

    def look_up(self, token_ids: list[int], salt: str, features: list[FeatureSpan]) -> PrefixMatch:
        return self.manager.prefixes.match(token_ids, self.manager.prefixes.chain(token_ids, salt, features))

    def available(self) -> list[int]:
        return [group.device.num_available for group in self.manager.groups]

    def cell(self, group: int, position: int) -> tuple[int, int]:
        """Index in the table, and place in the block, of an entry; a state is that of its last token."""
        kv_group = self.manager.groups[group]
        index, offset = divmod(position, kv_group.block_size)
        return index, 0 if kv_group.has_states else offset

    def content(self, group: int, block: Block, position: int) -> Entry | None:
        """The entry of a position in its block, or the state after it."""
        found = block[self.cell(group, position)[1]]
        return found.after(position) if isinstance(found, State) else found

    def table_lens(self, num_tokens: int) -> list[int]:
        return [-(-num_tokens // group.block_size) for group in self.manager.groups]

    @property
    def has_states(self) -> bool:
        return any(group.has_states for group in self.manager.groups)

    def first_read(self, group: int, computed: int) -> int:
        """The first position that is read when more than the computed tokens are."""
        window = self.manager.groups[group].window
        return 0 if window is None else max(0, computed - window + 1)

    def held(self, sequence: Sequence, group: int) -> list[int]:
        """The blocks of its table without those freed outside the window."""
        table = self.manager.groups[group].tables.get(sequence.seq_id, [])
        return [block for block in table if block != NO_BLOCK]

    def holders(self, group: int) -> Counter[int]:
        return Counter(block for s in self.sequences.values() for block in self.held(s, group))

    # --- rules ------------------------------------------------------------------------------------------------------

    @rule(token_ids=TOKENS, salt=SALTS, features=st.sampled_from(FEATURES))
    def start(self, token_ids: list[int], salt: str, features: list[FeatureSpan]) -> None:
        if not self.make_room():
            return
        if self.manager.state.available < 2:
            self.free(0)
        features = [f for f in features if f.end <= len(token_ids)]
        found = self.look_up(token_ids, salt, features)
        assert found.num_tokens < len(token_ids)
        available = self.available()
        costs = [g.cache.cost(hits) for g, hits in zip(self.manager.groups, found.hits, strict=True)]
        assert self.manager.prefixes.cost(found) == max(costs)
        if any(cost > room for cost, room in zip(costs, available, strict=True)):
            return
        sequence = self.new(salt, token_ids, features, found.num_tokens)
        self.manager.prefixes.adopt(sequence.seq_id, found)
        assert self.available() == [room - cost for cost, room in zip(costs, available, strict=True)]
        sequence.tables = [c.blocks for c in self.manager.tables(sequence.seq_id)]
        assert [*map(len, sequence.tables)] == self.table_lens(found.num_tokens)
        sequence.arrives = True

    @rule(name=st.sampled_from("pq"), blocks=st.integers(1, 3))
    def read_input(self, name: str, blocks: int) -> None:
        """What an encoder makes of an input: computed at once, and found as a whole or not at all."""
        if not self.make_room():
            return
        tokens, salt = [0] * (blocks * self.block_size + 1), f"input {name}, {blocks} blocks"
        found = self.look_up(tokens, salt, [])
        if found.num_full == blocks:
            assert found.num_tokens == blocks * self.block_size
            self.start(tokens, salt, [])
            return
        sequence = self.new(salt, tokens, [])
        nothing = PrefixMatch(0, len(tokens), [[] for _ in self.manager.groups], 0, found.chain)
        self.manager.prefixes.adopt(sequence.seq_id, nothing)
        self.grow_group([sequence], blocks * self.block_size, 0)
        if sequence.after is None:
            self.end(sequence)

    @rule(picks=PICKS, count=st.integers(1, 9), token=st.integers(0, 1))
    def grow(self, picks: list[int], count: int, token: int) -> None:
        self.grow_group(self.pick(picks, lambda s: not s.swapped and s.after is None), count, token)

    @rule(pick=PICK, count=st.integers(1, 6), accepted=st.integers(0, 6), token=st.integers(0, 1))
    def draft(self, pick: int, count: int, accepted: int, token: int) -> None:
        """A decode with draft tokens, some of which are accepted when the step is done."""
        for sequence in self.pick([pick], lambda s: not s.swapped and s.after is None and len(s.token_ids) > 0):
            if len(sequence.token_ids) - sequence.computed > 1:
                return
            if sequence.computed == len(sequence.token_ids):
                sequence.token_ids.append(token)
            sequence.token_ids += [token] * count
            self.grow_group([sequence], 1 + count, token)
            if sequence.after is None:
                del sequence.token_ids[-count:]
            else:
                sequence.drafts, sequence.accepted = count, min(accepted, count)

    def grow_group(self, group: list[Sequence], count: int, token: int) -> None:
        writes = []
        for sequence in group:
            if sequence.computed == len(sequence.token_ids):
                sequence.token_ids.append(token)
            stop = min(sequence.computed + count, len(sequence.token_ids))
            writes.append((sequence.seq_id, sequence.computed, stop))
        needed = [self.check_needed(writes, group) for group in range(len(self.manager.groups))]
        before = self.available()
        changes = self.manager.grow(writes)
        if changes is None:
            available = self.available()
            assert any(want > room for want, room in zip(needed, available, strict=True))
        else:
            for change in changes:
                self.sequences[change.seq_id].tables[change.group][change.index :] = change.blocks
            for seq_id, _, stop in writes:
                sequence = self.sequences[seq_id]
                assert [*map(len, sequence.tables)] == self.table_lens(stop)
                sequence.after, sequence.writes = stop, True
        for number, kv_group in enumerate(self.manager.groups):
            want = min(needed[number], before[number]) if changes is not None else 0
            # Blocks outside a window are freed, too.
            assert kv_group.device.num_available == before[number] - want or kv_group.window is not None
            assert kv_group.device.num_available >= before[number] - want
            holders = self.holders(number)
            for seq_id, computed, _ in writes:
                self.check_window(seq_id, computed, number)
                written = self.sequences[seq_id].tables[number][computed // kv_group.block_size :]
                for block in written if changes else ():
                    assert holders[block] == 1
                    assert not kv_group.device.is_kept(block)

    @rule()
    def free_behind_windows(self) -> None:
        """What a scheduler does that finds no block: nothing that a later token reads is lost."""
        before = self.available()
        running = [s for s in self.sequences.values() if not s.swapped]
        self.manager.free_outside_windows((s.seq_id, s.computed, sys.maxsize) for s in running)
        for number, group in enumerate(self.manager.groups):
            assert group.device.num_available >= before[number]
            for sequence in running:
                first = self.first_read(number, sequence.computed) // group.block_size
                table = group.tables.get(sequence.seq_id, [])
                assert set(table[:first]) <= {NO_BLOCK} and NO_BLOCK not in table[first:]
                if group.window is not None and sequence.after is None:
                    assert group.num_held(sequence.seq_id) <= group.window_blocks

    @rule(picks=PICKS, more=st.integers(0, 30))
    def admit(self, picks: list[int], more: int) -> None:
        """Admission never counts more than lengths, and what it finds room for can be computed."""
        group = self.pick(picks[:1], lambda s: not s.swapped and s.after is None and bool(s.tables[0]))
        for sequence in group:
            whole = self.manager.demand(more, 1, [sequence.seq_id])
            for kv_group in self.manager.groups:
                needed = kv_group.needed(whole)
                assert needed <= more if kv_group.window is not None else needed == more
            wanted = sequence.computed + more * self.block_size
            if self.manager.fits(whole, num_seqs=99) and not any(map(self.shared, self.tables_of(sequence))):
                self.compute_up_to(sequence, wanted)

    def tables_of(self, sequence: Sequence) -> list[tuple[int, list[int]]]:
        return [(number, self.held(sequence, number)) for number in range(len(self.manager.groups))]

    def shared(self, of_group: tuple[int, list[int]]) -> bool:
        """Whether others have blocks of it, so that they stay when it gives them back, or its last one is copied."""
        number, blocks = of_group
        device = self.manager.groups[number].device
        return any(device.references(block) > 1 for block in blocks) or any(map(device.is_kept, blocks[-1:]))

    def compute_up_to(self, sequence: Sequence, wanted: int) -> None:
        """In the longest chunks that there are blocks for, beside sequences that hold theirs."""
        chunk = min(self.manager.max_chunk, 3 * self.block_size)
        while sequence.computed < wanted:
            self.step([0], "", [], False)
            sequence.token_ids += [0] * (wanted - len(sequence.token_ids))
            stop = min(sequence.computed + chunk, wanted)
            changes = self.manager.grow([(sequence.seq_id, sequence.computed, stop)])
            assert changes is not None, "admitted without room"
            for change in changes:
                sequence.tables[change.group][change.index :] = change.blocks
            sequence.after, sequence.writes = stop, True
        self.step([0], "", [], False)

    def check_window(self, seq_id: int, computed: int, group: int) -> None:
        """Blocks outside the window are freed, at the latest when they are registered in the prefix cache."""
        table = self.manager.groups[group].tables.get(seq_id, [])
        left = self.first_read(group, computed) // self.manager.groups[group].block_size
        assert NO_BLOCK not in table[left:]
        if not self.prefix_caching:
            assert set(table[:left]) <= {NO_BLOCK}

    def check_needed(self, writes: list[tuple[int, int, int]], group: int) -> int:
        """Exact without prefix caching; with it, writing into a known block takes one more."""
        needed, _ = self.manager.groups[group].demand(writes)
        holders = self.holders(group)
        writers: Counter[int] = Counter()
        expected = 0
        for seq_id, computed, stop in writes:
            table = self.sequences[seq_id].tables[group]
            expected += self.table_lens(stop)[group] - len(table)
            writers.update(table[computed // self.manager.groups[group].block_size :][:1])
        expected += sum(min(count, holders[block] - 1) for block, count in writers.items())
        known = sum(self.manager.groups[group].device.is_kept(block) for block in writers)
        assert expected <= needed <= expected + known
        assert self.prefix_caching or not known
        return needed

    @rule(token=st.integers(0, 1), count=st.integers(1, 9))
    def turn(self, token: int, count: int) -> None:
        """An ordinary step: sequences that get blocks compute, the others are preempted."""
        self.swap_in([0])
        for sequence in list(self.sequences.values()):
            if not sequence.swapped and sequence.after is None:
                self.grow_group([sequence], count, token)
                if sequence.after is None:
                    self.swap_out_group([sequence])
                    if not sequence.swapped and not sequence.forked:
                        self.end(sequence)
        self.step([0] * 9, "", [], True)

    @rule(pick=PICK, token=st.integers(0, 1))
    def fork(self, pick: int, token: int) -> None:
        for parent in self.pick([pick], lambda s: not s.swapped and bool(s.tables[0]) and not s.drafts):
            if not self.make_room() or parent.seq_id not in self.sequences:
                return
            after = parent.computed if parent.after is None else parent.after
            child = self.new(parent.salt, [*parent.token_ids[:after], token], parent.features, parent.computed)
            self.manager.fork(parent.seq_id, child.seq_id)
            child.tables = [list(t) for t in parent.tables]
            child.after, child.arrives = parent.after, parent.arrives
            parent.forked = True

    @rule(pick=PICK, share=st.integers(0, 4), more=TOKENS)
    def fork_prefix(self, pick: int, share: int, more: list[int]) -> None:
        for parent in self.pick([pick], lambda s: not s.swapped):
            if not self.make_room() or parent.seq_id not in self.sequences:
                return
            count = min(share, parent.computed // self.block_size)
            computed = count * self.block_size
            child = self.new(parent.salt, [*parent.token_ids[:computed], *more], parent.features, computed)
            if self.manager.fork_prefix(parent.seq_id, child.seq_id, count):
                child.tables = [t[:n] for t, n in zip(parent.tables, self.table_lens(computed), strict=True)]
                child.arrives = parent.arrives
                continue
            child.computed = 0
            assert any(computed % group.block_size for group in self.manager.groups) or any(
                NO_BLOCK
                in group.tables[parent.seq_id][
                    self.first_read(number, computed) // group.block_size : computed // group.block_size
                ]
                for number, group in enumerate(self.manager.groups)
            )

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
        rooms = [g.host.num_available for g in self.manager.groups]
        needed = [len({b for s in group for b in self.held(s, g)}) for g in range(len(rooms))]
        short = any(count > room for count, room in zip(needed, rooms, strict=True))
        moved = self.manager.swap_out([s.seq_id for s in group])
        if short:
            assert not moved
        if not moved:
            assert [g.host.num_available for g in self.manager.groups] == rooms
            assert short or any(s.arrives for s in group)
            return
        for sequence in group:
            sequence.swapped = bool(sequence.tables[0])
            sequence.tables = [[] for _ in rooms]

    @rule(picks=PICKS)
    def swap_in(self, picks: list[int]) -> None:
        group = self.pick(picks, lambda s: s.swapped)
        seq_ids = [s.seq_id for s in group]
        counts = [len(g.on_host.distinct_blocks(seq_ids)) for g in self.manager.groups]
        assert self.manager.blocks_to_swap_in(seq_ids) == tuple(counts)
        available = self.available()
        moved = self.manager.swap_in(seq_ids)
        assert moved == all(count <= room for count, room in zip(counts, available, strict=True))
        assert self.available() == [r - (c if moved else 0) for c, r in zip(counts, available, strict=True)]
        if moved:
            for sequence in group:
                sequence.tables = [c.blocks for c in self.manager.tables(sequence.seq_id)]
                sequence.swapped, sequence.arrives = False, True

    @rule(picks=PICKS)
    def register(self, picks: list[int]) -> None:
        for sequence in self.pick(picks, lambda s: True):
            self.register_one(sequence)

    def register_one(self, sequence: Sequence) -> None:
        self.manager.prefixes.register(
            sequence.seq_id, sequence.token_ids, sequence.computed, sequence.salt, sequence.features
        )
        self.learn(sequence.token_ids[: sequence.computed], sequence.salt, sequence.features)

    def learn(self, token_ids: list[int], salt: str, features: list[FeatureSpan]) -> PrefixChain:
        chain = self.manager.prefixes.chain(token_ids, salt, features)
        for index, digest in enumerate(chain.digests[1:], 1):
            self.names[digest] = Sequence(-1, salt, token_ids[: index * self.block_size], features)
        return chain

    @rule(
        tokens=TOKENS, salt=SALTS, features=st.sampled_from(FEATURES), first=st.integers(0, 3), count=st.integers(1, 9)
    )
    def fetch(self, tokens: list[int], salt: str, features: list[FeatureSpan], first: int, count: int) -> None:
        """Some blocks come from the KV stores."""
        features = [f for f in features if f.end <= len(tokens)]
        chain, stored = self.learn(tokens, salt, features), self.manager.stored
        if stored is None:
            return
        for index in range(first, min(first + count, len(chain))):
            for number, group in enumerate(self.manager.groups):
                if (index + 1) % group.ratio:
                    continue  # within the tokens of a block of states
                had_room = group.device.num_available > 0 or group.cache.find(chain.digests[index + 1]) is not None
                source = 7, len(self.fetched)
                self.fetched.append((number, chain.digests[index + 1]))
                assert stored.place(number, chain, index, tokens, source) == had_room

    def block_named(self, number: int, digest: bytes) -> Block:
        """The block of a group with this digest."""
        wanted = self.names[digest]
        end = len(wanted.token_ids)
        if self.manager.groups[number].has_states:
            state: Block = [State(end - 1, [wanted.entry(number, end - 1)])]
            return state + [None] * (self.block_size - 1)
        return [wanted.entry(number, position) for position in range(end - self.block_size, end)]

    def move(self) -> None:
        """The moves of a step, with those of the stores."""
        plan = StepPlan(0)
        if self.manager.stored is not None:
            self.manager.stored.add_to(plan, 0.0)
        groups = [(g.number, range(g.device.first, g.device.first + g.device.num_blocks)) for g in self.manager.groups]
        for block, digest in plan.blocks_to_store:
            number = next(number for number, blocks in groups if block in blocks)
            stored, wanted = self.worker.device[block], self.block_named(number, digest)
            end = len(self.names[digest].token_ids)
            positions = [end - 1] if self.manager.groups[number].has_states else range(end - self.block_size, end)
            for position in positions:
                found = self.content(number, stored, position)
                assert found == self.content(number, wanted, position), "stored under another's name"
        arrived = {target: self.block_named(*self.fetched[index]) for _, index, target in plan.blocks_fetched}
        assert len(arrived) == len(plan.blocks_fetched)
        self.worker.move(self.manager.take_moves(), arrived)
        self.fetched = []

    @rule(picks=PICKS, of_prompt=st.booleans())
    def end_turn(self, picks: list[int], of_prompt: bool) -> None:
        """A prompt or an answer ends: its tokens are found whole, also in the middle of a block."""
        for sequence in self.pick(picks, lambda s: not s.swapped and s.after is None):
            arguments = sequence.token_ids, sequence.computed, sequence.salt, sequence.features
            registered = self.manager.prefixes.register_end(sequence.seq_id, *arguments, of_prompt=of_prompt)
            assert registered or not (self.prefix_caching and self.has_states and sequence.tables[0]) or self.was_reset
            # Others may have had a block of this content, and lost it since; and the window before the last block may
            # reach further back than that of the next token.
            full = sequence.computed // self.block_size
            if registered and all(
                all(map(g.device.is_kept, self.held(sequence, n)))
                and (g.window is None or g.has_states or g.holds_window_at(sequence.seq_id, full))
                for n, g in enumerate(self.manager.groups)
            ):
                assert self.found_length(sequence) == sequence.computed

    def found_length(self, sequence: Sequence) -> int:
        tokens = [*sequence.token_ids[: sequence.computed], 2]
        return self.look_up(tokens, sequence.salt, sequence.features).num_tokens

    @rule(pick=PICK, name=st.sampled_from("ab"))
    def pin(self, pick: int, name: str) -> None:
        if name in self.pinned:
            self.manager.pinned.remove(name)
            del self.pinned[name]
        for sequence in self.pick([pick], self.can_pin):
            count = sequence.computed
            last, rest = divmod(count, self.block_size)
            # A prompt ends in a block of its own, as at least its last token is computed; and in a state of its own.
            of_tokens = [g for g in self.manager.groups if not g.has_states]
            if rest and any(g.device.is_kept(g.tables[sequence.seq_id][last]) for g in of_tokens):
                count = 0 if self.has_states else count - rest
            if not count:
                continue
            tokens = sequence.token_ids[:count]
            before = [group.device.num_pinned for group in self.manager.groups]
            beside = self.manager.demand(2)
            status = self.manager.pinned.add(name, sequence.seq_id, tokens, sequence.salt, beside)
            if status is AllocStatus.OK:
                self.pinned[name] = Sequence(-1, sequence.salt, tokens, [], count)
            else:
                assert [group.device.num_pinned for group in self.manager.groups] == before

    def can_pin(self, sequence: Sequence) -> bool:
        """Whether its blocks are computed and held, and no step writes to them, as at the end of a prompt."""
        count = sequence.computed // self.block_size
        return (
            self.prefix_caching
            and sequence.computed > 0
            and sequence.after is None
            and not (sequence.swapped or sequence.arrives or sequence.features)
            and all(
                g.window is None or g.has_states or g.holds_window_at(sequence.seq_id, count)
                for g in self.manager.groups
            )
        )

    @rule(really=st.integers(0, 9))
    def reset(self, really: int) -> None:
        if really == 9 and not self.fetched:  # not within a step
            self.manager.reset_prefix_cache()
            self.was_reset = True
            assert self.manager.state.cached == 0

    @rule(probe=TOKENS, salt=SALTS, features=st.sampled_from(FEATURES), register=st.sampled_from([True, True, False]))
    def step(self, probe: list[int], salt: str, features: list[FeatureSpan], register: bool) -> None:
        self.move()
        self.check_contents(before=True)
        for sequence in self.sequences.values():
            if sequence.writes:
                assert sequence.after is not None
                for position in range(sequence.computed, sequence.after):
                    for group, table in enumerate(sequence.tables):
                        index, offset = self.cell(group, position)
                        entry: Entry | State = sequence.entry(group, position)
                        if self.manager.groups[group].has_states:
                            last = min(position, sequence.after - sequence.drafts - 1)
                            after = range(last, sequence.after)
                            entry = State(last, [sequence.entry(group, place) for place in after])
                        self.worker.device[table[index]][offset] = entry
        self.check_contents()  # what the tokens of this step read, too
        for sequence in self.sequences.values():
            if sequence.after is not None:
                sequence.computed = sequence.after - sequence.drafts + sequence.accepted
            if sequence.drafts:
                del sequence.token_ids[sequence.computed :]
                self.manager.shrink(sequence.seq_id, sequence.computed)
                sequence.tables = [
                    table[:count]
                    for table, count in zip(sequence.tables, self.table_lens(sequence.computed), strict=True)
                ]
            sequence.after, sequence.drafts, sequence.accepted = None, 0, 0
            sequence.writes = sequence.forked = sequence.arrives = False
            if register:
                self.register_one(sequence)
        self.check_contents()
        self.check_references()
        self.check_pinned()
        self.check_cached(probe, salt, features)
        for sequence in self.sequences.values():
            self.check_cached([*sequence.token_ids, 0], sequence.salt, sequence.features)

    # --- checks -----------------------------------------------------------------------------------------------------

    def check_contents(self, *, before: bool = False) -> None:
        """``before``: a step writes, which changes the state that it goes on from."""
        for sequence in self.sequences.values():
            if not sequence.swapped:
                for group, table in enumerate(sequence.tables):
                    kv_group, end = self.manager.groups[group], sequence.computed
                    positions = [*range(self.first_read(group, end), end)]
                    if kv_group.has_states and not before and sequence.after is not None:
                        positions = [sequence.after - 1, *(positions if end % kv_group.block_size == 0 else [])]
                    for position in positions:
                        block = self.worker.device[table[self.cell(group, position)[0]]]
                        assert self.content(group, block, position) == sequence.entry(group, position)

    def check_references(self) -> None:
        swapped = [s.seq_id for s in self.sequences.values() if s.swapped]
        first = 0
        for number, group in enumerate(self.manager.groups):
            holders = self.holders(number)
            pins = Counter(b for name in self.pinned for b in self.manager.pinned._blocks[name][number])
            for block in range(first, first + group.device.num_blocks):
                assert group.device.references(block) == holders[block] + pins[block]
            first += group.device.num_blocks
            assert group.device.num_pinned == len(pins)
            assert group.device.num_used == len(holders.keys() - pins.keys())
            assert group.host.num_used == len(group.on_host.distinct_blocks(swapped))

    def check_pinned(self) -> None:
        """A pinned prefix is found whole, on the device, with its own contents."""
        for name, prefix in self.pinned.items():
            found = self.look_up([*prefix.token_ids, 2], prefix.salt, [])
            assert found.num_tokens == prefix.computed
            for group, hits in zip(self.manager.groups, found.hits, strict=True):
                blocks = [hit.block for hit in hits if hit is not None]
                pinned = self.manager.pinned._blocks[name][group.number]
                full = len(pinned) - (prefix.computed % self.block_size > 0 and not group.has_states)
                assert (
                    not full or blocks[-len(pinned) :][:full] == pinned[:full]
                )  # its end may be in another block, too
            self.check_cached([*prefix.token_ids, 2], prefix.salt, [])

    def check_cached(self, token_ids: list[int], salt: str, features: list[FeatureSpan]) -> None:
        """Blocks that a look-up finds have the right contents, on the device or the host."""
        wanted = Sequence(-1, salt, token_ids, [f for f in features if f.end <= len(token_ids)])
        found = self.look_up(token_ids, salt, wanted.features)
        for number, group in enumerate(self.manager.groups):
            for position in range(self.first_read(number, found.num_tokens), found.num_tokens):
                hit = found.hits[number][self.cell(number, position)[0]]
                assert hit is not None
                blocks = self.worker.device if hit.pool is group.device else self.worker.host
                assert self.content(number, blocks[hit.block], position) == wanted.entry(number, position)

    @invariant()
    def accounting_is_exact(self) -> None:
        manager = self.manager
        for group in manager.groups:
            device, host = group.device, group.host
            assert device.num_used + device.num_free + device.num_cached + device.num_pinned == device.num_blocks
            assert device.num_available == device.num_free + device.num_cached
            assert host.num_used + host.num_available == host.num_blocks
        assert manager.num_tables == sum(bool(s.tables[0]) or s.swapped for s in self.sequences.values())
        for sequence in self.sequences.values():
            for number, table in enumerate(sequence.tables):
                known = manager.groups[number].tables.get(sequence.seq_id, [])
                assert len(known) == len(table) == len(manager.table(sequence.seq_id, number))
                assert all(block in (found, NO_BLOCK) for found, block in zip(table, known, strict=True))
            assert manager.is_swapped(sequence.seq_id) == sequence.swapped

    def teardown(self) -> None:
        for seq_id in self.sequences:
            self.manager.free(seq_id)
        self.manager.take_moves()
        assert self.manager.num_tables == 0
        assert all(group.device.num_used == group.host.num_used == 0 for group in self.manager.groups)
        assert not self.pinned or self.manager.state.pinned > 0
        self.manager.pinned.clear()
        self.manager.reset_prefix_cache()
        for group in self.manager.groups:
            assert group.device.num_free == group.device.num_blocks
            assert group.host.num_free == group.host.num_blocks


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
    """The same rules drawn by a plain generator: many times faster, to cover rare coincidences."""
    draw = random.Random(seed)
    machine = MemoryMachine()
    blocks, host_blocks = draw.randint(2, 14), draw.choice((0, 2, 5, 9))
    machine.build(blocks, draw.randint(1, 4), host_blocks, draw.random() < 0.8, True, draw.choice(GROUPS))

    def tokens() -> list[int]:
        odd = draw.randint(0, 20)
        return [int(position == odd) for position in range(draw.randint(1, 14))]

    def picks() -> list[int]:
        return draw.sample(range(MAX_SEQUENCES), draw.randint(1, 3))

    def salt() -> str:
        return draw.choice(("", "", "", "x"))

    operations: list[tuple[int, Callable[[], None]]] = [
        (6, lambda: machine.start(tokens(), salt(), draw.choice(FEATURES))),
        (6, lambda: machine.grow(picks(), draw.randint(1, 6), draw.randint(0, 1))),
        (
            3,
            lambda: machine.draft(draw.randrange(MAX_SEQUENCES), *(draw.randint(*r) for r in ((1, 6), (0, 6), (0, 1)))),
        ),
        (3, lambda: machine.turn(draw.randint(0, 1), draw.randint(1, 6))),
        (3, lambda: machine.fork(draw.choice(picks()), draw.randint(0, 1))),
        (1, lambda: machine.fork_prefix(draw.choice(picks()), draw.randint(0, 4), tokens())),
        (3, lambda: machine.free(draw.choice(picks()))),
        (2, lambda: machine.swap_out(picks())),
        (1, lambda: machine.pin(draw.choice(picks()), draw.choice("ab"))),
        (4, lambda: machine.swap_in(picks())),
        (1, lambda: machine.register(picks())),
        (3, lambda: machine.end_turn(picks(), draw.random() < 0.5)),
        (3, lambda: machine.step(tokens(), salt(), draw.choice(FEATURES), draw.random() < 0.7)),
        (1, lambda: machine.reset(draw.randint(0, 9))),
        (1, lambda: machine.free_behind_windows()),
        (2, lambda: machine.admit(picks(), draw.randint(0, 24))),
        (2, lambda: machine.fetch(tokens(), salt(), draw.choice(FEATURES), draw.randint(0, 3), draw.randint(1, 9))),
    ]
    weights = [weight for weight, _ in operations]
    for _, operation in draw.choices(operations, weights, k=steps):
        operation()
        machine.accounting_is_exact()
    machine.teardown()


def test_every_sequence_reads_its_own_entries_after_any_operations() -> None:
    run_machine(40, 40)


@pytest.mark.parametrize(
    ("first", "count"), [(0, 150), *(pytest.param(n, 500, marks=pytest.mark.slow) for n in (0, 500, 1000, 1500))]
)
def test_every_sequence_reads_its_own_entries_over_many_seeds(first: int, count: int) -> None:
    for seed in range(first, first + count):
        run_seed(seed, 60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_sequence_reads_its_own_entries_for_long() -> None:
    run_machine(2000, 100)
    for seed in range(10_000, 50_000):
        run_seed(seed, 100)
