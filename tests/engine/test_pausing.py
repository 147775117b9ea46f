"""Generation that is paused, memory that is restored in parts, and requests whose KV entries are dropped."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, ConfigError, EngineDeadError, RequestOutput, SamplingParams
from octavo.core.sampling_params import BeamSearchParams
from octavo.engine.async_llm import PauseMode
from tests.engine_state import core_process_of

pytestmark = pytest.mark.usefixtures("quick_collections")

OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 96, "block_size": 4, "num_threads": 1, "max_model_len": 200}
PROMPTS = [list(range(5, 5 + n)) for n in (40, 12, 7)]
LONG = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True, logprobs=1)


def whole(outputs: list[RequestOutput]) -> list[Any]:
    return [[(c.token_ids, c.logprobs, c.finish_reason) for c in output.outputs] for output in outputs]


async def steps_done(llm: AsyncLLM) -> int:
    return (await llm.stats()).steps


def test_kept_requests_go_on_with_the_same_answer(tiny_model: Path) -> None:
    """Also if what they have computed is dropped meanwhile; one that comes meanwhile waits."""
    expected = whole(LLM(tiny_model, **OPTIONS).generate([*PROMPTS], LONG, use_tqdm=False))

    async def served(resets: bool) -> list[Any]:
        async with AsyncLLM(str(tiny_model), **OPTIONS) as llm:
            seen = [0, 0]

            async def last(i: int) -> RequestOutput:
                async for output in llm.generate(str(i), PROMPTS[i], LONG):
                    if i < 2:
                        seen[i] = len(output.outputs[0].token_ids)
                return output

            tasks = [asyncio.ensure_future(last(i)) for i in range(2)]
            while min(seen) < 5:
                await asyncio.sleep(0)
            await llm.pause_generation(mode="keep")
            assert await llm.is_paused()
            late = asyncio.ensure_future(last(2))
            steps = await steps_done(llm)
            await asyncio.sleep(0.3)
            assert await steps_done(llm) == steps and llm.num_open == 2
            if resets:
                assert await llm.reset_prefix_cache(reset_running_requests=True)
                assert (await llm.stats()).blocks_used == (await llm.stats()).blocks_cached == 0
            await llm.resume_generation()
            assert not await llm.is_paused()
            return whole(await asyncio.gather(*tasks, late))

    for resets in (False, True):
        assert asyncio.run(served(resets)) == expected


@pytest.mark.parametrize(("mode", "reason", "clears"), [("abort", "abort", True), ("wait", "length", False)])
def test_open_requests_end_before_the_pause(tiny_model: Path, mode: PauseMode, reason: str, clears: bool) -> None:
    async def main() -> None:
        async with AsyncLLM(str(tiny_model), **OPTIONS) as llm:
            with pytest.raises(ConfigError, match="mode must be abort, wait, keep, not 'later'"):
                await llm.pause_generation(mode="later")  # type: ignore[arg-type]
            stream = await llm.submit("a", PROMPTS[0], LONG)
            first = await anext(stream)
            await llm.pause_generation(mode=mode, clear_cache=clears)
            assert llm.num_open == 0
            assert [output async for output in stream][-1].outputs[0].finish_reason == reason, first
            assert ((await llm.stats()).blocks_cached == 0) is clears
            waits = asyncio.ensure_future(llm.submit("b", PROMPTS[0], LONG))
            await asyncio.sleep(0.05)
            assert not waits.done()
            await llm.resume_generation()
            async for output in await waits:
                last = output
            assert last.outputs[0].finish_reason == "length"
            await llm.pause_generation()
            waits = asyncio.ensure_future(llm.submit("c", PROMPTS[0], LONG))
            await asyncio.sleep(0)
            llm.shutdown()
            with pytest.raises(EngineDeadError):
                await waits

    asyncio.run(main())


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"preemption_mode": "swap", "max_num_seqs": 4}])
def test_running_requests_compute_again_what_was_dropped(tiny_model: Path, options: dict[str, Any]) -> None:
    """Of whatever kind, running, waiting or swapped: the answers are the same."""
    few = {**OPTIONS, **options, "num_gpu_blocks_override": 30, "max_model_len": 120}
    params: list[SamplingParams | BeamSearchParams] = [
        LONG,
        SamplingParams(n=3, seed=4, max_tokens=30, logprobs=1),
        BeamSearchParams(beam_width=2, max_tokens=9),
    ]
    expected = whole(LLM(tiny_model, **few).generate([*PROMPTS], params, use_tqdm=False))
    llm = LLM(tiny_model, **few)
    engine, done, resets = llm.llm_engine, {}, 0
    for i, (prompt, wanted) in enumerate(zip(PROMPTS, params, strict=True)):
        engine.add_request(str(i), prompt, wanted)
    for step in range(10_000):
        if engine.stats().num_swapped if "preemption_mode" in options and not resets else step % 11 == 5:
            resets += 1
            engine.reset_prefix_cache(reset_running_requests=True)
            stats = engine.stats()
            assert stats.blocks_used == stats.blocks_cached == stats.host_blocks_used == stats.num_running == 0
        for output in engine.step():
            done[output.request_id] = output
        if not engine.has_unfinished_requests():
            break
    assert whole([done[str(i)] for i in range(3)]) == expected
    assert resets > 2 and engine.stats().preemptions_by_recompute > 3


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_restored_in_parts(tiny_model: Path, level: int) -> None:
    llm = LLM(tiny_model, **OPTIONS)
    expected = whole(llm.generate([*PROMPTS], LONG, use_tqdm=False))
    for order in (["weights", "kv_cache"], ["kv_cache", "weights"]):
        llm.sleep(level)
        with pytest.raises(ConfigError, match="weights, kv_cache, not weight"):
            llm.wake_up(tags=["weight"])
        awake = [llm.wake_up(tags=[tag]) for tag in order]
        # On a CPU weights stay at level 1.
        assert awake == ([True, True] if level == 1 and order[0] == "kv_cache" else [False, True])
        assert whole(llm.generate([*PROMPTS], LONG, use_tqdm=False)) == expected
    llm.sleep(level)
    assert not llm.wake_up(tags=["weights"])
    llm.sleep(2)  # what was restored is freed again
    assert llm.wake_up()
    assert whole(llm.generate([*PROMPTS], LONG, use_tqdm=False)) == expected


def test_a_shutdown_need_not_be_awaited(tiny_model: Path) -> None:
    async def main(waits: bool) -> AsyncLLM:
        llm = AsyncLLM(str(tiny_model), **OPTIONS)
        stream = await llm.submit("a", PROMPTS[0], LONG)
        await anext(stream)
        llm.shutdown()
        with pytest.raises(EngineDeadError):
            await llm.submit("b", PROMPTS[0], LONG)
        assert [output async for output in stream][-1].outputs[0].finish_reason == "abort"
        if waits:
            await llm.shutdown()
        return llm

    for waits in (False, True):
        assert ended(asyncio.run(main(waits)))

    async def served() -> AsyncLLM:
        llm = AsyncLLM(str(tiny_model), **OPTIONS)
        await llm.ready()
        return llm

    llm = asyncio.run(served())
    llm.shutdown()  # the event loop has ended
    assert ended(llm)
    asyncio.run(AsyncLLM(str(tiny_model), **OPTIONS).get_tokenizer())
    AsyncLLM(str(tiny_model), **OPTIONS).shutdown()  # nothing was loaded


def ended(llm: AsyncLLM) -> bool:
    """Whether the engine's process ends, within seconds."""
    return core_process_of(llm)._process.wait(20) is not None
