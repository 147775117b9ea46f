"""Which replica gets a request: prefixes, load, turns, and replicas that are lost."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from octavo.config.engine_config import EngineConfig
from octavo.engine.replicas import Router, Routing, router_of

BLOCK = 16


def prompt(*parts: int) -> list[int]:
    """Blocks of tokens."""
    return [part for part in parts for _ in range(BLOCK)]


def test_equal_replicas_take_turns() -> None:
    for routing in ("prefix", "least_loaded", "round_robin"):
        router = Router(3, BLOCK, routing)
        assert [router.choose(prompt(i), 16) for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_replica_with_the_fewest_outstanding_tokens_is_chosen() -> None:
    router = Router(2, BLOCK, "least_loaded")
    assert [router.choose([1], work) for work in (100, 30, 30, 30, 30)] == [0, 1, 1, 1, 1]
    assert router.choose([1], 1) == 0, "100 against 120"
    router.release(1, 30)
    assert router.choose([1], 1) == 1


def test_a_known_prefix_wins_until_the_load_outweighs_it() -> None:
    router = Router(2, BLOCK)
    system = prompt(*range(10))
    assert router.choose(system + prompt(50), 200) == 0
    router.release(0, 200)
    assert router.choose(prompt(99), 16) == 1
    router.release(1, 16)
    assert [router.choose(system + prompt(60 + i), 100) for i in range(2)] == [0, 0], "160 cached tokens"
    assert router.choose(system + prompt(70), 100) == 1, "200 outstanding tokens cost more than 160 cached ones save"


def test_prefixes_of_other_salts_are_not_shared() -> None:
    router = Router(2, BLOCK)
    router.choose(prompt(1, 2, 3), 1, "alice")
    router.release(0, 1)
    assert router.choose(prompt(1, 2, 3), 1, "alice") == 0
    router.release(0, 1)
    assert router.choose(prompt(1, 2, 3), 1, "bob") == 1


@pytest.mark.parametrize("routing", ["prefix", "least_loaded", "round_robin"])
def test_only_those_that_can_serve_a_request_get_it(routing: Routing) -> None:
    router = Router(3, BLOCK, routing)
    assert [router.choose(prompt(1), 5, among=[1]) for _ in range(3)] == [1, 1, 1]
    assert router.choose(prompt(2), 5, among=[1, 2]) == 2


def test_what_a_replica_held_is_forgotten_when_it_starts_again() -> None:
    router = Router(2, BLOCK)
    assert [router.choose(prompt(1, 2, 3), 1) for _ in range(3)] == [0, 0, 0]
    router.restart(0)
    assert router.choose(prompt(4), 1) == 1
    assert router.choose(prompt(1, 2, 3), 1) == 0, "all that it was given is gone"
    assert router.choose(prompt(1, 2, 3), 1) == 0


def test_conversations_stay_where_their_history_is() -> None:
    """16 conversations of 6 turns, in random order, on 4 replicas: blocks found where an earlier turn had left them."""

    def hits(routing: str) -> float:
        shuffle, router = random.Random(3), Router(4, BLOCK, routing)  # type: ignore[arg-type]
        turns = [conversation for conversation in range(16) for _ in range(6)]
        shuffle.shuffle(turns)
        histories: dict[int, list[int]] = {c: prompt(1000 + c) for c in range(16)}
        held: list[set[tuple[int, ...]]] = [set() for _ in range(4)]
        found = total = 0
        for turn in turns:
            histories[turn] = histories[turn] + prompt(shuffle.randrange(10**6), shuffle.randrange(10**6))
            tokens = histories[turn]
            replica = router.choose(tokens, len(tokens))
            ends = range(BLOCK, len(tokens) + 1, BLOCK)
            found += sum(tuple(tokens[:end]) in held[replica] for end in ends)
            total += len(ends)
            held[replica] |= {tuple(tokens[:end]) for end in ends}
            router.release(replica, len(tokens))
        return found / total

    assert hits("prefix") > 0.7
    assert hits("round_robin") < 0.45


@pytest.mark.parametrize(("replicas", "caching"), [(1, True), (2, False), (2, True)])
def test_prompts_are_remembered_only_where_there_are_several_replicas_with_caches(replicas: int, caching: bool) -> None:
    config = EngineConfig(model="any", data_parallel_size=replicas, enable_prefix_caching=caching)
    router = router_of(config)
    tracemalloc.start()
    try:
        for number in range(200):
            router.release(router.choose(prompt(*range(number * 100, number * 100 + 100)), 1600), 1600)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    remembers = held > 1 << 20  # 20,000 digests
    assert remembers == (replicas > 1 and caching)
