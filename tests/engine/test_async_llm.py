"""The engine in two processes: the same answers as in one, and nothing left behind however a request or a core ends."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from octavo import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    LLMEngine,
    ModelNotFoundError,
    RequestOutput,
    SamplingParams,
    WeightError,
)
from octavo.config.engine_config import make_config
from octavo.core.request import RequestOptions
from octavo.core.stats import StepStats
from octavo.engine import async_llm as async_engine
from octavo.engine import core_client, front_end
from octavo.engine import core_client as watchdog
from octavo.engine.core_process import _check_messages
from octavo.engine.core_start import CoreProcess
from octavo.engine.front_end import FrontEnd
from octavo.engine.messages import Add, ToCore, check_sendable
from tests.busy_machine import PATIENCE, once_in_three
from tests.engine_state import client_of, core_process_of

OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 256, "max_num_seqs": 64, "num_threads": 1}
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a test that starts engines of its own."""
    asyncio.run(limited(test()))


async def limited(test: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(PATIENCE):
        await test


@contextlib.asynccontextmanager
async def started(model: Path | str, **options: Any) -> AsyncIterator[AsyncLLM]:
    """An engine of its own, which must leave no process and no folder behind."""
    process = CoreProcess()
    llm = await AsyncLLM.start(make_config(model=str(model), **OPTIONS | options), process)
    try:
        yield llm
    finally:
        await llm.shutdown()
        assert not psutil.pid_exists(process.pid)
        assert not process.folder.exists()


@dataclass
class Calling:
    """A ``StatLogger`` made of a function."""

    log: Callable[[StepStats], None]


#: Runs a test on an engine that tests of this file share.
Shared = Callable[[Callable[[AsyncLLM], Coroutine[Any, Any, None]]], None]


async def ended(llm: AsyncLLM) -> None:
    await llm.shutdown()


@contextlib.contextmanager
def sharing(model: Path, **options: Any) -> Iterator[Shared]:
    with asyncio.Runner() as runner:
        llm = runner.run(AsyncLLM.start(make_config(model=str(model), **OPTIONS | options)))

        def run(test: Callable[[AsyncLLM], Coroutine[Any, Any, None]]) -> None:
            llm.stat_loggers.clear()
            runner.run(limited(test(llm)))
            runner.run(nothing_is_held(llm))

        yield run
        runner.run(ended(llm))


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[Shared]:
    with sharing(tiny_model) as run:
        yield run


REAL = {"dtype": "bfloat16", "max_model_len": 512, "num_threads": None}


@pytest.fixture(scope="module")
def shared_real(demo_model: Path) -> Iterator[Shared]:
    """Its steps take tens of milliseconds, those of the tiny model less than one."""
    with sharing(demo_model, **REAL) as run:
        yield run


async def last(llm: AsyncLLM, request_id: str, prompt: Any, params: Any, **options: Any) -> RequestOutput:
    outputs = [output async for output in llm.generate(request_id, prompt, params, **options)]
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        await asyncio.sleep(0.005)


async def nothing_is_held(llm: AsyncLLM) -> None:
    stats = await llm.stats()
    assert (llm.num_open, llm.num_queued, llm.queued_tokens) == (0, 0, 0)
    assert (stats.num_waiting, stats.num_running, stats.num_swapped, stats.blocks_used) == (0, 0, 0, 0)


def everything(output: RequestOutput) -> Any:
    """All that must be the same, bit for bit."""
    return (
        output.prompt,
        output.prompt_token_ids,
        output.prompt_logprobs,
        [(o.index, o.text, o.token_ids, o.logprobs, o.cumulative_logprob, o.score) for o in output.outputs],
        [(o.finish_reason, o.stop_reason, o.error) for o in output.outputs],
    )


def requests() -> list[tuple[str, SamplingParams | BeamSearchParams]]:
    """Of every kind that there is, with seeds of their own."""
    kinds: list[SamplingParams | BeamSearchParams] = [
        SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0.8, top_p=0.9, max_tokens=20, seed=5, n=2, logprobs=0, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=24, seed=7, n=1, best_of=3, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=60, seed=2**64 - 1, stop=["a", "e"], logprobs=1),
        SamplingParams(temperature=0.9, max_tokens=9, seed=-1, logit_bias={40: 5.0}, bad_words=["b"], min_tokens=3),
        BeamSearchParams(beam_width=3, max_tokens=8),
        SamplingParams(temperature=0, max_tokens=5, detokenize=False, allowed_token_ids=[50, 60, 70]),
        SamplingParams(temperature=0.7, max_tokens=30, seed=11, stop_token_ids=[33, 34], repetition_penalty=1.2),
    ]
    return [(f"Question {i}: why?" + " Because." * (i % 5), kinds[i % len(kinds)]) for i in range(32)]


@pytest.mark.parametrize("concurrent", [1, 32])
def test_answers_are_those_of_the_offline_engine_bit_for_bit(
    shared: Shared, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, concurrent: int
) -> None:
    monkeypatch.setattr(async_engine, "MAX_SEQUENCES_AT_ONCE", 7)
    asked = requests()
    offline = LLM(str(tiny_model), **OPTIONS).generate([p for p, _ in asked], [s for _, s in asked], use_tqdm=False)

    async def test(llm: AsyncLLM) -> None:
        gate = asyncio.Semaphore(concurrent)

        async def ask(i: int) -> RequestOutput:
            async with gate:
                return await last(llm, str(i), *asked[i], streaming=i % 3 > 0)

        served = await asyncio.gather(*[ask(i) for i in range(len(asked))])
        await nothing_is_held(llm)
        for mine, theirs in zip(served, offline, strict=True):
            assert everything(mine) == everything(theirs)
            assert mine.metrics.first_token_time is None or mine.metrics.time_in_queue is not None

    shared(test)


@pytest.mark.slow
def test_answers_of_a_real_model_are_those_of_the_offline_engine(shared_real: Shared, demo_model: Path) -> None:
    prompts = [f"The {i}th planet from the sun is" for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
    offline = LLM(str(demo_model), **OPTIONS | REAL).generate(prompts, params, use_tqdm=False)

    async def test(llm: AsyncLLM) -> None:
        alone = await last(llm, "alone", prompts[0], params)
        served = await asyncio.gather(*[last(llm, str(i), p, params) for i, p in enumerate(prompts)])
        assert everything(alone) == everything(offline[0])
        assert [everything(s) for s in served] == [everything(o) for o in offline]

    shared_real(test)


def test_a_stream_grows_to_the_whole_answer(shared: Shared) -> None:
    async def test(llm: AsyncLLM) -> None:
        texts, counts = [""], [0]
        async for output in llm.generate("a", "Hello", SamplingParams(temperature=0, max_tokens=40)):
            assert output.outputs[0].text.startswith(texts[-1])
            texts.append(output.outputs[0].text)
            counts.append(len(output.outputs[0].token_ids))
        assert counts == sorted(counts)
        assert len(set(counts)) > 10
        whole = await last(llm, "b", "Hello", SamplingParams(temperature=0, max_tokens=40), streaming=False)
        assert whole.outputs[0].text == texts[-1]

    shared(test)


def test_cancellation_frees_all_within_two_steps(shared_real: Shared, tries: Callable[..., None]) -> None:
    seen: list[StepStats] = []

    async def test(llm: AsyncLLM) -> None:
        seen.clear()

        def cancel(stats: StepStats) -> None:
            task.cancel()
            seen.append(stats)

        llm.stat_loggers.append(Calling(cancel))
        task = asyncio.create_task(last(llm, "cancelled", "Hello", LONG))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen[0].blocks_used > 0
        await until(lambda: seen[-1].blocks_used == 0)

    def measure() -> dict[str, bool]:
        shared_real(test)
        freed = next(stats.steps for stats in seen if stats.blocks_used == 0)
        return {f"freed in step {freed}, not after {seen[0].steps} + 2": freed <= seen[0].steps + 2}

    tries(measure)


def test_leaving_the_iteration_ends_the_request(shared: Shared) -> None:
    async def test(llm: AsyncLLM) -> None:
        async with contextlib.aclosing(llm.generate("left", "Hello", LONG)) as outputs:
            async for _ in outputs:
                break
        await nothing_is_held(llm)
        async for _ in llm.generate("left", "Hello", LONG):
            break
        for _ in range(10):  # the event loop closes what was left, before long
            await asyncio.sleep(0)
        assert llm.num_open == 0
        await nothing_is_held(llm)
        stream = await llm.submit("never read", "Hello", LONG)
        stream.close()
        stream.close()
        await nothing_is_held(llm)
        assert [o async for o in stream] == []

    shared(test)


def test_many_aborts_at_any_moment_leave_nothing(shared: Shared) -> None:
    async def test(llm: AsyncLLM) -> None:

        async def one(i: int) -> None:
            params = LONG if i % 2 else SamplingParams(n=3, max_tokens=100, ignore_eos=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout((i * 37 % 101) / 500):
                    await last(llm, str(i), "x" * (1 + i % 50), params)

        await asyncio.gather(*[one(i) for i in range(400)])
        await nothing_is_held(llm)

    shared(test)


def test_an_abort_by_id_ends_the_stream_with_what_there_is(shared_real: Shared) -> None:
    async def test(llm: AsyncLLM) -> None:
        outputs = []
        async for output in llm.generate("a", "Hello", LONG):
            outputs.append(output)
            if len(outputs) == 3:
                await llm.abort("a")
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert outputs[-1].outputs[0].token_ids[:3] == outputs[2].outputs[0].token_ids[:3]
        await llm.abort("a")
        await llm.abort("unknown")
        await nothing_is_held(llm)

    shared_real(test)


def test_a_slow_reader_misses_nothing(shared: Shared) -> None:
    async def test(llm: AsyncLLM) -> None:
        params = SamplingParams(temperature=0, n=2, max_tokens=200, ignore_eos=True, logprobs=1, prompt_logprobs=1)
        slow = await llm.submit("slow", "Hello", params)
        first = await anext(slow)
        assert not first.finished
        quick = await last(llm, "quick", "Hello", params)
        await until(lambda: llm.num_open == 0)
        rest = [output async for output in slow]
        assert len(rest) == 1
        assert everything(first + rest[0]) == everything(quick)

    shared(test)


def test_each_token_and_its_text_come_once(shared: Shared) -> None:
    async def test(llm: AsyncLLM) -> None:
        stream = await llm.submit("a", "Hello", LONG)
        parts = [output.outputs[0] async for output in stream]
        whole = (await last(llm, "b", "Hello", LONG, streaming=False)).outputs[0]
        assert "".join(p.text for p in parts) == whole.text
        assert [token for p in parts for token in p.token_ids] == whole.token_ids
        assert [p.finish_reason for p in parts] == [None] * (len(parts) - 1) + ["length"]
        assert len(parts) > 10

    shared(test)


def test_a_stream_that_has_ended_does_not_end_another_of_its_name(shared: Shared) -> None:
    async def test(llm: AsyncLLM) -> None:
        old = await llm.submit("a", "Hello", SamplingParams(max_tokens=1))
        assert (await anext(old)).finished
        new = await llm.submit("a", "Hello", LONG)
        old.close()
        assert [output async for output in new][-1].finished

    shared(test)


def nothing(ids: list[int], logits: Any) -> Any:
    return logits


class Nothing:
    __call__ = staticmethod(nothing)


def test_bad_requests_fail_alone(shared: Shared) -> None:
    async def test(llm: AsyncLLM) -> None:
        neighbour = await llm.submit("good", "Hello", LONG)
        with pytest.raises(InvalidRequestError, match="in use"):
            await last(llm, "good", "x", None)
        bad: list[tuple[Any, Any, dict[str, Any], str]] = [
            ([], None, {}, "empty"),
            ([10**6], None, {}, "from 0 to"),
            ("x" * 500, None, {}, "500 tokens"),
            ("x" * 100_000, None, {}, "100000 tokens"),
            ([1, True], None, {}, "not True"),
            ([1, 2.0], None, {}, "not 2.0"),
            ([2**70], None, {}, "from 0 to"),
            ("x", SamplingParams(logits_processors=[nothing]), {}, r"logits_processors\[0\]: \S+\.nothing is code"),
            ("x", SamplingParams(logits_processors=[Nothing()]), {}, r"logits_processors\[0\]: \S+\.Nothing is code"),
            ("x", SamplingParams(max_tokens=10**30), {}, "does not fit"),
            ("x", None, {"priority": 1.5}, "priority must be 0 under .*'fcfs'.*not 1.5.* static"),
            ("x", None, {"priority": True}, "priority must be a finite number, not True"),
            ("x", None, {"priority": "1"}, "priority must be a finite number, not '1'"),
            ("x", None, {"arrival_time": 1e18}, "arrival_time must be .*time.monotonic"),
            ("x", SamplingParams(logprobs=101), {}, "max_logprobs"),
            ("x", None, {"cache_salt": "\ud800"}, "surrogates"),
            ("x", None, {"cache_salt": 7}, "cache_salt must be text, not 7"),
            ("x", SamplingParams(stop_token_ids=[5000]), {}, "vocabulary"),
            ({"prompt": "x", "multi_modal_data": {}}, None, {}, "'multi_modal_data' .* text alone"),
            ({"prompt": "x" * 9000, "promt": "x"}, None, {}, "unknown key 'promt'"),
            ({"prompt": "x", "cache_salt": 7}, None, {}, "cache_salt must be text, not 7"),
        ]
        for prompt, params, options, message in bad:
            with pytest.raises(InvalidRequestError, match=message):
                await last(llm, "bad", prompt, params, **options)
        assert [o async for o in neighbour][-1].outputs[0].finish_reason == "length"
        await nothing_is_held(llm)

    shared(test)


def test_logprobs_that_would_not_fit_a_message_are_refused_at_the_start(tiny_model: Path) -> None:
    def check(**options: Any) -> None:
        config = make_config(model=str(tiny_model), num_gpu_blocks_override=64, num_threads=1, **options)
        _check_messages(LLMEngine.from_config(config).core)

    check(max_logprobs=-1)
    check(max_num_batched_tokens=1 << 20, max_logprobs=20)
    with pytest.raises(ConfigError, match="lower either"):
        check(max_num_batched_tokens=1 << 20, max_logprobs=-1)


class Number(enum.IntEnum):
    FIVE = 5


class Text(str):
    pass


#: What a program may set a field to, right or wrong: numbers of numpy, of enumerations, too large, of other types.
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 1.5, 2**63, 2**64, -(2**70), math.nan, math.inf, np.int64(3), np.float64(0.5),
    np.float32(0.5), np.bool_(True), np.array([1.0]), Number.FIVE, "x", "never", "5", "\ud800", Text("x"), np.str_("x"),
    b"x", [], [1], (1, 2), [True], [1.0], [np.int64(1)], [2**70], [Number.FIVE], ["x"], [Text("x")], ["\ud800"], [[1]],
    {}, {1: 2}, {1: np.float64(2)}, {"5": 1.0}, {True: 1.0}, {1: True}, {Number.FIVE: 1}, {1: "x"}, object(),
]  # fmt: skip
FIELDS: list[tuple[type[SamplingParams | BeamSearchParams] | None, str]] = [
    *((SamplingParams, name) for name in SamplingParams.__struct_fields__),
    *((BeamSearchParams, name) for name in BeamSearchParams.__struct_fields__),
    *((None, name) for name in ("priority", "arrival_time", "cache_salt", "prompt")),
]


def test_a_request_that_cannot_be_sent_leaves_nothing_behind(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(llm: AsyncLLM) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(core_client, "MAX_BYTES_TO_CORE", 20)
            with pytest.raises(InvalidRequestError, match="at most 20 can be sent"):
                await llm.submit("a", [5] * 30, LONG)
        assert (llm.num_open, llm.num_queued, llm.queued_tokens) == (0, 0, 0)
        outputs = [output async for output in llm.generate("a", [5, 6], SamplingParams(max_tokens=1))]
        assert outputs[-1].finished

    shared(test)


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_what_is_not_refused_can_be_read_by_the_core(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, kind: Any, name: str
) -> None:
    core = msgspec.msgpack.Decoder(ToCore)

    async def test(llm: AsyncLLM) -> None:
        accepted = 0
        sent: list[bytes] = []
        client = client_of(llm)
        with monkeypatch.context() as patch:
            patch.setattr(client, "_out", SimpleNamespace(send=sent.append))
            for value in ODD:
                options: dict[str, Any] = {"priority": 0, "cache_salt": "", "prompt": "x"} | (
                    {name: value} if kind is None else {}
                )
                params: Any = BeamSearchParams(beam_width=2) if kind is BeamSearchParams else SamplingParams()
                if kind is not None:
                    setattr(params, name, value)  # as a program may do after they were checked
                try:
                    request = llm.inputs.process("a", options.pop("prompt"), params, RequestOptions(**options))
                    check_sendable(request.group)
                    client.send(Add(request.group))
                except InvalidRequestError:
                    continue
                accepted += 1
                assert isinstance(core.decode(sent[-1]), Add)
        assert accepted == len(sent)

    shared(test)


def test_a_long_text_is_tokenized_like_a_short_one(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "The quick brown fox jumps. " * 7
    monkeypatch.setattr(front_end, "LONG_TEXT", 100)

    async def test(llm: AsyncLLM) -> None:
        for prompt in (text, {"prompt": text}):
            output = await last(llm, "a", prompt, SamplingParams(max_tokens=1))
            assert output.prompt == text
            assert output.prompt_token_ids == llm.tokenizer.encode(text)

    shared(test)


def test_queued_requests_are_counted_until_they_run(tiny_model: Path) -> None:
    async def test() -> None:
        async with started(tiny_model, max_num_seqs=2) as llm:
            streams = [await llm.submit(str(i), [7] * 10, LONG) for i in range(6)]
            assert (llm.num_open, llm.num_queued, llm.queued_tokens) == (6, 6, 60)
            await anext(streams[1])
            assert (llm.num_open, llm.num_queued, llm.queued_tokens) == (6, 4, 40)
            streams[5].close()
            assert (llm.num_open, llm.num_queued, llm.queued_tokens) == (5, 3, 30)
            for stream in streams[:5]:
                assert [o async for o in stream][-1].finished
            await nothing_is_held(llm)

    run(test)


def test_the_prefix_cache_can_be_forgotten_and_steps_are_told(shared: Shared) -> None:
    async def test(llm: AsyncLLM) -> None:
        seen: list[StepStats] = []
        before = await llm.stats()
        llm.stat_loggers.append(Calling(seen.append))
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        await last(llm, "a", [9] * 64, params)
        assert (await last(llm, "b", [9] * 64, params)).metrics.num_cached_tokens > 0
        assert (await llm.stats()).blocks_cached > 0
        await llm.reset_prefix_cache()
        assert (await llm.stats()).blocks_cached == 0
        assert (await last(llm, "c", [9] * 64, params)).metrics.num_cached_tokens == 0
        stats = await llm.stats()
        assert [s.steps for s in seen] == list(range(before.steps + 1, stats.steps + 1))
        assert sum(s.prefill_tokens for s in seen) == stats.prefill_tokens - before.prefill_tokens
        assert sum(s.decode_tokens for s in seen) == stats.decode_tokens - before.decode_tokens
        assert seen[-1].prefix_hit_tokens == stats.prefix_hit_tokens > 0
        assert all(s.seconds >= s.worker_seconds > 0 for s in seen)

        def broken(stats: StepStats) -> None:
            raise ValueError("not so good")

        llm.stat_loggers.append(Calling(broken))
        assert (await last(llm, "d", "x", params)).finished

    shared(test)


def test_the_death_of_the_core_fails_all_open_requests_at_once(tiny_model: Path, tries: Callable[..., None]) -> None:
    tries(lambda: kill_the_core(tiny_model))


def kill_the_core(tiny_model: Path) -> dict[str, bool]:
    """Kills it while a hundred requests are open; whether they were told soon."""
    claims: dict[str, bool] = {}

    async def test() -> None:
        process = CoreProcess()
        llm = await AsyncLLM.start(make_config(model=str(tiny_model), engine_restarts=0, **OPTIONS), process)
        tasks = [asyncio.create_task(last(llm, str(i), "Hello", LONG)) for i in range(100)]
        slow = await llm.submit("slow", "Hello", LONG)
        await anext(slow)
        assert not llm.died.is_set()
        os.kill(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        call = asyncio.create_task(llm.stats())
        await llm.died.wait()
        errors = await asyncio.gather(*tasks, call, return_exceptions=True)
        seconds = time.monotonic() - killed
        claims[f"told within 1 s, not {seconds} s"] = seconds < 1.0
        died = [e for e in errors if isinstance(e, EngineDeadError)]
        claims[f"more than 50 were open, not {len(died)}"] = len(died) > 50  # the rest had ended before
        assert all("SIGKILL" in str(e) for e in died)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            [o async for o in slow]
        assert llm.died.is_set()
        assert llm.num_open == llm.queued_tokens == 0
        with pytest.raises(EngineDeadError):
            llm.check_alive()
        with pytest.raises(EngineDeadError):
            await last(llm, "late", "Hello", LONG)
        with pytest.raises(EngineDeadError):
            await llm.stats()
        await llm.shutdown(timeout=10)
        assert not psutil.pid_exists(process.pid)
        assert not process.folder.exists()

    run(test)
    return claims


@pytest.mark.slow
def test_a_core_that_hangs_is_given_up(tiny_model: Path) -> None:
    async def test() -> None:
        process = CoreProcess()
        llm = await AsyncLLM.start(
            make_config(model=str(tiny_model), step_timeout=1.5, engine_restarts=0, **OPTIONS), process
        )
        await last(llm, "a", "Hello", LONG)
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(2.0)  # nothing is asked of it
        assert not llm.died.is_set()
        call = asyncio.create_task(llm.stats())
        with pytest.raises(EngineDeadError, match=r"no step for 1\.5 s"):
            await last(llm, "b", "Hello", LONG)
        with pytest.raises(EngineDeadError, match=r"no step for 1\.5 s"):
            await call
        assert llm.died.is_set()
        await llm.shutdown(timeout=10)
        assert not psutil.pid_exists(process.pid)
        assert not process.folder.exists()

    run(test)


def test_the_first_step_may_take_longer(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        process = CoreProcess()
        llm = await AsyncLLM.start(
            make_config(model=str(tiny_model), step_timeout=0.2, engine_restarts=0, **OPTIONS), process
        )
        os.kill(process.pid, signal.SIGSTOP)
        stream = await llm.submit("a", "Hello", LONG)
        await asyncio.sleep(0.6)
        assert not llm.died.is_set()
        monkeypatch.setattr(watchdog, "FIRST_STEP_TIMEOUT", 1.0)
        with pytest.raises(EngineDeadError, match="no step for 1 s"):
            await anext(stream)
        await llm.shutdown()
        assert not psutil.pid_exists(process.pid)

    run(test)


def test_an_exception_in_the_loop_of_the_core_is_told(tiny_model: Path) -> None:
    async def test() -> None:
        async with started(tiny_model, engine_restarts=0) as llm:
            await last(llm, "a", "Hello", SamplingParams(max_tokens=2))
            # A message that no front end sends: the core cannot go on.
            client_of(llm)._out.send(b"\xc1 garbage")
            with pytest.raises(EngineDeadError, match="DecodeError"):
                await last(llm, "b", "Hello", LONG)
            assert llm.died.is_set()

    run(test)


def test_errors_of_loading_come_as_their_own_type(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])

    async def test() -> None:
        with pytest.raises(WeightError, match=r"model\.safetensors"):
            await AsyncLLM.start(make_config(model=str(broken)))
        with pytest.raises(ModelNotFoundError, match="no-such-model"):
            await AsyncLLM.start(make_config(model="no-such-model"))
        process = CoreProcess()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await AsyncLLM.start(make_config(model=str(tiny_model)), process)

    run(test)


def test_a_start_that_is_given_up_leaves_nothing(tiny_model: Path) -> None:
    async def test() -> None:
        process = CoreProcess()
        os.kill(process.pid, signal.SIGSTOP)  # it is not ready before it is given up, however quick the machine
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await AsyncLLM.start(make_config(model=str(tiny_model)), process)
        assert not psutil.pid_exists(process.pid)
        assert not process.folder.exists()

    run(test)


def test_the_event_loop_goes_on_while_the_end_of_a_core_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        process, asked, may_end = CoreProcess(), threading.Event(), threading.Event()
        kill, went_on = process.kill, []

        def slow_kill() -> None:
            asked.set()
            went_on.append(may_end.wait(20.0))
            kill()

        monkeypatch.setattr(process, "kill", slow_kill)
        start = asyncio.create_task(AsyncLLM.start(make_config(model="no-such-model"), process))
        while not asked.is_set():
            await asyncio.sleep(0.01)
        may_end.set()
        with pytest.raises(ModelNotFoundError):
            await start
        assert all(went_on)
        assert not psutil.pid_exists(process.pid)

    run(test)


def test_shutdown_lets_requests_finish_or_ends_them(tiny_model: Path, tries: Callable[..., None]) -> None:
    async def test() -> None:
        async with started(tiny_model) as llm:
            streams = [await llm.submit(str(i), "Hello", LONG) for i in range(4)]
            ending = asyncio.ensure_future(llm.shutdown(timeout=PATIENCE))
            await asyncio.sleep(0)
            with pytest.raises(EngineDeadError, match="shut down"):
                await last(llm, "late", "Hello", LONG)
            for stream in streams:
                assert [o async for o in stream][-1].outputs[0].finish_reason == "length"
            await ending
            assert not llm.died.is_set()
            assert not llm.died.is_set()

    run(test)
    tries(lambda: shut_down_soon(tiny_model))


@pytest.mark.parametrize("in_time", [True, False])
def test_shutdown_waits_for_requests_that_are_prepared(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    """A grammar that is compiled, or an image that is decoded, takes a while before the core knows the request."""

    async def test() -> None:
        begun, goes_on = asyncio.Event(), asyncio.Event()

        async def prepare(self: FrontEnd, *what: Any) -> Any:
            begun.set()
            await goes_on.wait()
            return await usual(self, *what)

        async with started(tiny_model) as llm:
            usual = FrontEnd.prepare
            monkeypatch.setattr(FrontEnd, "prepare", prepare)
            request = asyncio.ensure_future(last(llm, "a", "Hello", LONG))
            await begun.wait()
            ending = asyncio.ensure_future(llm.shutdown(timeout=PATIENCE if in_time else 0.05))
            await asyncio.sleep(0)
            with pytest.raises(EngineDeadError, match="shut down"):
                await last(llm, "late", "Hello", LONG)
            if in_time:
                goes_on.set()
                assert (await request).outputs[0].finish_reason == "length"
                await ending
            else:
                await ending
                goes_on.set()
                with pytest.raises(EngineDeadError, match="shut down"):
                    await request

    run(test)


def shut_down_soon(tiny_model: Path) -> dict[str, bool]:
    """Gives an open request no time to finish; whether the shutdown took as little."""
    seconds = 0.0

    async def test() -> None:
        nonlocal seconds
        async with started(tiny_model) as llm:
            stream = await llm.submit("a", "Hello", LONG)
            await anext(stream)
            began = time.monotonic()
            await llm.shutdown(timeout=0.05)
            seconds = time.monotonic() - began
            outputs = [output async for output in stream]
            assert outputs[-1].outputs[0].finish_reason in ("abort", "length")

    run(test)
    return {f"shut down within 3 s, not {seconds} s": seconds < 3.0}


@pytest.mark.slow
def test_an_idle_engine_uses_no_processor_time(shared: Shared) -> None:
    used: list[float] = []

    async def test(llm: AsyncLLM) -> None:
        await last(llm, "a", "Hello", SamplingParams(max_tokens=4))
        await asyncio.sleep(0.2)
        processes = [psutil.Process(core_process_of(llm).pid), psutil.Process()]
        before = [sum(p.cpu_times()[:2]) for p in processes]
        await asyncio.sleep(1.5)
        after = [sum(p.cpu_times()[:2]) for p in processes]
        used[:] = [round(b - a, 2) for a, b in zip(before, after, strict=True)]

    def measure() -> dict[str, bool]:
        shared(test)
        return {f"neither took processor time: {used} s": used == pytest.approx([0, 0], abs=0.03)}

    once_in_three(measure)


PARENT = """
import asyncio, json, sys
from octavo import AsyncLLM, SamplingParams
from octavo.config.engine_config import make_config
from octavo.engine.core_start import CoreProcess
from octavo.engine.front_end import FrontEnd

async def main():
    process = CoreProcess()
    llm = await AsyncLLM.start(make_config(**json.loads(sys.argv[1])), process)
    await llm.submit("a", "Hello", SamplingParams(max_tokens=200, ignore_eos=True))
    print(process.pid, process.folder, flush=True)
    if sys.argv[2] == "waits":
        await asyncio.sleep(300)
    process._process.kill()
    await llm.died.wait()
    await llm.abort("a")

asyncio.run(main())
"""


def test_no_core_outlives_its_front_end(tiny_model: Path, tries: Callable[..., None]) -> None:
    tries(lambda: kill_the_front_end(tiny_model))


def kill_the_front_end(tiny_model: Path) -> dict[str, bool]:
    """Kills a front end; whether its core soon ended, and its folder went away."""
    claims: dict[str, bool] = {}

    async def test() -> None:
        options = json.dumps({"model": str(tiny_model), **OPTIONS})
        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PARENT, options, "waits", stdout=asyncio.subprocess.PIPE
        )
        assert parent.stdout is not None
        pid, folder = (await parent.stdout.readline()).decode().split()
        core = psutil.Process(int(pid))
        assert oct(os.stat(folder).st_mode)[-3:] == "700"
        # What a terminal and a supervisor send to all: the core leaves it to its front end.
        core.send_signal(signal.SIGINT)
        core.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        assert core.is_running()
        parent.kill()
        await parent.wait()
        killed = time.monotonic()
        await until(lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE)
        ended = time.monotonic()
        await until(lambda: not Path(folder).exists())
        claims[f"the core ended within 5 s, not {ended - killed} s"] = ended - killed < 5
        removed = time.monotonic() - ended
        claims[f"its folder went within 5 s more, not {removed} s"] = removed < 5

    run(test)
    return claims


def test_a_program_that_forgets_to_shut_down_ends_too(tiny_model: Path) -> None:
    async def test() -> None:
        options = json.dumps({"model": str(tiny_model), "engine_restarts": 0, **OPTIONS})
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PARENT, options, "ends", stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(PATIENCE):
            output, _ = await program.communicate()
        assert program.returncode == 0
        assert not Path(output.decode().split()[1]).exists()

    run(test)
