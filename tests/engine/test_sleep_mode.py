"""Sleep mode of engines: the same answers after ``wake_up``; requests are refused meanwhile, none is lost."""

from __future__ import annotations

import asyncio
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError, EngineStateError, InvalidRequestError, WeightError
from octavo.engine.async_llm import AsyncLLM
from octavo.runner.cuda import put_to_sleep
from octavo.server.http.errors import as_api_error

pytestmark = pytest.mark.usefixtures("quick_collections")

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


@pytest.fixture(params=["reference", "cpu"])
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")
    return str(request.param)


@pytest.mark.parametrize("levels", [[1], [2], pytest.param([1, 2], marks=pytest.mark.slow)])
def test_after_sleep_answers_are_the_same_and_the_prefix_cache_is_empty(
    tiny_model: Path, kernels: str, levels: list[int]
) -> None:
    llm = LLM(str(tiny_model), **{**OPTIONS, "kernels": kernels})
    tokens, logprobs, _ = answer(llm)
    assert answer(llm) == (tokens, logprobs, 32)
    for _ in range(2):
        for level in levels:
            llm.sleep(level)
            llm.sleep()
        assert llm.is_sleeping
        with pytest.raises(EngineStateError, match="sleeps: wake_up"):
            llm.generate(PROMPT, GREEDY)
        with pytest.raises(EngineStateError):
            llm.generate([PROMPT, PROMPT], GREEDY)
        llm.wake_up()
        llm.wake_up()
        assert not llm.is_sleeping
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


def test_level_1_frees_the_cache_and_level_2_the_weights_too(tiny_model: Path, kernels: str) -> None:
    llm = LLM(str(tiny_model), **{**OPTIONS, "kernels": kernels})
    runner = llm.llm_engine.core.executor._worker.runner  # type: ignore[attr-defined]
    caches = [weakref.ref(cache.key) for cache in runner._cache.device]
    packed, network = weakref.ref(runner.loaded.network.layers[0].mlp.down.packed), weakref.ref(runner.loaded.network)
    freed = runner.sleep(1)
    assert freed == sum(64 * size + 8 * size for size, *_ in runner.loaded.layers.shapes()) > 0
    assert [cache() for cache in caches] == [None] * 2
    assert packed() is not None and network() is not None, "the weights stay as they are packed"
    assert runner.sleep(1) == 0
    assert runner.sleep(2) > 0
    assert (packed(), network()) == (None, None)
    assert runner.sleep(2) == 0
    runner.wake_up()
    assert answer(llm)


def test_on_a_gpu_the_weights_wait_in_host_memory_or_are_dropped(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **OPTIONS)
    runner = llm.llm_engine.core.executor._worker.runner  # type: ignore[attr-defined]
    before = answer(llm)[:2]
    runner.loaded.device.put_to_sleep = put_to_sleep  # a pretence: tensors stay where they are
    table = runner.loaded.network.head.packed.weight
    size = table.nbytes
    llm.sleep(1)
    assert table.untyped_storage().nbytes() == 0
    assert runner._weights._asleep.bytes_freed >= size > 0
    llm.wake_up()
    assert runner.loaded.network.head.packed.weight is table
    assert answer(llm)[:2] == before
    llm.sleep(1)
    assert runner.sleep(2) == 0, "the device's memory is free already"
    assert runner._weights._asleep is None and not runner.loaded.has_weights
    llm.wake_up()
    assert answer(llm)[:2] == before


def test_a_checkpoint_that_has_gone_is_said_on_waking_and_waking_can_be_repeated(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "m")
    llm = LLM(str(folder), **OPTIONS)
    before = answer(llm)[:2]
    llm.sleep(2)
    weights = folder / "model.safetensors"
    weights.rename(tmp_path / "away")
    with pytest.raises(WeightError, match="holds neither"):
        llm.wake_up()
    assert llm.is_sleeping
    (tmp_path / "away").rename(weights)
    llm.wake_up()
    assert answer(llm)[:2] == before


@pytest.mark.parametrize("level", [0, 3, "1"])
def test_there_are_two_levels(tiny_model: Path, level: Any) -> None:
    llm = LLM(str(tiny_model), **OPTIONS)
    with pytest.raises(ConfigError, match=r"level of sleep must be 1 .* or 2"):
        llm.sleep(level)
    assert not llm.is_sleeping


def test_an_engine_in_another_process_sleeps_and_wakes(tiny_model: Path) -> None:
    async def main() -> None:
        llm = await AsyncLLM.start(make_config(model=str(tiny_model), **{**OPTIONS, "kernels": "auto"}))
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


def test_clients_of_a_server_are_told_to_come_later() -> None:
    error = as_api_error(EngineStateError("the engine sleeps"))
    assert (error.status, error.code) == (503, "engine_asleep")
    assert as_api_error(InvalidRequestError("no")).status == 400
