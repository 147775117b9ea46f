"""Sleep mode of engines: the same answers after ``wake_up``; requests are refused meanwhile, none is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.config import make_config
from octavo.core.errors import ConfigError, EngineStateError, InvalidRequestError, OctavoError
from octavo.engine.async_llm import AsyncLLM
from octavo.server.errors import as_api_error

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "kernels": "reference",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 64,
    "num_host_blocks_override": 8,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
PROMPT = list(range(40))


def answer(llm: LLM) -> Any:
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    completion = output.outputs[0]
    return completion.token_ids, completion.logprobs, output.metrics.num_cached_tokens


def test_after_sleep_answers_are_the_same_and_the_prefix_cache_is_empty(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **OPTIONS)
    tokens, logprobs, _ = answer(llm)
    assert answer(llm) == (tokens, logprobs, 32)
    for _ in range(2):
        llm.sleep()
        llm.sleep()
        with pytest.raises(EngineStateError, match="sleeps: wake_up"):
            llm.generate(PROMPT, GREEDY)
        with pytest.raises(EngineStateError):
            llm.generate([PROMPT, PROMPT], GREEDY)
        llm.wake_up()
        llm.wake_up()
        assert answer(llm) == (tokens, logprobs, 0)
    stats = llm.llm_engine.stats()
    assert stats.blocks_used == 0


def test_it_does_not_sleep_while_requests_are_unfinished(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **OPTIONS, async_scheduling=True)
    engine = llm.llm_engine
    engine.add_request("a", PROMPT, GREEDY)
    with pytest.raises(EngineStateError, match="unfinished"):
        llm.sleep()
    engine.step()
    with pytest.raises(EngineStateError, match="unfinished"):
        llm.sleep()
    engine.abort_request("a")
    llm.sleep()
    llm.wake_up()
    assert answer(llm)


def test_weights_packed_for_the_cpu_stay_and_nothing_changes(tiny_model: Path) -> None:
    pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")
    llm = LLM(str(tiny_model), **{**OPTIONS, "kernels": "cpu"})
    before = answer(llm)[:2]
    with pytest.raises(ConfigError, match="kernels='reference'"):
        llm.sleep()
    assert answer(llm)[:2] == before


def test_an_engine_in_another_process_sleeps_and_wakes(tiny_model: Path) -> None:
    async def main() -> None:
        llm = await AsyncLLM.start(make_config(model=str(tiny_model), **OPTIONS))
        try:

            async def ask(name: str) -> list[int]:
                async for output in llm.generate(name, PROMPT, GREEDY, streaming=False):
                    last = output
                return list(last.outputs[0].token_ids)

            before = await ask("a")
            stream = await llm.submit("b", PROMPT, SamplingParams(max_tokens=80, ignore_eos=True))
            with pytest.raises(EngineStateError, match="1 requests are unfinished"):
                await llm.sleep()
            stream.close()
            await llm.sleep()
            assert llm.is_sleeping
            with pytest.raises(EngineStateError, match="sleeps"):
                await ask("c")
            await llm.wake_up()
            assert not llm.is_sleeping
            assert await ask("d") == before
        finally:
            await llm.shutdown()

    asyncio.run(main())


def test_an_engine_that_cannot_sleep_says_so_across_processes_and_stays_awake(tiny_model: Path) -> None:
    pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")

    async def main() -> None:
        llm = await AsyncLLM.start(make_config(model=str(tiny_model), **{**OPTIONS, "kernels": "cpu"}))
        try:
            with pytest.raises(OctavoError, match="kernels='reference'"):
                await llm.sleep()
            assert not llm.is_sleeping
        finally:
            await llm.shutdown()

    asyncio.run(main())


def test_clients_of_a_server_are_told_to_come_later() -> None:
    error = as_api_error(EngineStateError("the engine sleeps"))
    assert (error.status, error.code) == (503, "engine_asleep")
    assert as_api_error(InvalidRequestError("no")).status == 400
