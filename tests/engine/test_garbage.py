"""The garbage collector finds nothing of requests that have ended, and its work does not grow with their length."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, BeamSearchParams, InvalidRequestError, LLMEngine, SamplingParams
from octavo.config.engine_config import make_config
from octavo.config.options import SchedulerOptions
from octavo.core.garbage import IdleCollector, exclude_from_gc
from octavo.core.plan import StepResult
from octavo.core.request import EngineCoreRequest, Generate
from octavo.lab.bench.collector_cost import Collections, settled_collector
from octavo.memory.block_manager import BlockManager
from octavo.models.decoder import Decoder
from octavo.scheduler.isolation import PROBE
from octavo.scheduler.scheduler import Scheduler

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
LONG = SamplingParams(max_tokens=100, **GREEDY)


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """No object of this package is in a cycle of references that nothing else refers to."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = Counter(type(o).__name__ for o in gc.garbage if type(o).__module__.startswith("octavo"))
        assert not found
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_an_engine_that_is_dropped_frees_its_weights_at_once(tiny_model: Path) -> None:
    others = [o for o in gc.get_objects() if issubclass(type(o), Decoder)]
    llm = LLM(str(tiny_model), num_gpu_blocks_override=24, max_model_len=256, num_threads=1)
    llm.generate("abc", SamplingParams(max_tokens=2), use_tqdm=False)
    gc.collect()
    [model] = [weakref.ref(o) for o in gc.get_objects() if issubclass(type(o), Decoder) and o not in others]
    gc.disable()
    try:
        del llm
        assert model() is None
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> LLMEngine:
    """With few blocks, so that long requests preempt one another."""
    return LLM(str(tiny_model), num_gpu_blocks_override=24, max_model_len=256, num_threads=1).llm_engine


def finish(engine: LLMEngine, count: int | None = None) -> None:
    while engine.has_unfinished_requests() and count != 0:
        engine.step()
        count = count - 1 if count is not None else None


def add_one(engine: LLMEngine, params: SamplingParams | BeamSearchParams, prompt: str = "Once upon a time") -> None:
    engine.add_request("a", prompt, params)
    finish(engine)


def preempted(engine: LLMEngine) -> None:
    for i in range(4):
        engine.add_request(str(i), f"{i} is a number", LONG)
    finish(engine)
    stats = engine.core.scheduler.counts()
    assert stats.preemptions_by_recompute + stats.preemptions_by_swap > 0


def aborted(engine: LLMEngine) -> None:
    engine.add_request("a", "Once upon a time", LONG)
    finish(engine, 3)
    engine.abort_request("a")
    finish(engine)


def refused(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequestError):
        engine.add_request("a", "x" * 1000, LONG)


def failed(engine: LLMEngine) -> None:
    executor = engine.core.executor
    submit = executor.submit

    def failing(plan: Any) -> Any:
        if engine.core.scheduler.queues.groups.keys() <= {PROBE}:  # the engine's own request comes through
            return submit(plan)
        raise RuntimeError("no")

    executor.submit = failing  # type: ignore[method-assign]
    logging.disable()  # pytest keeps what is logged, and with it the error and its frames
    try:
        add_one(engine, LONG)
    finally:
        logging.disable(logging.NOTSET)
        executor.submit = submit  # type: ignore[method-assign]


KINDS: dict[str, Callable[[LLMEngine], None]] = {
    "length": lambda engine: add_one(engine, SamplingParams(max_tokens=20, **GREEDY)),
    "sampled": lambda engine: add_one(engine, SamplingParams(max_tokens=20, temperature=1.0, seed=1)),
    "stop string": lambda engine: add_one(engine, SamplingParams(max_tokens=60, stop=["e", "a"], temperature=1.0)),
    "logprobs": lambda engine: add_one(engine, SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=2)),
    "parallel": lambda engine: add_one(engine, SamplingParams(n=3, max_tokens=20, temperature=1.0)),
    "best of": lambda engine: add_one(engine, SamplingParams(n=1, best_of=3, max_tokens=20, temperature=1.0)),
    "prompt only": lambda engine: add_one(engine, SamplingParams(max_tokens=0)),
    "beams": lambda engine: add_one(engine, BeamSearchParams(beam_width=3, max_tokens=12)),
    "preempted": preempted,
    "aborted": aborted,
    "refused": refused,
    "failed": failed,
}


def test_a_cycle_is_found() -> None:
    def make() -> None:
        collector = IdleCollector()
        collector.itself = collector  # type: ignore[attr-defined]

    with pytest.raises(AssertionError, match="IdleCollector"), no_garbage():
        make()


@pytest.mark.parametrize("kind", KINDS)
def test_no_cycles_remain_of_a_request(engine: LLMEngine, kind: str) -> None:
    KINDS[kind](engine)  # what is made once, at the first request of a kind, is not looked at
    with no_garbage():
        KINDS[kind](engine)


def test_no_cycles_remain_of_streams(tiny_model: Path) -> None:
    async def use(llm: AsyncLLM) -> None:
        async def read(name: str, params: SamplingParams, most: int) -> None:
            stream = llm.generate(name, "Once upon a time", params)
            async for _ in stream:
                most -= 1
                if not most:
                    break
            await stream.aclose()

        await read("whole", LONG, 1000)
        await read("left", LONG, 2)
        await asyncio.gather(*(read(str(i), SamplingParams(n=2, max_tokens=20), 1000) for i in range(4)))
        task = asyncio.create_task(read("cancelled", LONG, 1000))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def main() -> None:
        llm = await AsyncLLM.start(make_config(model=str(tiny_model), num_gpu_blocks_override=64, num_threads=1))
        try:
            await use(llm)
            with no_garbage():
                await use(llm)
        finally:
            await llm.shutdown()

    asyncio.run(main())


def test_an_untracked_list_is_freed_like_any_other() -> None:
    class Freed(int):
        count = 0

        def __del__(self) -> None:
            Freed.count += 1

    values = exclude_from_gc([Freed(1)])
    assert not gc.is_tracked(values)
    values.append(Freed(2))
    assert not gc.is_tracked(values)
    del values
    assert Freed.count == 2


def elements_visited() -> int:
    """Elements of the containers that a full collection visits."""
    return sum(len(gc.get_referents(container)) for container in gc.get_objects())


class Traffic:
    """A scheduler that is always full of requests of one length, in its prefix cache and out of it."""

    def __init__(self, prompt: int, running: int, output: int) -> None:
        per_sequence = (prompt + output) // 16 + 2
        blocks = BlockManager(2 * running * per_sequence, 16, prefix_caching=True)
        options = SchedulerOptions(max_num_seqs=running, max_num_batched_tokens=2 * prompt)
        self.scheduler = Scheduler(blocks, options, prompt + output + 1)
        self._params = SamplingParams(max_tokens=output, ignore_eos=True)
        self._prompt, self._running, self._ends = prompt, running, 0
        self.requests = 0

    def step(self) -> None:
        scheduler = self.scheduler
        while len(scheduler.queues.groups) < self._running:
            tokens = [self.requests % 1000] + [7] * (self._prompt - 1)
            scheduler.add(EngineCoreRequest(group_id=self.requests, prompt_token_ids=tokens, task=self._task()))
            self.requests += 1
        plan = scheduler.schedule()
        sequences = scheduler.queues.sequences
        sampling = [seq_id for seq_id in plan.seq_ids if sequences[seq_id].awaits_token]
        scheduler.update(plan, StepResult(plan.step, sampling, [7] * len(sampling)))
        if not plan.step % 50:  # some are aborted
            scheduler.finish_group(next(iter(scheduler.queues.groups)))

    def _task(self) -> Generate:
        return Generate(self._params, seed=self.requests)


def test_the_collectors_work_does_not_grow_with_the_length_of_requests() -> None:
    visited = []
    for prompt in (100, 10_000):
        with settled_collector():
            traffic = Traffic(prompt, running=8, output=20)
            for _ in range(120):
                traffic.step()
            gc.collect()
            visited.append(elements_visited())
    assert visited[1] < 1.1 * visited[0]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [200, 100_000])
def test_an_hour_of_traffic_leaves_nothing_behind(prompt: int) -> None:
    """An hour of steps of 20 ms; of long requests a few hundred, each of which takes seconds to compute."""
    steps = 180_000 if prompt < 1000 else 4_000
    with settled_collector(), Collections() as collections:
        traffic = Traffic(prompt, running=16, output=64)
        figures = []
        for step in range(1, steps + 1):
            traffic.step()
            if step in (steps // 4, steps):
                gc.collect()
                figures.append((len(gc.get_objects()), elements_visited(), sys.getallocatedblocks()))
    (objects, visited, allocated), after = figures
    assert after[0] < 1.05 * objects + 100
    assert after[1] < 1.05 * visited + 1000
    assert after[2] < 1.1 * allocated
    print(
        f"{traffic.requests} requests, {steps} steps; collections {collections.counts}, "
        f"the longest {collections.longest * 1e3:.2f} ms, all {collections.seconds:.3f} s"
    )
