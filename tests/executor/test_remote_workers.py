"""Engines of several worker processes: the answers of one process, and what becomes of workers that fail."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError, EngineDeadError, WeightError
from octavo.executor.worker import Worker
from tests.busy_machine import eventually
from tests.engine_state import workers_of
from tests.executor.small_engines import answers, make


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[Any]:
    """The answers of one process with room for all."""
    return answers(make(tiny_model, num_gpu_blocks_override=400, max_num_batched_tokens=256))


@pytest.mark.parametrize(
    ("stages", "ranks", "preemption"),
    [
        (2, 2, "swap"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 1, "swap"), (1, 2, "recompute"))),
    ],
)
def test_workers_give_the_answers_of_one_process(
    stages: int, ranks: int, preemption: str, tiny_model: Path, alone: list[Any]
) -> None:
    llm = make(
        tiny_model,
        pipeline_parallel_size=stages,
        tensor_parallel_size=ranks,
        preemption_mode=preemption,
        num_host_blocks_override=100,
    )
    core = llm.llm_engine.core
    processes = workers_of(llm)
    assert len(processes) == stages * ranks
    assert answers(llm) == alone
    stats = core.scheduler.stats()
    assert stats.preemptions_by_swap + stats.preemptions_by_recompute > 0, "the blocks were to be short"
    assert (stats.blocks_used, stats.num_running) == (0, 0)
    core.shutdown()
    assert not any(process.is_running() for process in processes), "no process is left"


# --- calls of workers ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tiny_model: Path) -> Iterator[LLM]:
    """Two tensor-parallel workers."""
    llm = make(tiny_model, tensor_parallel_size=2)
    yield llm
    llm.llm_engine.core.shutdown()


def rank_and_sum(worker: Worker, a: int, b: int = 0) -> list[int]:
    return [worker.rank, a + b]


def sleep_on_second(worker: Worker, seconds: float) -> None:
    if worker.rank == 1:
        time.sleep(seconds)


def test_methods_and_functions_are_called_on_every_worker(pair: LLM) -> None:
    executor = pair.llm_engine.core.executor
    assert executor.collective_rpc(rank_and_sum, [3], {"b": 4}) == [[0, 7], [1, 7]]
    (first,), (second,) = executor.collective_rpc("kv_groups")
    assert first == second, "each has one of two KV heads"


def test_calls_that_cannot_be_made_are_refused_and_the_workers_go_on(pair: LLM) -> None:
    executor = pair.llm_engine.core.executor
    with pytest.raises(ConfigError, match="no method 'nonsense'"):
        executor.collective_rpc("nonsense")
    with pytest.raises(ConfigError, match="must be a function of a module"):
        executor.collective_rpc(lambda worker: 1)
    with pytest.raises(Exception, match="TypeError"):
        executor.collective_rpc(rank_and_sum)
    with pytest.raises(ConfigError, match="takes plain data as arguments"):
        executor.collective_rpc("init_device", [object()])
    assert pair.generate("ab", use_tqdm=False)[0].finished


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_killed_worker_ends_the_engine_and_its_processes_at_once(tiny_model: Path) -> None:
    llm = make(tiny_model, tensor_parallel_size=2)
    processes = workers_of(llm)
    threading.Timer(0.3, os.kill, (processes[1].pid, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"worker 1 \(process \d+\) was ended by signal 9 \(SIGKILL\)"):
        for _ in range(10_000):
            llm.generate("ab", SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    assert time.monotonic() - start < 20
    assert not any(process.is_running() for process in processes)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        llm.generate("ab", use_tqdm=False)


def fail_second(worker: Worker) -> None:
    if worker.rank == 1:
        runner: Any = worker.runner
        runner.submit = lambda *args: 1 / 0


def test_a_step_that_fails_on_one_worker_ends_the_engine_with_the_reason(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.executor.remote._GRACE", 0.2)
    llm = make(tiny_model, tensor_parallel_size=2)
    processes = workers_of(llm)
    llm.llm_engine.core.executor.collective_rpc(fail_second)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="worker 1 failed: ZeroDivisionError"):
        llm.generate("ab", use_tqdm=False)
    assert time.monotonic() - start < 20
    assert not any(process.is_running() for process in processes)


def sample_another_token_on_second(worker: Worker) -> None:
    """From its fourth step on."""
    if worker.rank != worker.layout.world_size - 1:
        return
    runner: Any = worker.runner
    submit, steps = runner.submit, itertools.count(1)

    def other(*args: Any) -> Any:
        step, number = submit(*args), next(steps)
        wait = step.wait

        def changed() -> Any:
            result = wait()
            result.token_ids = [token + (number >= 4) for token in result.token_ids]
            return result

        return SimpleNamespace(wait=changed)

    runner.submit = other


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({}, r"in step 4 ranks \[1\]"),
        pytest.param({"check_ranks": 3}, r"in one of the steps 4 to 6 ranks \[1\]", marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2, "check_ranks": 1}, r"in step 4 ranks \[3\]", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_samples_other_tokens_ends_the_engine(
    options: dict[str, Any], where: str, tiny_model: Path
) -> None:
    llm = make(tiny_model, tensor_parallel_size=2, **options)
    processes = workers_of(llm)
    llm.llm_engine.core.executor.collective_rpc(sample_another_token_on_second)
    with pytest.raises(EngineDeadError, match=where + " have sampled other tokens than rank"):
        llm.generate("ab", SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert not any(process.is_running() for process in processes)


def test_a_worker_that_hangs_ends_the_engine_after_the_timeout(tiny_model: Path) -> None:
    llm = make(tiny_model, pipeline_parallel_size=2)
    processes = workers_of(llm)
    executor = llm.llm_engine.core.executor
    executor.collective_rpc(rank_and_sum, [1])  # the workers import this module, which may take longer
    with pytest.raises(TimeoutError, match=r"workers \[1\] have not answered within 3 s"):
        executor.collective_rpc(sleep_on_second, [60.0], timeout=3.0)
    assert not any(process.is_running() for process in processes)


def test_workers_that_cannot_load_say_why_and_are_gone(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    before = set(psutil.Process().children())
    with pytest.raises(WeightError, match=r"model.safetensors"):
        make(tmp_path, tensor_parallel_size=2)
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "cannot be shared by 3"),
        ({"pipeline_parallel_size": 3}, "more than the network's 2 layers"),
        pytest.param(
            {"pipeline_parallel_size": 2, "pipeline_layer_partition": [1, 2]},
            "has 3 layers, but the network has 2",
            marks=pytest.mark.slow,
        ),
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": [2]}, "a positive number for each of the 2 stages"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, "use mp, ray or external_launcher"),
        ({"distributed_executor_backend": "external_launcher"}, "needs a launcher such as torchrun"),
        (
            {"distributed_executor_backend": "external_launcher", "scheduling_policy": "deadline"},
            "'deadline' depends on time, which differs between processes",
        ),
        ({"tensor_parallel_size": 0}, "greater than or equal to 1"),
    ],
)
def test_impossible_sizes_are_refused(options: dict[str, Any], message: str, tiny_model: Path) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(ConfigError, match=message):
        make(tiny_model, **options)
    assert set(psutil.Process().children()) <= before


def hang_in_steps(worker: Worker) -> None:
    if worker.rank == 1:
        runner: Any = worker.runner
        runner.submit = lambda *args: time.sleep(600)


@pytest.mark.slow
def test_a_worker_that_hangs_in_a_step_ends_the_engine_after_the_step_timeout(tiny_model: Path) -> None:
    llm = make(tiny_model, pipeline_parallel_size=2, step_timeout=2.0)
    processes = workers_of(llm)
    llm.generate("ab", use_tqdm=False)  # the first step may take longer
    llm.collective_rpc(hang_in_steps)
    with pytest.raises(EngineDeadError, match=r"workers \[1\] have not answered within 2 s"):
        llm.generate("ab", use_tqdm=False)
    assert not any(process.is_running() for process in processes)


@pytest.mark.slow
def test_a_worker_that_hangs_in_a_step_ends_a_served_engine_after_the_step_timeout(tiny_model: Path) -> None:
    async def scenario() -> list[psutil.Process]:
        options: dict[str, Any] = {
            "tensor_parallel_size": 2,
            "num_gpu_blocks_override": 64,
            "step_timeout": 2.0,
            "engine_restarts": 0,
        }
        config = make_config(model=str(tiny_model), device="cpu", **options)
        others = psutil.Process().children(recursive=True)
        llm = await AsyncLLM.start(config)
        family = [child for child in psutil.Process().children(recursive=True) if child not in others]
        async for _ in llm.generate("a", "ab", SamplingParams(max_tokens=2)):
            pass
        await llm.collective_rpc(hang_in_steps)
        with pytest.raises(EngineDeadError, match=r"workers \[0, 1\] have not answered within 2 s|no step for 2 s"):
            async for _ in llm.generate("b", "ab", SamplingParams(max_tokens=2)):
                pass
        await llm.shutdown()
        return family

    family = asyncio.run(scenario())
    assert len(family) >= 3, "the engine's process and two workers"
    eventually(lambda: not any(process.is_running() and process.status() != "zombie" for process in family))
