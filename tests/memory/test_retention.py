"""Held prefixes: what is evicted before them, who gives way, and when they end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from octavo.config.kv_spec import GroupBlocks
from octavo.core.cache_hints import Breakpoint, CacheHints
from octavo.memory.block_manager import BlockManager
from octavo.memory.prefix_cache import PrefixChain

SIZE = 4


def prompt(blocks: int, first: int = 0) -> list[int]:
    """Full blocks, and the token that a match leaves out."""
    return [first + i for i in range(blocks * SIZE + 1)]


def manager(num_blocks: int = 16, hosts: int = 0, share: float = 0.5) -> BlockManager:
    return BlockManager(
        num_blocks, SIZE, num_host_blocks=hosts, prefix_caching=True, host_cache=hosts > 0, hold_share=share
    )


def serve(blocks: BlockManager, tokens: list[int], seq_id: int = 1) -> int:
    """Computes a prompt and ends; returns its tokens that were found."""
    match = blocks.prefixes.match(tokens, blocks.prefixes.chain(tokens, ""))
    blocks.prefixes.adopt(seq_id, match)
    assert blocks.grow([(seq_id, match.num_tokens, len(tokens))]) is not None
    blocks.take_moves()
    blocks.prefixes.register(seq_id, tokens, len(tokens), "")
    blocks.free(seq_id)
    return match.num_tokens


def hold(
    blocks: BlockManager, tokens: list[int], client: str = "a", now: float = 0.0, ttl: float = 300.0, **hints: Any
) -> int:
    asked = CacheHints(ttl=ttl, **hints)
    return blocks.retention.obey(asked, client, blocks.prefixes.chain(tokens, ""), tokens, len(tokens), now)


def found(blocks: BlockManager, tokens: list[int]) -> int:
    return blocks.prefixes.match(tokens, blocks.prefixes.chain(tokens, "")).num_tokens


def flood(blocks: BlockManager, count: int, start: int = 1000) -> None:
    for i in range(count):
        serve(blocks, prompt(2, start + 100 * i))


def test_held_blocks_go_last_and_expired_ones_first() -> None:
    blocks = manager()
    held, other = prompt(3), prompt(3, 100)
    serve(blocks, held)
    serve(blocks, other)
    assert hold(blocks, held) == 3 * SIZE
    flood(blocks, 20)
    assert found(blocks, held) == 3 * SIZE and found(blocks, other) == 0
    blocks.retention.expire(299.9)
    newest = prompt(2, 5000)
    serve(blocks, newest)
    assert found(blocks, held) == 3 * SIZE
    blocks.retention.expire(300.0)
    serve(blocks, prompt(3, 7000))
    assert found(blocks, held) == 0 and found(blocks, newest) == 2 * SIZE


def test_a_prefix_is_held_before_it_is_computed_and_again_after_it_was_lost() -> None:
    blocks = manager()
    held = prompt(3)
    hold(blocks, held)
    serve(blocks, held)
    flood(blocks, 20)
    assert found(blocks, held) == 3 * SIZE
    assert blocks.grow([(7, 0, 16 * SIZE)]) is not None  # a request that needs all blocks gets them
    blocks.take_moves()
    assert found(blocks, held) == 0
    blocks.free(7)
    serve(blocks, held)
    flood(blocks, 20)
    assert found(blocks, held) == 3 * SIZE


def test_use_renews_a_holding() -> None:
    blocks = manager()
    held = prompt(3)
    for now in (0.0, 200.0, 400.0):
        hold(blocks, held, now=now)
        serve(blocks, held)
    blocks.retention.expire(600.0)
    flood(blocks, 20)
    assert found(blocks, held) == 3 * SIZE
    blocks.retention.expire(700.0)
    flood(blocks, 20)
    assert found(blocks, held) == 0
    stats = blocks.retention.stats()
    assert stats is not None and (stats.held_blocks, stats.holdings, stats.expired) == (0, 0, 1)


def test_longer_times_of_shorter_prefixes_are_kept() -> None:
    blocks, tokens = manager(32), prompt(4)
    hints = CacheHints((Breakpoint(2 * SIZE + 1, 3600.0), Breakpoint(3 * SIZE, 300.0), Breakpoint(4 * SIZE, 300.0)))
    serve(blocks, tokens)
    assert blocks.retention.obey(hints, "a", blocks.prefixes.chain(tokens, ""), tokens, len(tokens), 0.0) == 4 * SIZE
    blocks.retention.expire(301.0)
    flood(blocks, 40)
    assert found(blocks, tokens) == 2 * SIZE  # the last full block before the mark


def test_the_next_turn_takes_the_place_of_the_last_and_so_does_a_key() -> None:
    blocks = manager(32)
    for turn in range(1, 5):
        hold(blocks, prompt(turn))
    stats = blocks.retention.stats()
    assert stats is not None and (stats.holdings, stats.displaced) == (1, 0)
    for first in (100, 200):
        serve(blocks, prompt(3, first))
        hold(blocks, prompt(3, first), key="chat")
    stats = blocks.retention.stats()
    assert stats is not None and stats.holdings == 2
    flood(blocks, 40)
    assert found(blocks, prompt(3, 100)) == 0 and found(blocks, prompt(3, 200)) == 3 * SIZE


def test_the_oldest_holding_of_a_client_gives_way_and_a_long_one_is_cut() -> None:
    blocks = manager(32)  # 16 blocks may be held, 8 by one client
    for first in (0, 100, 200):
        serve(blocks, prompt(4, first))
        assert hold(blocks, prompt(4, first)) == 4 * SIZE
    stats = blocks.retention.stats()
    assert stats is not None and (stats.held_blocks, stats.displaced) == (8, 1)
    flood(blocks, 40)
    assert [found(blocks, prompt(4, first)) for first in (0, 100, 200)] == [0, 4 * SIZE, 4 * SIZE]
    assert hold(blocks, prompt(20, 5000), client="b") == 8 * SIZE


def test_a_client_who_holds_little_keeps_it_whatever_others_ask() -> None:
    blocks = manager(32)
    for client in range(8):
        for first in range(5):
            tokens = prompt(1 + client % 2, 1000 * client + 100 * first)
            serve(blocks, tokens)
            hold(blocks, tokens, client=f"greedy {client}")
        if client == 0:
            serve(blocks, prompt(2, 90000))
            hold(blocks, prompt(2, 90000), client="modest")
    flood(blocks, 40, start=20000)
    assert found(blocks, prompt(2, 90000)) == 2 * SIZE
    stats = blocks.retention.stats()
    assert stats is not None and stats.held_blocks <= 16


def test_of_conversations_that_take_turns_the_client_keeps_its_share() -> None:
    def hits(hints: bool) -> int:
        blocks = manager()  # 4 blocks may be held by one client, and a conversation has 8
        hit = 0
        for turn in range(12):
            tokens = prompt(8, 1000 * (turn % 3))
            if hints:
                hold(blocks, tokens)
            hit += serve(blocks, tokens)
        return hit

    assert hits(hints=False) == 0
    assert hits(hints=True) == 2 * 4 * SIZE  # from its third turn on, that of the first


def test_a_conversation_that_does_not_come_back_gives_way() -> None:
    blocks = manager()
    for name in "abcabc":
        hold(blocks, prompt(8, 1000 * ord(name)), key=name)
    held = {name: hold(blocks, prompt(8, 1000 * ord(name)), key=name) for name in "abc"}
    assert held == {"a": 4 * SIZE, "b": 0, "c": 0}
    assert [hold(blocks, prompt(8, 1000 * ord(name)), key=name) for name in "bcb"] == [4 * SIZE, 0, 4 * SIZE]


def test_a_new_conversation_is_held_at_once() -> None:
    blocks = manager(32)  # 8 blocks for one client
    for name in "aab":
        assert hold(blocks, prompt(4, 1000 * ord(name)), key=name) == 4 * SIZE
    assert hold(blocks, prompt(4, 1000 * ord("c")), key="c") == 4 * SIZE  # in the place of b, which came once
    assert hold(blocks, prompt(8, 1000 * ord("d")), key="d") == 8 * SIZE
    assert hold(blocks, prompt(4, 1000 * ord("a")), key="a") == 4 * SIZE


def test_a_growing_conversation_takes_the_room_that_others_leave() -> None:
    blocks = manager(32)  # 8 blocks for one client
    for name in "abab":
        assert hold(blocks, prompt(3, 1000 * ord(name)), key=name) == 3 * SIZE
    assert hold(blocks, prompt(9, 1000 * ord("a")), key="a") == 5 * SIZE
    assert hold(blocks, prompt(9, 1000 * ord("b")), key="b") == 3 * SIZE


def test_an_operators_prefix_stays_until_it_is_released() -> None:
    blocks = manager(32)
    pinned = prompt(4, 500)
    serve(blocks, pinned)
    assert hold(blocks, pinned, ttl=86400.0, pin="one") == 4 * SIZE
    for client in range(9):
        for first in range(4):
            hold(blocks, prompt(4, 1000 * client + 100 * first + 10000), client=f"{client}")
    flood(blocks, 40)
    assert found(blocks, pinned) == 4 * SIZE
    assert hold(blocks, prompt(20, 70000), ttl=60.0, pin="two") == 12 * SIZE  # what is left of the share
    blocks.release_prefix("one")
    serve(blocks, prompt(4, 3000))
    assert found(blocks, pinned) == 0
    stats = blocks.retention.stats()
    assert stats is not None and stats.released == 1


def test_nothing_is_held_without_a_share_or_a_prefix_cache() -> None:
    for blocks in (manager(share=0.0), BlockManager(16, SIZE)):
        assert hold(blocks, prompt(3)) == 0 and blocks.retention.stats() is None


def test_held_content_moves_to_the_host_and_stays_there_before_other_content() -> None:
    blocks = manager(12, hosts=4)
    held = prompt(3)
    hold(blocks, held)
    serve(blocks, held)
    for first in range(100, 900, 100):
        blocks.grow([(2, 0, 12 * SIZE)])  # all of the device
        blocks.take_moves()
        blocks.free(2)
        serve(blocks, prompt(3, first))
    assert found(blocks, held) == 3 * SIZE


def test_windowed_groups_and_states_hold_what_a_prompt_reads() -> None:
    sizes = [GroupBlocks(64), GroupBlocks(32, window=5), GroupBlocks(16, window=2, state_tokens=2 * SIZE)]
    blocks = BlockManager(sizes, SIZE, prefix_caching=True, max_num_batched_tokens=64)
    tokens = prompt(8)
    blocks.prefixes.adopt(1, blocks.prefixes.match(tokens, blocks.prefixes.chain(tokens, "")))
    for end in range(2 * SIZE, len(tokens), 2 * SIZE):
        assert blocks.grow([(1, end - 2 * SIZE, end)]) is not None
        blocks.take_moves()
        blocks.prefixes.register(1, tokens, end, "")
    blocks.free(1)
    assert hold(blocks, tokens) == len(tokens)
    assert [group.device.num_held for group in blocks.groups] == [8, 1, 1]
    for start in range(1000, 9000, 100):
        other = prompt(8, start)
        blocks.prefixes.adopt(2, blocks.prefixes.match(other, blocks.prefixes.chain(other, "")))
        for end in range(2 * SIZE, len(other), 2 * SIZE):
            assert blocks.grow([(2, end - 2 * SIZE, end)]) is not None
            blocks.take_moves()
            blocks.prefixes.register(2, other, end, "")
        blocks.free(2)
    assert found(blocks, tokens) == 8 * SIZE and found(blocks, prompt(8, 1000)) == 0


def test_a_flood_of_hints_takes_no_more_than_its_share() -> None:
    """Who asks for nothing finds at least what an LRU cache smaller by the flooder's share would have kept."""
    shared = [prompt(2, 100 * i) for i in range(5)]

    def hits(blocks: BlockManager, hints: bool) -> int:
        hit = 0
        for turn in range(60):
            flooded = prompt(2, 100_000 + 100 * turn)
            if hints:
                hold(blocks, flooded, client="flood", now=float(turn))
            serve(blocks, flooded)
            hit += serve(blocks, shared[turn % len(shared)])
        return hit

    assert hits(manager(32), hints=True) >= hits(manager(24), hints=False) > 0


# --- random operations beside a simple model --------------------------------------------------------------------------

CLIENTS = st.sampled_from(["a", "b", "c"])
TIMES = st.sampled_from([5.0, 20.0, 100.0])
#: Prompts of few branches, so that prefixes are shared: the number of blocks, and from which block on they differ.
PROMPTS = st.builds(
    lambda length, fork, branch: [branch * (i // SIZE >= fork) for i in range(length)],
    st.integers(1, 26), st.integers(0, 4), st.integers(0, 4),
)  # fmt: skip


@dataclass
class Held:
    """A holding of the model: digests in order."""

    client: str
    key: object
    digests: list[bytes]
    expires: float
    used: int
    gap: int | None


@dataclass
class Model:
    """Holdings as one list, least recently used first; all numbers are counted anew."""

    limit: int
    holdings: list[Held] = field(default_factory=list)
    #: By client: its requests, and the last uses of what it does not hold any more.
    requests: dict[str, int] = field(default_factory=dict)
    past: dict[str, dict[object, int]] = field(default_factory=dict)

    def charge(self, client: str) -> int:
        return len({digest for one in self.holdings if one.client == client for digest in one.digests})

    @property
    def held(self) -> set[bytes]:
        return {digest for one in self.holdings for digest in one.digests}

    def hold(self, client: str, name: str, digests: list[bytes], expires: float) -> None:
        if not any(one.client == client for one in self.holdings):
            self.requests[client], self.past[client] = -1, {}
        self.requests[client] += 1
        now, past = self.requests[client], self.past[client]
        digests = digests[: self.limit // 2]
        if not digests:
            return
        key = name or digests[-1]
        replaced = [
            one
            for one in self.holdings
            if one.client == client and (one.key == key or (one.key in digests[:-1] and one.expires <= expires))
        ]
        uses = [one.used for one in replaced] + [past.pop(k) for k in (key, *digests[:-1]) if k in past]
        gap = now - max(uses) if uses else None
        expires = max([expires, *(one.expires for one in replaced if (one.key, one.digests) == (key, digests))])
        newest = Held(client, key, digests, expires, now, gap)
        self.holdings = [one for one in self.holdings if one not in replaced] + [newest]
        others = [one for one in self.holdings if one.client == client and one is not newest]
        for one in [*(one for one in others if one.gap is None), *(one for one in others if one.gap is not None)]:
            waits = one.gap is not None and gap is not None and now - one.used <= gap
            if self.charge(client) > self.limit // 2 and not waits:
                self.displace(one)
        while self.charge(client) > self.limit // 2:
            newest.digests.pop()
        if not newest.digests:
            self.displace(newest)
        while len(self.held) > self.limit:
            most = max({one.client for one in self.holdings}, key=lambda c: (self.charge(c), c == client))
            self.displace(next(one for one in self.holdings if one.client == most))

    def displace(self, one: Held) -> None:
        self.holdings.remove(one)
        self.past[one.client][one.key] = one.used


class RetentionMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.sampled_from([12, 16, 20]), hosts=st.sampled_from([0, 4]))
    def build(self, num_blocks: int, hosts: int) -> None:
        self.blocks, self.model, self.now, self.next_id = manager(num_blocks, hosts), Model(num_blocks // 2), 0.0, 0
        self.running: dict[int, list[int]] = {}

    def chain(self, tokens: list[int]) -> PrefixChain:
        return self.blocks.prefixes.chain(tokens, "")

    @rule(tokens=PROMPTS, stays=st.booleans())
    def run(self, tokens: list[int], stays: bool) -> None:
        blocks, pool = self.blocks, self.blocks.groups[0].device
        match = blocks.prefixes.match(tokens, self.chain(tokens))
        needed = -(-len(tokens) // SIZE) - match.num_full + blocks.prefixes.cost(match)
        if needed > pool.num_available:
            return
        index = blocks.groups[0].cache.on_device
        before = {pool_block: index.at(pool_block).digest for pool_block in pool.cached()}
        unheld = [block for block in before if not pool.is_held(block)]
        hits = {hit.block for hit in match.hits[0] if hit is not None}
        self.next_id += 1
        blocks.prefixes.adopt(self.next_id, match)
        assert blocks.grow([(self.next_id, match.num_tokens, len(tokens))]) is not None
        lost = [block for block, digest in before.items() if index.find(digest) is None]
        if any(before[block] in self.model.held for block in lost):
            assert all(index.find(before[block]) is None or block in hits for block in unheld)
        blocks.take_moves()
        blocks.prefixes.register(self.next_id, tokens, len(tokens), "")
        self.running[self.next_id] = tokens
        if not stays or len(self.running) > 2:
            self.end(0)

    @rule(pick=st.integers(0, 2))
    def end(self, pick: int) -> None:
        if self.running:
            seq_id = list(self.running)[pick % len(self.running)]
            del self.running[seq_id]
            self.blocks.free(seq_id)

    @rule(tokens=PROMPTS, client=CLIENTS, ttl=TIMES, key=st.sampled_from(["", "", "k"]))
    def hold(self, tokens: list[int], client: str, ttl: float, key: str) -> None:
        chain = self.chain(tokens)
        self.blocks.retention.obey(CacheHints(ttl=ttl, key=key), client, chain, tokens, len(tokens), self.now)
        digests = chain.digests[1 : len(tokens) // SIZE + 1]
        self.model.hold(client, f"key {key}" if key else "", digests, self.now + ttl)

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        pool, index = self.blocks.groups[0].device, self.blocks.groups[0].cache.on_device
        held = self.model.held
        self.model.holdings = [one for one in self.model.holdings if one.expires > self.now]
        self.blocks.retention.expire(self.now)
        ended = [b for b in pool.cached() if index.at(b).digest in held - self.model.held]
        assert list(pool.cached())[: len(ended)] == ended

    @rule()
    def reset(self) -> None:
        self.blocks.reset_prefix_cache()

    @invariant()
    def blocks_are_held_as_the_model_says(self) -> None:
        group, held = self.blocks.groups[0], self.model.held
        for pool, index in ((group.device, group.cache.on_device), (group.host, group.cache._on_host)):
            entries = list(index.entries())
            assert [pool.is_held(e.block) for e in entries] == [e.digest in held for e in entries]
            assert pool.num_held == sum(e.digest in held for e in entries)
            order = [pool.is_held(block) for block in pool.cached()]
            assert order == sorted(order) and len(order) == pool.num_cached
            if order:
                assert pool.least_recently_used() == next(pool.cached())
            assert pool.num_used + pool.num_free + pool.num_cached + pool.num_pinned == pool.num_blocks


def test_holdings_are_those_of_a_simple_model() -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        RetentionMachine,
        settings=settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=checks),
    )


def test_an_operation_takes_the_same_time_however_many_blocks_are_held() -> None:
    """Counts the visited entries instead of time: a full cache of held blocks evicts without a search."""
    blocks = manager(4096, share=1.0)
    for client in range(8):
        for first in range(4):
            tokens = prompt(64, 10_000 * (4 * client + first))
            hold(blocks, tokens, client=str(client))
            serve(blocks, tokens)
    pool = blocks.groups[0].device
    assert pool.num_held == 2048
    visited = 0
    iterate = type(pool._cached).__iter__

    def counting(order: object) -> object:
        nonlocal visited
        visited += 1
        return iterate(order)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(pool._cached), "__iter__", counting)
        assert blocks.grow([(99, 0, 4000 * SIZE)]) is not None
    assert not visited
