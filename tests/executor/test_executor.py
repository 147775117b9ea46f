"""One answer of several workers, what becomes of a step that fails on one of them, and the workers' end."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.config.engine_config import make_config
from octavo.config.kv_spec import GroupShape
from octavo.core.errors import EngineDeadError, InsufficientMemoryError
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import EngineCoreRequest, Generate
from octavo.core.stats import StoreTierStats
from octavo.engine import core
from octavo.engine.core import EngineCore
from octavo.executor.executor import Executor, PendingStep, WorkerReports, reports_of
from octavo.process.startup import WorkerFacts


class Worker:
    """Answers without computing."""

    def __init__(self, blocks: int, host_blocks: int, seconds: float, freed: int) -> None:
        self.blocks, self.host_blocks, self.seconds, self.freed = blocks, host_blocks, seconds, freed
        self.cache: tuple[Any, ...] = ()
        self.fails = self.is_lost = False

    def cache_size(self, max_model_len: int, max_num_batched_tokens: int) -> tuple[int, list[int]]:
        if not self.blocks:
            raise InsufficientMemoryError("no memory")
        return min(max_model_len, self.blocks * 4), [self.blocks]

    def kv_groups(self) -> list[GroupShape]:
        return [GroupShape(4096)]

    def num_host_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> list[int]:
        return [self.host_blocks]

    def make_cache(self, *sizes: Any) -> None:
        self.cache = sizes

    def measure_swap(self) -> float:
        return self.seconds

    def startup_facts(self) -> WorkerFacts:
        return WorkerFacts("fake", None, 3 << 30, self.blocks << 20, self.host_blocks << 20, {"weights": self.seconds})

    def sleep(self, level: int) -> int:
        return self.freed * level

    def execute(self, plan: StepPlan) -> StepResult:
        if self.fails or self.is_lost:
            raise RuntimeError("a worker failed")
        return StepResult(plan.step, list(plan.seq_ids), [7] * len(plan.seq_ids))


class Pending:
    def __init__(self, wait: Callable[[], StepResult]) -> None:
        self.wait = wait


class TwoWorkers(Executor):
    """Two ranks called one after the other, in this process."""

    def __init__(self) -> None:
        self.workers = [Worker(40, 9, 0.25, 5 << 30), Worker(30, 12, 0.5, 2 << 30)]
        self.ends = 0

    def start_workers(self) -> None: ...

    def collective_rpc(self, method: Any, args: Any = (), kwargs: Any = None, timeout: Any = None) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.workers]

    def submit(self, plan: StepPlan) -> PendingStep:
        def wait() -> StepResult:
            results = [worker.execute(plan) for worker in self.workers]
            return results[0]

        return Pending(wait)

    def check_health(self) -> None:
        for rank, worker in enumerate(self.workers):
            if worker.is_lost:
                raise EngineDeadError(f"the worker of rank {rank} is lost")

    def shutdown(self) -> None:
        self.ends += 1


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> TwoWorkers:
    made = TwoWorkers()
    monkeypatch.setattr(core, "make_executor", lambda *args: made)
    return made


def make(folder: Path, **options: Any) -> EngineCore:
    return EngineCore(make_config(model=str(folder), device="cpu", block_size=4, **options), folder)


def request(group_id: int) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    return EngineCoreRequest(group_id=group_id, prompt_token_ids=[2, 3, 4], task=Generate(params, 0))


def test_an_engine_has_the_blocks_that_every_worker_has_memory_for(
    tiny_model: Path, executor: TwoWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(tiny_model)
    assert (engine.blocks.num_blocks, engine.blocks.groups[0].host.num_blocks) == (30, 9)
    assert engine.max_model_len == 30 * 4, "the context that the smaller worker can hold"
    caches = [worker.cache for worker in executor.workers]
    assert caches[0] == caches[1] and caches[0][-1] == 120
    assert engine.scheduler.move_cost.seconds_per_byte == 0.5 / 4096, (
        "a block has moved when the slower worker has moved it"
    )
    facts = engine.startup
    assert [worker.seconds for worker in facts.workers] == [{"weights": 0.25}, {"weights": 0.5}]
    lines = facts.lines()
    assert lines[0].endswith(" parameters in float32, 6.00 GiB")
    assert lines[1:3] == ["kernels of rank 0: fake", "kernels of rank 1: fake"]
    assert lines[3] == (
        "KV cache: 30 blocks of 4 tokens (120 tokens, 0.07 GiB in float32), at most 1 requests of 120 tokens at once; "
        "9 host blocks (0.02 GiB)"
    )
    assert lines[5].endswith(": weights 0.50 s"), "the slowest worker's"
    with caplog.at_level(logging.INFO, logger="octavo"):
        engine.sleep()
        engine.sleep(level=2)
    assert "level 1: 7.00 GiB of memory freed" in caplog.text
    assert "level 2: 14.00 GiB of memory freed" in caplog.text


def test_a_step_that_fails_on_one_worker_is_computed_again(tiny_model: Path, executor: TwoWorkers) -> None:
    engine = make(tiny_model)
    engine.scheduler.add(request(0))
    executor.workers[1].fails = True
    assert not engine.step().groups
    executor.workers[1].fails = False
    tokens = []
    while engine.has_work:
        tokens += [token for sequence in engine.step().each_sequence() for token in sequence.token_ids]
    assert tokens == [7, 7, 7]


def test_a_worker_that_is_lost_ends_the_engine(tiny_model: Path, executor: TwoWorkers) -> None:
    engine = make(tiny_model)
    engine.scheduler.add(request(0))
    engine.step()
    executor.workers[1].is_lost = True
    with pytest.raises(EngineDeadError, match="the worker of rank 1 is lost"):
        engine.step()


def test_workers_end_with_the_engine_once(tiny_model: Path, executor: TwoWorkers) -> None:
    engine = make(tiny_model)
    assert executor.ends == 0
    engine.shutdown()
    engine.shutdown()
    assert executor.ends == 1
    engine = make(tiny_model)
    del engine
    gc.collect()
    assert executor.ends == 2


def test_workers_end_when_the_engine_cannot_be_made(tiny_model: Path, executor: TwoWorkers) -> None:
    executor.workers[1].blocks = 0
    with pytest.raises(InsufficientMemoryError):
        make(tiny_model)
    gc.collect()
    assert executor.ends == 1


def test_an_engine_that_was_shut_down_says_so(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), num_gpu_blocks_override=40, num_threads=1)
    params = SamplingParams(max_tokens=2)
    assert llm.generate("a", params, use_tqdm=False)[0].finished
    llm.llm_engine.core.executor.check_health()
    llm.llm_engine.core.shutdown()
    with pytest.raises(EngineDeadError, match="was shut down"):
        llm.generate("a", params, use_tqdm=False)


def test_a_fetch_ends_with_its_slowest_worker_and_has_what_all_have() -> None:
    reports = WorkerReports(3)

    def combine(*results: StepResult) -> StepResult:
        """Of ranks 0, 1 and 2; the last one's counts."""
        others = [(rank, report) for rank, result in enumerate(results[:2]) if (report := reports_of(result))]
        reports.combine(results[2], others, 2)
        return results[2]

    tier = StoreTierStats("disk", asked=3)
    early = combine(
        StepResult(1, fetched={1: 4, 2: 7}, fetch_times=[(4, 0.5), (7, 0.25)], stores=[tier]),
        StepResult(1, fetched={1: 5}, fetch_times=[(5, 0.125)]),
        StepResult(1, fetched={1: 6}, fetch_times=[(6, 0.25)]),
    )
    assert (early.fetched, early.fetch_times, early.stores) == ({1: 4}, [(4, 0.5)], [tier])
    waiting = combine(StepResult(2), StepResult(2, fetched={2: 0}, fetch_times=[(0, 0.0)]), StepResult(2))
    assert (waiting.fetched, waiting.fetch_times, waiting.stores) == ({}, [], [])
    # The plan of step 3 drops fetch 2, which worker 2 has not reported, and will not.
    late = combine(*(StepResult(3, fetched={3: n}, fetch_times=[(n, 1.0 + n)]) for n in (8, 9, 2)))
    assert (late.fetched, late.fetch_times) == ({3: 2}, [(2, 10.0)])
    assert not reports._fetches, "reports of dropped fetches are forgotten"


def test_reports_of_a_dropped_resource_do_not_count() -> None:
    """Worker 0 has prepared "a" before the drop of step 2, worker 1 has not; then both prepare it again."""
    reports = WorkerReports(2)
    reports.submitted(StepPlan(1))
    early = StepResult(1, prepared=["a"])
    reports.combine(early, [], 0)
    reports.submitted(StepPlan(2))
    reports.submitted(StepPlan(3, drop=["a"]))
    late = StepResult(2)
    reports.combine(late, [(1, StepResult(2, prepared=["a"]))], 0)
    assert not early.prepared and not late.prepared
    half, whole = StepResult(3), StepResult(4, prepared=["a"])
    reports.combine(half, [(1, StepResult(3, prepared=["a"]))], 0)
    reports.combine(whole, [], 0)
    assert not half.prepared and whole.prepared == ["a"]
    assert not reports._dropped and not reports._reports
