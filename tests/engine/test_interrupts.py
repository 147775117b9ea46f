"""Ctrl-C at any moment: the engine is as before, its memory and its workers go when it is dropped."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tqdm import tqdm

from octavo import LLM, BeamSearchParams, RequestOutputKind, SamplingParams
from tests.busy_machine import eventually
from tests.engine_state import check_nothing_held, workers_of

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

# The timer of these tests is the one that pytest-timeout would use.
pytestmark = pytest.mark.timeout(900, method="thread")

#: With sequences that fork, are preempted, have stop tokens, penalties and beams.
WORK: list[tuple[str, Any]] = [
    ("the quick brown fox jumps over the lazy dog", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)),
    ("the quick brown fox jumps over the lazy cat", SamplingParams(seed=1, n=3, max_tokens=10)),
    ("beams", BeamSearchParams(beam_width=2, max_tokens=6)),
    ("c" * 33, SamplingParams(seed=9, max_tokens=9, repetition_penalty=1.1, stop=["e"])),
    ("one", SamplingParams(temperature=0, max_tokens=1)),
]
TIGHT = {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 30}


def load(model: Path, **options: Any) -> LLM:
    return LLM(str(model), device="cpu", num_threads=1, max_model_len=96, **{**TIGHT, **options})


def answers(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate([prompt for prompt, _ in WORK], [params for _, params in WORK], use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture
def python_handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python's own handler of SIGINT, whatever runs the tests, and no bars whose finalizers an interrupt may fall into.

    Python reports such an interrupt and goes on, and pytest keeps the report with all that its frames refer to.
    """
    monkeypatch.delattr(tqdm, "__del__")
    gc.collect()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    alarm = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    yield
    signal.signal(signal.SIGALRM, alarm)
    signal.signal(signal.SIGINT, before)


def was_interrupted(llm: LLM, seconds: float) -> bool:
    """Has the work done with a SIGINT after so many seconds; whether it came before the end."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            answers(llm)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.usefixtures("python_handler")
@pytest.mark.parametrize("moments", [60, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ahead", [False, True])
def test_an_interrupt_at_a_random_moment_leaves_the_engine_as_it_was(
    tiny_model: Path, ahead: bool, moments: int
) -> None:
    llm, rng = load(tiny_model, async_scheduling=ahead), random.Random(moments)
    right = answers(llm)
    start = time.perf_counter()
    answers(llm)
    whole, interrupted = time.perf_counter() - start, 0
    for moment in range(moments):
        interrupted += was_interrupted(llm, rng.uniform(1e-5, whole))
        check_nothing_held(llm)
        if moment % 25 == 0:
            assert answers(llm) == right
    assert interrupted > moments / 4
    assert answers(llm) == right
    core = weakref.ref(llm.llm_engine.core)
    del llm
    assert core() is None, "an error that was raised keeps it"


def interrupt_in(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str) -> None:
    """Has the next call of a method interrupted when it is done."""
    original = getattr(owner, method)

    def interrupted(*args: Any) -> Any:
        setattr(owner, method, original)
        result = original(*args)
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, method, interrupted)


@pytest.mark.usefixtures("python_handler")
def test_an_interrupted_step_returns_its_outputs_later(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(tiny_model)
    [right] = llm.generate(["abc"], GREEDY, use_tqdm=False)
    engine, tokens = llm.llm_engine, []
    engine.add_request("a", "abc", msgspec.structs.replace(GREEDY, output_kind=RequestOutputKind.DELTA))
    for step in range(100):
        interrupt_in(monkeypatch, engine.core.scheduler, "update")
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        if step % 3 == 2:  # also after several of them, and after the last
            tokens += [t for output in engine.step() for t in output.outputs[0].token_ids]
        if not engine.has_unfinished_requests():
            break
    assert tokens == right.outputs[0].token_ids


@pytest.mark.usefixtures("python_handler")
def test_a_request_that_is_interrupted_while_it_is_added_is_added(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(tiny_model)
    engine = llm.llm_engine
    interrupt_in(monkeypatch, engine.inputs, "default_params")
    with pytest.raises(KeyboardInterrupt):
        engine.add_request("a", "abc")
    assert engine.core.scheduler.has_work
    interrupt_in(monkeypatch, engine.core.scheduler, "finish_group")
    with pytest.raises(KeyboardInterrupt):
        engine.abort_request("a")
    check_nothing_held(llm)


class TornError(BaseException):
    """What a signal handler of a program may raise."""


def test_an_engine_that_an_exception_has_torn_is_freed_when_it_is_dropped(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(*_: Any) -> None:
        raise TornError

    # pytest keeps log records, and these the frames of errors.
    monkeypatch.setattr(logging.getLogger("octavo"), "disabled", True)
    for method in ("submit", "check_health"):
        llm = load(tiny_model)
        executor = llm.llm_engine.core.executor
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(executor, method, torn)
                if method == "check_health":
                    patch.setattr(executor, "submit", lambda plan: 1 / 0)
                with pytest.raises(TornError):
                    answers(llm)
        core = weakref.ref(llm.llm_engine.core)
        del llm, executor
        assert core() is None


@pytest.mark.usefixtures("python_handler")
@pytest.mark.parametrize("moments", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_workers_are_interrupted_between_messages_and_end_with_their_engine(tiny_model: Path, moments: int) -> None:
    llm, rng = load(tiny_model, tensor_parallel_size=2), random.Random(moments)
    right = answers(llm)
    start = time.perf_counter()
    answers(llm)
    whole = time.perf_counter() - start
    for moment in range(moments):
        was_interrupted(llm, rng.uniform(1e-5, whole))
        check_nothing_held(llm)
        if moment % 10 == 0:
            assert answers(llm) == right
    processes = workers_of(llm)
    del llm
    eventually(lambda: not any(process.is_running() for process in processes))
