"""Engine cores that die, hang or are killed again and again: every request goes on with the bits that it gets alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo import AsyncLLM, RequestOutput
from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError, EngineDeadError, EngineStateError
from octavo.core.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.core_start import MODULE
from octavo.process.fork_server import ForkServer
from tests.busy_machine import PATIENCE
from tests.engine.test_resumption import OPTIONS, PARAMS, PROMPTS, engine, finish
from tests.whole_outputs import everything

LONG = SamplingParams(temperature=1.0, seed=11, max_tokens=150, ignore_eos=True)


@pytest.fixture(scope="module")
def whole(tiny_model: Path) -> list[Any]:
    """What one engine core answers."""
    return [everything(output) for output, _ in finish(engine(tiny_model))]


def run(model: Path, scenario: Callable[[AsyncLLM], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with AsyncLLM(model, **{**OPTIONS, "engine_restarts": 50, **options}) as llm:
            return await asyncio.wait_for(scenario(llm), PATIENCE)

    return asyncio.run(main())


def kill(llm: AsyncLLM, replica: int = 0, number: int = signal.SIGKILL) -> None:
    """Sends a signal to the core of a replica, if it has one now."""
    pid = llm.replica_states()[replica].pid
    if pid is not None:
        os.kill(pid, number)


async def stream(llm: AsyncLLM, name: str, prompt: Any, params: Any, took: Callable[[], object] = int) -> RequestOutput:
    """A whole request; ``took`` is called after each of its outputs."""
    outputs = []
    async for output in await llm.submit(name, prompt, params):
        outputs.append(output)
        took()
    total = outputs[0]
    for output in outputs[1:]:
        total += output
    return total


async def all_kinds(llm: AsyncLLM, took: Callable[[], object]) -> list[Any]:
    work = enumerate(zip(PROMPTS, PARAMS, strict=True))
    outputs = await asyncio.gather(*(stream(llm, str(i), prompt, params, took) for i, (prompt, params) in work))
    return [everything(output) for output in outputs]


#: In which cores are killed: in the first two a few times by default, in all as often as outputs allow in slow tests.
LAYOUTS: list[dict[str, Any]] = [{}, {"standby_engines": 1}, {"data_parallel_size": 2}]


@pytest.mark.parametrize(
    ("options", "times"),
    [
        *((options, 3) for options in LAYOUTS[:2]),
        *(
            pytest.param(options, 50, marks=pytest.mark.slow)
            for options in (
                *LAYOUTS,
                {"tensor_parallel_size": 2},
                {"pipeline_parallel_size": 2},
                {"async_scheduling": True},
            )
        ),
    ],
    ids=str,
)
def test_a_killed_core_costs_no_request_a_bit(
    options: dict[str, Any], times: int, whole: list[Any], tiny_model: Path
) -> None:
    """The core of a replica is killed after every 12 outputs, so many times at most."""

    async def scenario(llm: AsyncLLM) -> None:
        taken = 0

        def took() -> None:
            nonlocal taken
            taken += 1
            if taken % 12 == 0 and taken <= 12 * times:
                kill(llm, taken // 12 % len(llm.replica_states()))

        assert await all_kinds(llm, took) == whole
        assert sum(state.num_restarts for state in llm.replica_states()) >= 1
        assert not llm.died.is_set()
        assert (await llm.stats()).blocks_used == 0

    run(tiny_model, scenario, **options)


def test_forked_cores_answer_alike_and_are_replaced_by_others(whole: list[Any], tiny_model: Path) -> None:
    async def main() -> None:
        forks = ForkServer(MODULE)
        forks.start()
        while not forks.is_ready:
            await asyncio.sleep(0.01)
        llm = await AsyncLLM.start(make_config(model=str(tiny_model), engine_restarts=5, **OPTIONS), forks=forks)
        taken, parents = 0, set[int]()

        def took() -> None:
            nonlocal taken
            taken += 1
            pid = llm.replica_states()[0].pid
            if taken % 40 == 0 and taken < 120 and pid is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    parents.add(psutil.Process(pid).ppid())
                kill(llm, number=signal.SIGKILL if taken == 40 else signal.SIGSEGV)

        try:
            assert await all_kinds(llm, took) == whole
            assert sum(state.num_restarts for state in llm.replica_states()) >= 1
            assert forks._process is not None and parents == {forks._process.pid}
        finally:
            await llm.shutdown()
            forks.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_a_hung_core_is_replaced(tiny_model: Path) -> None:
    async def scenario(llm: AsyncLLM) -> tuple[RequestOutput, RequestOutput, float]:
        right = await stream(llm, "right", "x", LONG)
        taken, stopped = 0, 0.0

        def took() -> None:
            nonlocal taken, stopped
            taken += 1
            if taken == 20:
                kill(llm, number=signal.SIGSTOP)
                stopped = time.monotonic()

        again = await stream(llm, "again", "x", LONG, took)
        return right, again, time.monotonic() - stopped

    right, again, seconds = run(tiny_model, scenario, step_timeout=1)
    assert everything(right) == everything(again)
    assert seconds < 30


@pytest.mark.slow
def test_a_lost_worker_is_a_lost_core(tiny_model: Path) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        import psutil

        right = await stream(llm, "right", "x", LONG)
        taken = 0

        def took() -> None:
            nonlocal taken
            taken += 1
            if taken == 20:
                psutil.Process(llm.replica_states()[0].pid).children()[1].kill()

        assert everything(await stream(llm, "again", "x", LONG, took)) == everything(right)
        assert llm.replica_states()[0].num_restarts == 1

    run(tiny_model, scenario, tensor_parallel_size=2)


def test_requests_that_come_while_no_core_lives_wait(tiny_model: Path) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        right = await stream(llm, "right", "x", LONG)
        kill(llm)
        while llm.is_available:
            await asyncio.sleep(0.001)
        tasks = [asyncio.ensure_future(stream(llm, str(i), "x", LONG)) for i in range(3)]
        await asyncio.sleep(0)
        await llm.abort("1")
        stats = await llm.stats()  # of the next core
        assert stats.num_waiting + stats.num_running <= 2
        outputs = await asyncio.gather(*tasks)
        assert outputs[1].outputs[0].finish_reason == "abort"
        assert everything(outputs[0]) == everything(outputs[2]) == everything(right)

    run(tiny_model, scenario)


def test_beyond_the_limit_the_engine_ends(tiny_model: Path) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        for _ in range(2):
            await stream(llm, "a", "x", SamplingParams(max_tokens=2))
            kill(llm)
            while llm.is_available:
                await asyncio.sleep(0.001)
            with pytest.raises(EngineDeadError, match="SIGKILL") if llm.died.is_set() else _nothing():
                await stream(llm, "b", "x", SamplingParams(max_tokens=2))
        assert llm.died.is_set()

    run(tiny_model, scenario, engine_restarts=1)


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_pins_and_prefixes_are_there_again(tiny_model: Path) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        await llm.add_shared_prefix("a system prompt for all", "system")
        pinned = (await llm.stats()).blocks_pinned
        for _ in range(2):
            kill(llm)
            while llm.is_available:
                await asyncio.sleep(0.001)
            output = await stream(llm, "a", "a system prompt for all, 1", SamplingParams(max_tokens=2))
            assert output.metrics is not None and output.metrics.num_cached_tokens >= 20
            assert (await llm.stats()).blocks_pinned == pinned > 0

    run(tiny_model, scenario)


def test_an_answer_does_not_go_on_with_another_model(tiny_model: Path, tmp_path: Path) -> None:
    import shutil

    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)

    async def scenario(llm: AsyncLLM) -> None:
        taken = 0

        def took() -> None:
            nonlocal taken
            taken += 1
            if taken == 20:
                os.utime(model / "model.safetensors")
                kill(llm)

        output = await stream(llm, "a", "x", LONG, took)
        assert output.outputs[0].finish_reason == "error"
        assert "the model's files were changed" in (output.outputs[0].error or "")
        assert (await stream(llm, "b", "x", LONG)).outputs[0].finish_reason == "length"

    run(model, scenario)


def test_outputs_of_every_kind_go_on(tiny_model: Path) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        async def outputs(name: str, kind: RequestOutputKind, kills: bool) -> list[Any]:
            params = SamplingParams(temperature=1.0, seed=4, max_tokens=60, ignore_eos=True, output_kind=kind, stop="q")
            taken = []
            async for output in llm.generate(name, "x", params):
                taken.append((output.outputs[0].text, tuple(output.outputs[0].token_ids)))
                if kills and len(taken) == 7:
                    kill(llm)
            return taken

        for kind in RequestOutputKind:
            right = await outputs(f"right {kind}", kind, kills=False)
            again = await outputs(f"again {kind}", kind, kills=True)
            if kind is RequestOutputKind.DELTA:
                right, again = ([["".join(text for text, _ in o)]] for o in (right, again))
            assert right[-1] == again[-1]

    run(tiny_model, scenario)


def folder_of(model: Path, tmp_path: Path) -> Path:
    """A copy of a model whose files can be changed."""
    return Path(shutil.copytree(model, tmp_path / "model"))


def touch_weights(folder: Path) -> None:
    """Other files of the same content, as far as an engine can tell without reading them."""
    for path in folder.glob("*.safetensors"):
        os.utime(path, ns=(1, 1))


async def at_output(llm: AsyncLLM, name: str, count: int, action: Callable[[], Awaitable[Any]]) -> RequestOutput:
    """A long request, during which something is done after ``count`` outputs."""
    tasks, taken = [], 0

    def took() -> None:
        nonlocal taken
        taken += 1
        if taken == count:
            tasks.append(asyncio.ensure_future(action()))

    output = await stream(llm, name, "x", LONG, took)
    await asyncio.gather(*tasks)
    assert tasks
    return output


def test_a_drained_replica_gives_its_requests_to_the_others(whole: list[Any], tiny_model: Path) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        taken, tasks, moved = 0, [], []

        async def drain() -> None:
            for number in (0, 1, 0):
                moved.append(await llm.drain_replica(number))
                states = llm.replica_states()
                assert (states[number].status, states[number].num_open) == ("drained", 0)
                with pytest.raises(EngineStateError, match=f"no replica takes requests except {1 - number}"):
                    await llm.drain_replica(1 - number)
                await llm.undrain_replica(number)
                assert llm.replica_states()[number].status == "ready"

        def took() -> None:
            nonlocal taken
            taken += 1
            if taken == 20:
                tasks.append(asyncio.ensure_future(drain()))

        assert await all_kinds(llm, took) == whole
        await asyncio.gather(*tasks)
        assert sum(moved) > 0
        assert all(state.num_restarts == 0 for state in llm.replica_states())
        assert (await llm.stats()).blocks_used == 0
        with pytest.raises(ConfigError, match="there is no replica 2; there are 0 to 1"):
            await llm.drain_replica(2)

    run(tiny_model, scenario, data_parallel_size=2)


@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel_size": 2},
        *(pytest.param(options, marks=pytest.mark.slow) for options in ({}, {"standby_engines": 1})),
    ],
    ids=str,
)
def test_a_rolling_restart_breaks_no_answer(options: dict[str, Any], whole: list[Any], tiny_model: Path) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        before = [state.pid for state in llm.replica_states()]
        taken, tasks = 0, []

        def took() -> None:
            nonlocal taken
            taken += 1
            if taken == 20:
                tasks.append(asyncio.ensure_future(llm.restart_replicas()))

        assert await all_kinds(llm, took) == whole
        await asyncio.gather(*tasks)
        after = llm.replica_states()
        assert not {state.pid for state in after} & set(before)
        assert [(state.status, state.num_restarts) for state in after] == [("ready", 0)] * len(before)
        assert await all_kinds(llm, lambda: None) == whole

    run(tiny_model, scenario, **options)


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_answer_ends_with_the_files_that_it_began_with(replicas: int, tiny_model: Path, tmp_path: Path) -> None:
    model = folder_of(tiny_model, tmp_path)

    async def scenario(llm: AsyncLLM) -> None:
        right = await stream(llm, "right", "x", LONG)
        ended: list[str] = []

        async def restart() -> None:
            touch_weights(model)
            await llm.restart_replicas()
            ended.append("restart")

        async def one(name: str) -> RequestOutput:
            output = await at_output(llm, name, 10, restart) if name == "0" else await stream(llm, name, "x", LONG)
            ended.append("answer")
            return output

        outputs = await asyncio.gather(*(one(str(i)) for i in range(4)))
        assert ended.count("answer") == 4
        assert all(everything(output) == everything(right) for output in outputs)
        assert everything(await stream(llm, "later", "x", LONG)) == everything(right)
        assert all(state.num_restarts == 0 for state in llm.replica_states())

    run(model, scenario, data_parallel_size=replicas)


def test_what_a_core_begins_before_it_hands_it_over_stays_with_its_files(tiny_model: Path, tmp_path: Path) -> None:
    model = folder_of(tiny_model, tmp_path)

    async def scenario(llm: AsyncLLM) -> None:
        right = await stream(llm, "right", "x", LONG)
        replica = llm._replicas.all[0]
        old, hand_over = replica.core, replica.core.hand_over

        async def begins_meanwhile(group_ids: list[int]) -> None:
            await hand_over(group_ids)
            for group_id in group_ids:
                replica.open[group_id].digest = old.digest

        async def restart() -> None:
            touch_weights(model)
            old.hand_over = begins_meanwhile  # type: ignore[method-assign]
            for entry in replica.open.values():
                entry.digest = None  # their admission was not told yet
            await asyncio.wait_for(llm.restart_replicas(), PATIENCE)

        streams = (at_output(llm, "0", 10, restart), *(stream(llm, str(i), "x", LONG) for i in range(1, 4)))
        outputs = await asyncio.gather(*streams)
        assert all(everything(output) == everything(right) for output in outputs)
        assert replica.core is not old

    run(model, scenario)


def test_a_changed_tokenizer_is_refused_before_anything_is_stopped(tiny_model: Path, tmp_path: Path) -> None:
    model = folder_of(tiny_model, tmp_path)

    async def scenario(llm: AsyncLLM) -> None:
        before = llm.replica_states()
        (model / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes() + b"\n")
        with pytest.raises(ConfigError, match="configuration or tokenizer was changed"):
            await llm.restart_replicas()
        assert llm.replica_states() == before
        await stream(llm, "a", "x", LONG)

    run(model, scenario)


@pytest.mark.slow
def test_a_core_that_is_killed_in_a_rolling_restart_is_no_harm(tiny_model: Path) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        right = await stream(llm, "right", "x", LONG)

        async def restart() -> None:
            restarting = asyncio.ensure_future(llm.restart_replicas())
            for _ in range(3):
                await asyncio.sleep(0.3)
                kill(llm, 0)
                kill(llm, 1)
                with contextlib.suppress(EngineStateError):
                    await llm.restart_replicas()
            await restarting

        outputs = await asyncio.gather(
            *(at_output(llm, str(i), 10, restart if i == 0 else no_action) for i in range(4))
        )
        assert all(everything(output) == everything(right) for output in outputs)

    run(tiny_model, scenario, data_parallel_size=2)


async def no_action() -> None:
    """Nothing is done."""
