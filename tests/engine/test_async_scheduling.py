"""Steps planned and submitted while one is in flight: the same tokens and logprobs, bit for bit, and nothing held."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, AsyncLLM, BeamSearchParams, LLMEngine, RequestOutput, SamplingParams
from octavo.config.engine_config import make_config
from octavo.core.plan import StepPlan, StepResult
from octavo.executor.executor import Executor, PendingStep
from tests.busy_machine import PATIENCE
from tests.engine_state import check_nothing_held
from tests.whole_outputs import all_of, everything

Params = SamplingParams | BeamSearchParams

#: Three prompts begin alike for 30 tokens, which is no multiple of the block size.
_RNG = random.Random(5)
_SHARED = [_RNG.randrange(2, 258) for _ in range(30)]
LENGTHS = (9, 50, 34, 61, 16, 42, 100, 38, 5, 27)
PROMPTS = [
    (_SHARED if i in (2, 5, 7) else []) + [_RNG.randrange(2, 258) for _ in range(n - 30 * (i in (2, 5, 7)))]
    for i, n in enumerate(LENGTHS)
]


def by_half(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A processor that looks at the tokens so far."""
    return logits if len(set(output)) % 2 else logits * 0.5


def make_params() -> list[Params]:
    """Plain ones, some with stop tokens and texts that come in the middle, and those that nothing runs ahead of."""
    return [
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.9, seed=1, n=4, max_tokens=33, logprobs=1, stop_token_ids=[40, 90, 200]),
        SamplingParams(temperature=1.3, seed=2, top_p=0.9, max_tokens=50, logprobs=1, stop=["e", "x", "Q"]),
        BeamSearchParams(beam_width=3, max_tokens=20),
        SamplingParams(temperature=0.7, seed=4, n=2, best_of=3, max_tokens=45, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.5, seed=5, max_tokens=30, logprobs=1, repetition_penalty=1.2, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=6, max_tokens=20, ignore_eos=True, logprobs=1, prompt_logprobs=1),
        SamplingParams(temperature=1.1, seed=7, max_tokens=60, min_tokens=12, logprobs=0, stop_token_ids=[33, 77, 150]),
        SamplingParams(temperature=1.0, seed=8, max_tokens=25, ignore_eos=True, logits_processors=[by_half]),
        SamplingParams(temperature=1.0, seed=9, max_tokens=1, top_k=5, logit_bias={50: 3.0}),
    ]


#: Those that leave the others free to run ahead.
FREE = (0, 1, 2, 4, 6, 7, 9)


class Watch(Executor):
    """Passes steps on and counts those that were submitted while another was in flight."""

    in_process = True

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.in_flight = 0
        self.ahead = 0

    def start_workers(self) -> None: ...

    def collective_rpc(self, method: Any, args: Any = (), kwargs: Any = None, timeout: Any = None) -> list[Any]:
        return self._executor.collective_rpc(method, args, kwargs, timeout)

    def check_health(self) -> None:
        self._executor.check_health()

    def shutdown(self) -> None:
        self._executor.shutdown()

    def submit(self, plan: StepPlan) -> PendingStep:
        self.ahead += self.in_flight
        self.in_flight += 1
        assert self.in_flight <= 2
        return Watched(self, self._executor.submit(plan))


class Watched:
    def __init__(self, watch: Watch, pending: PendingStep) -> None:
        self._watch, self._pending = watch, pending

    def wait(self) -> StepResult:
        self._watch.in_flight -= 1
        return self._pending.wait()


def load(folder: Path, **options: Any) -> LLM:
    defaults = {"num_gpu_blocks_override": 400, "block_size": 4, "max_num_seqs": 16, "watermark": 0.0}
    return LLM(str(folder), **{**defaults, "max_num_batched_tokens": 128, "num_threads": 1, **options})


def watch(llm: LLM) -> Watch:
    core = llm.llm_engine.core
    core.executor = watched = Watch(core.executor)
    return watched


def generate(llm: LLM, which: tuple[int, ...]) -> list[Any]:
    params = make_params()
    policy = llm.llm_engine.core.options.scheduling_policy
    outputs = llm.generate(
        [{"prompt_token_ids": PROMPTS[i]} for i in which],
        [params[i] for i in which],
        use_tqdm=False,
        priority=[i * 5 % 8 if policy == "static" else 0 for i in which],
        user=["a" if i < 5 else "b" for i in which],
        ttft_target=[60.0 - i if policy == "deadline" else None for i in which],
    )
    return all_of(outputs)


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[Any]:
    """What each request gives when there is no other, nothing is cached, and no step is planned ahead."""
    llm = load(tiny_model, enable_prefix_caching=False, async_scheduling=False)
    watched = watch(llm)
    results = [generate(llm, (i,))[0] for i in range(len(PROMPTS))]
    assert watched.ahead == 0
    return results


def test_the_requests_end_in_every_way(alone: list[Any]) -> None:
    """Or the comparisons below would say less than they seem to."""
    ends = [{(reason, type(stop)) for tokens, _, reason, stop, *_ in each if len(tokens) > 1} for each, _ in alone]
    assert ("stop", int) in ends[1], "a stop token that the request names"
    assert ("stop", str) in ends[2], "a stop text"
    assert ("stop", type(None)) in ends[7], "the end of the sequence"
    assert ends[0] == {("length", type(None))}


ALL = tuple(range(len(PROMPTS)))


COMBINATIONS = itertools.product(
    ("mixed", "prefill_first"),
    ("recompute", "swap", "auto"),
    (True, False),
    ("free", "all", "not ahead"),
)


@pytest.mark.parametrize(
    ("batching", "mode", "caching", "kind"),
    [
        # By default each way to preempt with each batching, and what is asked with and without all the rest.
        pytest.param(*one, marks=[] if one[2:] == (True, "all") or one[:2] == ("mixed", "swap") else pytest.mark.slow)
        for one in COMBINATIONS
    ],
)
def test_under_preemption(
    tiny_model: Path, alone: list[Any], batching: str, mode: str, caching: bool, kind: str
) -> None:
    which, ahead = FREE if kind == "free" else ALL, kind != "not ahead"
    llm = load(
        tiny_model,
        async_scheduling=ahead,
        batching=batching,
        preemption_mode=mode,
        enable_prefix_caching=caching,
        num_gpu_blocks_override=68,
        max_num_batched_tokens=272,
        num_host_blocks_override=200,
        max_model_len=256,
    )
    watched = watch(llm)
    for _ in range(2):  # the second time with prefixes in the cache
        assert generate(llm, which) == [alone[i] for i in which]
        check_nothing_held(llm)
    stats = llm.llm_engine.core.scheduler.stats()
    assert stats.preemptions_by_recompute + stats.preemptions_by_swap > 0
    assert watched.ahead > (40 if which is FREE else 10) or not ahead


def test_an_int8_cache_is_the_same_in_company_and_in_chunks(tiny_model: Path) -> None:
    whole = load(tiny_model, kv_cache_dtype="int8", enable_prefix_caching=False)
    expected = [generate(whole, (i,))[0] for i in FREE]
    llm = load(
        tiny_model, kv_cache_dtype="int8", max_num_batched_tokens=24, num_gpu_blocks_override=68, max_model_len=256
    )
    for _ in range(2):  # the second time with prefixes in the cache
        assert generate(llm, FREE) == expected


def test_with_every_prefix_in_the_cache(tiny_model: Path) -> None:
    llm = load(tiny_model, block_size=16)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)
    first, again = (llm.generate(prompts, params, use_tqdm=False) for _ in range(2))
    assert [*map(everything, again)] == [*map(everything, first)]
    assert [output.metrics.num_cached_tokens for output in again] == [length - 1 for length in LENGTHS]


def test_one_penalised_request_among_64_holds_no_step_up(tiny_model: Path) -> None:
    """Nor does it wait itself: its logits are edited when the forward is queued."""
    llm = load(tiny_model, async_scheduling=True, max_num_seqs=64, num_gpu_blocks_override=1600)
    watched = watch(llm)
    plain = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    penalised = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, repetition_penalty=1.3)
    prompts: list[Any] = [{"prompt_token_ids": [10 + i]} for i in range(64)]
    outputs = llm.generate(prompts, [plain] * 63 + [penalised], use_tqdm=False)
    steps = llm.llm_engine.core.times.steps
    assert steps == 30 and watched.ahead == steps - 1
    alone = load(tiny_model).generate(prompts[63], penalised, use_tqdm=False)
    assert outputs[63].outputs[0].token_ids == alone[0].outputs[0].token_ids


@pytest.mark.parametrize("max_tokens", [16, 17, 50, 500])
def test_with_any_size_of_chunks(tiny_model: Path, alone: list[Any], max_tokens: int) -> None:
    llm = load(tiny_model, async_scheduling=True, max_num_batched_tokens=max_tokens)
    watched = watch(llm)
    assert generate(llm, FREE) == [alone[i] for i in FREE]
    assert watched.ahead > 20
    check_nothing_held(llm)


@pytest.mark.parametrize("max_num_seqs", [4, 7])
def test_with_few_sequences_at_once(tiny_model: Path, alone: list[Any], max_num_seqs: int) -> None:
    llm = load(tiny_model, async_scheduling=True, max_num_seqs=max_num_seqs)
    assert generate(llm, ALL) == alone
    check_nothing_held(llm)


@pytest.mark.parametrize(
    ("policy", "victim"),
    [
        ("static", "last"),
        ("sjf", "least_computed"),
        ("ldf", "most_blocks"),
        ("lcfs", "last"),
        ("srpt", "last"),
        ("fair", "most_blocks"),
        ("deadline", "last"),
        ("mlfq", "least_computed"),
    ],
)
def test_under_every_policy(tiny_model: Path, alone: list[Any], policy: str, victim: str) -> None:
    llm = load(
        tiny_model,
        async_scheduling=True,
        scheduling_policy=policy,
        preemption_victim=victim,
        num_gpu_blocks_override=68,
        num_host_blocks_override=30,
        max_model_len=256,
        host_prefix_cache=victim == "last",
        priority_preemption=policy == "static",
    )
    for which in (FREE, ALL):
        assert generate(llm, which) == [alone[i] for i in which]
        check_nothing_held(llm)
    stats = llm.llm_engine.core.scheduler.stats()
    assert stats.preemptions_by_recompute + stats.preemptions_by_swap > 0


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return load(tiny_model, async_scheduling=True, num_gpu_blocks_override=80, num_host_blocks_override=40)


@pytest.fixture(autouse=True)
def nothing_is_held_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        check_nothing_held(request.getfixturevalue("llm"))


@pytest.mark.parametrize("seed", range(12))
def test_aborts_in_between_change_nothing_for_the_others(llm: LLM, alone: list[Any], seed: int) -> None:
    rng = random.Random(seed)
    engine, params = llm.llm_engine, make_params()
    waiting = rng.sample(ALL if seed % 2 else FREE, 7)
    running: list[int] = []
    done: dict[int, RequestOutput] = {}
    aborted: dict[int, RequestOutput | None] = {}
    while waiting or engine.has_unfinished_requests():
        if waiting and rng.random() < 0.5:
            i = waiting.pop()
            running.append(i)
            engine.add_request(str(i), {"prompt_token_ids": PROMPTS[i]}, params[i], streaming=rng.random() < 0.5)
        if running and rng.random() < 0.06:
            i = rng.choice(running)
            aborted[i] = engine.abort_request(str(i))
            running.remove(i)
        for output in engine.step():
            i = int(output.request_id)
            if output.finished:
                done[i] = output
                running.remove(i)
        blocks = engine.core.blocks
        assert blocks.state.used + blocks.state.free + blocks.state.cached == blocks.num_blocks
    assert {i: everything(output) for i, output in done.items()} == {i: alone[i] for i in done}
    for i, last in aborted.items():
        if last is None or isinstance(params[i], BeamSearchParams) or i == 4:
            continue
        for completion, (whole, *_) in zip(last.outputs, alone[i][0], strict=True):
            assert completion.token_ids == whole[: len(completion.token_ids)]


def test_abort_at_any_moment_frees_everything(llm: LLM) -> None:
    engine = llm.llm_engine
    for steps in range(5):
        for n in (1, 3):
            engine.add_request(str(n), "drop", SamplingParams(n=n, max_tokens=50, ignore_eos=True))
        for _ in range(steps):
            engine.step()
        for n in (1, 3):
            engine.abort_request(str(n))
        check_nothing_held(llm)


def raise_in_step(llm: LLM, monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Has the step of this number from now, and only that one, fail as it is handed to the worker."""
    executor = llm.llm_engine.core.executor
    submit, steps = executor.submit, itertools.count(1)

    def submit_or_raise(plan: StepPlan) -> Any:
        if next(steps) == number:
            raise error
        return submit(plan)

    monkeypatch.setattr(executor, "submit", submit_or_raise)


def test_an_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    good = llm.generate("good", params, use_tqdm=False)[0].outputs[0].token_ids
    raise_in_step(llm, monkeypatch, 4, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], params, use_tqdm=False)
    check_nothing_held(llm)
    assert llm.generate("good", params, use_tqdm=False)[0].outputs[0].token_ids == good


@pytest.mark.parametrize("call", range(1, 6))
def test_a_step_that_fails_once_costs_no_request_a_token(llm: LLM, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    good = llm.generate("good", params, use_tqdm=False)[0].outputs[0].token_ids
    right = [output.outputs[0].token_ids for output in llm.generate(["a", "b"], params, use_tqdm=False)]
    raise_in_step(llm, monkeypatch, call, RuntimeError("the device is on fire"))
    outputs = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == right
    assert llm.generate("good", params, use_tqdm=False)[0].outputs[0].token_ids == good


def test_a_sequence_that_fails_ends_alone(llm: LLM) -> None:
    """Its token is none, and the step after it is in flight already when that is seen."""

    def broken(logits_of: int) -> Any:
        def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output) == logits_of:
                raise RuntimeError("no luck")
            return logits

        return process

    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    good = llm.generate("good", plain, use_tqdm=False)[0].outputs[0].token_ids
    params = [plain, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logits_processors=[broken(3)])]
    outputs = llm.generate(["good", "bad"], params, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == good
    assert outputs[1].outputs[0].finish_reason == "error" and len(outputs[1].outputs[0].token_ids) == 3


def test_by_default_steps_are_planned_ahead_on_a_gpu(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.engine import core

    assert load(tiny_model, device="cpu").llm_engine.core.max_in_flight == 1
    options = make_config(model="any")
    for device, expected in (("cpu", 1), ("cuda", 2)):
        monkeypatch.setattr(core, "resolve_device", lambda name, found=device: found)
        assert core._steps_in_flight(options) == expected
        for asked in (True, False):
            assert core._steps_in_flight(options.model_copy(update={"async_scheduling": asked})) == 1 + asked


def test_served_from_a_process_of_its_own(tiny_model: Path, alone: list[Any]) -> None:
    options = {"num_gpu_blocks_override": 80, "block_size": 4, "num_threads": 1, "async_scheduling": True}

    async def last(llm: AsyncLLM, i: int) -> Any:
        async for output in llm.generate(str(i), {"prompt_token_ids": PROMPTS[i]}, make_params()[i]):
            latest = output
        return everything(latest)

    async def serve() -> list[Any]:
        llm = await AsyncLLM.start(make_config(model=str(tiny_model), **options))
        try:
            answers = list(await asyncio.gather(*(last(llm, i) for i in FREE)))
            stats = await llm.stats()
            assert stats.blocks_used == 0
            return answers
        finally:
            await llm.shutdown()

    assert asyncio.run(asyncio.wait_for(serve(), PATIENCE)) == [alone[i] for i in FREE]


@pytest.mark.slow
def test_on_the_demo_model_in_bfloat16() -> None:
    """Stop tokens, several sequences and a tight cache on a network of real size."""
    pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")
    prompts = ["Once upon a time", "The capital of France is", "1 2 3 4 5 6 7", "def fibonacci(n):"]
    params = [SamplingParams(temperature=0.8, seed=i, n=1 + i % 3, max_tokens=60, logprobs=1) for i in range(4)]
    results = []
    for ahead in (False, True):
        engine = LLM("smollm2-135m", max_model_len=128, num_gpu_blocks_override=14, async_scheduling=ahead)
        results.append([everything(o) for o in engine.generate(prompts, params, use_tqdm=False)])
        check_nothing_held(engine)
    assert results[0] == results[1]


def test_the_times_of_the_device_are_summed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = llm.llm_engine.core
    submit = core.executor.submit

    class Timed:
        def __init__(self, pending: PendingStep) -> None:
            self._pending = pending

        def wait(self) -> StepResult:
            result = self._pending.wait()
            result.device_seconds, result.idle_seconds = 2.0, 0.5
            return result

    monkeypatch.setattr(core.executor, "submit", lambda plan: Timed(submit(plan)))
    before = (core.times.steps, core.times.device, core.times.idle)
    llm.generate("time", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    steps = core.times.steps - before[0]
    assert steps == 4
    assert (core.times.device - before[1], core.times.idle - before[2]) == (8.0, 2.0)


def test_an_engine_is_empty_between_requests(llm: LLM) -> None:
    """Nothing is in flight when no request is left."""
    engine: LLMEngine = llm.llm_engine
    engine.add_request("a", "a", SamplingParams(max_tokens=30, stop=["e", "t", "o", " "], seed=3))
    while engine.has_unfinished_requests():
        engine.step()
    check_nothing_held(llm)
