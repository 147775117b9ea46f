"""Replicas behind one front end: which of them gets a request, and how they start and end."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError, EngineDeadError
from octavo.core.outputs import RequestOutput
from octavo.engine.replicas import Router, Routing, router_of
from tests.engine_state import core_process_of

# --- the router -------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("share", "first_away"), [(1.0, 2), (0.5, 1), (0.01, 1)])
def test_a_prefix_that_may_be_fetched_is_left_behind_for_less_load(share: float, first_away: int) -> None:
    """A prefix of 160 tokens, and requests of 100: leaving it costs the share of 160 that fetching takes."""
    router = Router(2, BLOCK)
    for replica in range(2):
        router.observe_fetches(replica, share)
    system = prompt(*range(10))
    assert router.choose(system, 160) == 0
    router.release(0, 160)
    assert router.choose(prompt(99), 16) == 1
    router.release(1, 16)
    assert [router.choose(system + prompt(60 + i), 100) for i in range(3)].index(1) == first_away


def test_a_replica_that_fetches_slowly_keeps_to_its_own_prefixes() -> None:
    router, system = Router(3, BLOCK), prompt(*range(10))
    router.observe_fetches(2, 0.1)
    assert router.choose(system, 1000) == 0
    assert router.choose(prompt(99), 850) == 1
    assert router.choose(system, 1) == 2, "144 tokens saved of 160, and nothing outstanding"
    router.restart(2)
    router.observe_fetches(1, 0.1)
    assert router.choose(prompt(98), 800) == 2
    assert router.choose(system, 1) == 1, "850 outstanding and 144 saved, against 800 and none, and 1000 and 160"


def test_prefixes_of_other_salts_are_not_shared() -> None:
    router = Router(2, BLOCK)
    router.choose(prompt(1, 2, 3), 1, "alice")
    router.release(0, 1)
    assert router.choose(prompt(1, 2, 3), 1, "alice") == 0
    router.release(0, 1)
    assert router.choose(prompt(1, 2, 3), 1, "bob") == 1


def test_a_conversation_stays_where_it_was_although_its_prompt_is_another() -> None:
    router, key = Router(2, BLOCK), ("client", "chat")
    assert router.choose(prompt(*range(4)), 64, key=key) == 0
    router.release(0, 64)
    assert router.choose(prompt(*range(100, 104)), 64, key=key) == 0
    router.release(0, 64)
    assert router.choose(prompt(*range(200, 204)), 64, key=("other", "chat")) == 1
    router.release(1, 64)
    router.choose(prompt(*range(300, 304)), 200, among=[0])
    assert router.choose(prompt(*range(400, 404)), 64, key=key) == 1, "half of a prompt does not outweigh 200 tokens"
    router.restart(1)
    router.release(0, 200)
    assert router.choose(prompt(*range(500, 504)), 64, key=key) == 0


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


# --- replicas ---------------------------------------------------------------------------------------------------------


OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "block_size": 4, "num_gpu_blocks_override": 160}
WORK = [
    (f"prompt {i} " * (1 + i % 3), SamplingParams(temperature=0.7, seed=i, max_tokens=20, n=1 + i % 2))
    for i in range(8)
]


def run(model: Path, scenario: Callable[[AsyncLLM], Awaitable[Any]], **options: Any) -> Any:
    """Runs a scenario on two replicas."""

    async def main() -> Any:
        async with AsyncLLM(model, data_parallel_size=2, **{**OPTIONS, **options}) as llm:
            return await scenario(llm)

    return asyncio.run(main())


async def last(llm: AsyncLLM, name: str, prompt: Any, params: SamplingParams, **options: Any) -> RequestOutput:
    """The last output of a request, which has all of it."""
    outputs = [output async for output in llm.generate(name, prompt, params, **options)]
    return outputs[-1]


def test_replicas_share_the_work_and_give_the_answers_of_one(tiny_model: Path) -> None:
    alone = LLM(str(tiny_model), **OPTIONS).generate([p for p, _ in WORK], [s for _, s in WORK], use_tqdm=False)

    async def scenario(llm: AsyncLLM) -> tuple[list[RequestOutput], list[Any], list[Any]]:
        outputs = await asyncio.gather(*(last(llm, str(i), p, s) for i, (p, s) in enumerate(WORK)))
        stats = await llm.replica_stats()
        total = await llm.stats()
        assert total.steps == sum(replica.steps for replica in stats)
        return outputs, stats, await llm.collective_rpc("kv_groups")

    outputs, stats, groups = run(tiny_model, scenario)
    assert [[c.token_ids for c in o.outputs] for o in outputs] == [[c.token_ids for c in o.outputs] for o in alone]
    assert all(replica.steps > 0 and replica.num_running == 0 for replica in stats)
    assert len(groups) == 2 and groups[0] == groups[1]


def test_a_shared_prefix_is_computed_by_every_replica(tiny_model: Path) -> None:
    async def scenario(llm: AsyncLLM) -> list[int]:
        await llm.add_shared_prefix("a system prompt for all", "system")
        outputs = await asyncio.gather(
            *(last(llm, str(i), f"a system prompt for all, {i}", SamplingParams(max_tokens=2)) for i in range(4))
        )
        assert [replica.blocks_pinned for replica in await llm.replica_stats()] == [6, 6]
        return [output.metrics.num_cached_tokens for output in outputs if output.metrics]

    assert min(run(tiny_model, scenario, data_parallel_routing="round_robin")) >= 20


def long(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1, seed=seed, max_tokens=200, ignore_eos=True)


def test_the_loss_of_a_replica_is_not_that_of_the_engine(tiny_model: Path) -> None:
    """Each replica runs two requests and has two that wait; those of the first, which is lost, go on at the second."""
    alone = LLM(str(tiny_model), **OPTIONS)
    expected = [alone.generate("x" * 8, long(i), use_tqdm=False)[0].outputs[0].token_ids for i in range(8)]

    async def scenario(llm: AsyncLLM) -> tuple[list[Any], list[Any]]:
        started = asyncio.Event()

        async def stream(name: str, seed: int) -> RequestOutput:
            whole = None
            async for output in llm.generate(name, "x" * 8, long(seed)):
                whole = output
                started.set()
            assert whole is not None
            return whole

        # Round robin: even ones go to the first replica, where two run at once and the others wait.
        tasks = [asyncio.ensure_future(stream("0", 0)), asyncio.ensure_future(last(llm, "1", "x" * 8, long(1)))]
        await started.wait()
        tasks.append(asyncio.ensure_future(last(llm, "2", "x" * 8, long(2), streaming=False)))
        while (await llm.replica_stats())[0].num_running < 2:
            await asyncio.sleep(0.005)
        tasks += [asyncio.ensure_future(last(llm, str(i), "x" * 8, long(i))) for i in range(3, 8)]
        await asyncio.sleep(0)
        core_process_of(llm, 0).end()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert not llm.died.is_set()
        after = await last(llm, "after", "x" * 8, long(0))
        core_process_of(llm, 1).end()
        await asyncio.wait_for(llm.died.wait(), 20)
        with pytest.raises(EngineDeadError):
            await last(llm, "too late", "x", long(0))
        return results, after.outputs[0].token_ids

    results, after = run(tiny_model, scenario, data_parallel_routing="round_robin", max_num_seqs=2, engine_restarts=0)
    assert [result.outputs[0].token_ids for result in results] == expected
    assert after == expected[0]


def test_replicas_are_for_servers(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"data_parallel_size \(2\) is for AsyncLLM and octavo serve"):
        LLM(str(tiny_model), data_parallel_size=2, **OPTIONS)
