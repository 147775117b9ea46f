"""The engine's behaviour on a tiny random model that speaks bytes."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import LLM, BeamSearchParams, InvalidRequestError, LLMEngine, RequestOutput, SamplingParams
from octavo.config.engine_config import make_config
from octavo.core.errors import InsufficientMemoryError
from octavo.core.request import EngineCoreRequest
from octavo.core.sampling_params import RequestOutputKind
from octavo.engine.input_processor import Prompt
from octavo.runner import memory
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.policies import POLICIES, Policy

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"num_gpu_blocks_override": 64, "block_size": 4, **options})


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return load(tiny_model)


@pytest.fixture(autouse=True)
def nothing_is_held_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        core = request.getfixturevalue("llm").llm_engine.core
        assert core.blocks.state.used == 0
        assert not core.scheduler.has_work


def text(output: RequestOutput) -> str:
    return output.outputs[0].text


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            done[output.request_id] = done[output.request_id] + output if output.request_id in done else output
    return done


def test_every_form_of_prompt_gives_the_same_answer_in_the_order_asked(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello")
    prompts: list[Prompt] = ["hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}, "other"]
    outputs = llm.generate(prompts, GREEDY)
    first = outputs[0].outputs[0]
    assert [o.outputs[0].token_ids for o in outputs[:4]] == [first.token_ids] * 4
    assert [o.prompt for o in outputs] == ["hello", None, "hello", None, "other"]
    assert outputs[4].prompt_token_ids == llm.get_tokenizer().encode("other")
    assert llm.generate("hello", GREEDY)[0].outputs[0].token_ids == first.token_ids
    assert llm.generate(ids, GREEDY)[0].outputs[0].token_ids == first.token_ids
    assert first.finish_reason == "length"
    assert len(first.token_ids) == 12


def test_one_or_many_params(llm: LLM) -> None:
    many = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5)]
    outputs = llm.generate(["a", "b"], many)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 5]
    with pytest.raises(InvalidRequestError, match="one for each of the 3, not 2 of them"):
        llm.generate(["a", "b", "c"], many)
    with pytest.raises(InvalidRequestError, match="priority"):
        llm.generate(["a", "b", "c"], GREEDY, priority=[1, 2])


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    assert llm.chat([], GREEDY) == []


BAD: list[tuple[Any, SamplingParams, str]] = [
    ("", GREEDY, "prompt is empty"),
    ([], GREEDY, "prompt is empty"),
    ([5, 10**6], GREEDY, "not 1000000"),
    ([5, -1], GREEDY, "not -1"),
    ([5, "x"], GREEDY, "not 'x'"),
    ("x" * 256, GREEDY, "256 tokens, but .* at most 256"),
    ({"text": "x"}, GREEDY, "unknown key 'text'"),
    ({}, GREEDY, "needs 'prompt' .* or 'prompt_token_ids'"),
    ({"prompt": "x", "multi_modal_data": {"image": 1}}, GREEDY, "'multi_modal_data' .* text alone"),
    ({"prompt": 3}, GREEDY, "prompt must not be int"),
    (17, GREEDY, "prompt must be"),
    ("x", SamplingParams(allowed_token_ids=[10**6]), "allowed_token_ids holds token id 1000000"),
    ("x", SamplingParams(stop_token_ids=[10**6]), "stop_token_ids holds"),
    ("x", SamplingParams(logit_bias={10**6: 1.0}), "logit_bias holds"),
]


@pytest.mark.parametrize(("prompt", "params", "message"), BAD)
def test_a_bad_request_fails_alone(llm: LLM, prompt: Any, params: SamplingParams, message: str) -> None:
    good = llm.generate("good", GREEDY)[0].outputs[0]
    outputs = llm.generate(["good", prompt, "good"], [GREEDY, params, GREEDY])
    assert [o.outputs[0].token_ids for o in outputs] == [good.token_ids, [], good.token_ids]
    assert outputs[1].outputs[0].finish_reason == "error"
    with pytest.raises(InvalidRequestError, match=message):
        llm.llm_engine.add_request("bad", prompt, params)
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_single_bad_prompt_raises(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate("", GREEDY)


def test_parameters_spoiled_after_construction_are_refused(llm: LLM) -> None:
    params = SamplingParams()
    params.temperature = float("nan")
    with pytest.raises(InvalidRequestError, match="temperature must be a finite number, not nan"):
        llm.generate("x", params)


def test_a_prompt_that_can_never_fit_the_blocks_is_refused(tiny_model: Path) -> None:
    llm = load(tiny_model, num_gpu_blocks_override=3)
    outputs = llm.generate(["x" * 13, "x" * 11], SamplingParams(temperature=0, ignore_eos=True))
    assert "at most 12" in (outputs[0].outputs[0].error or "")
    assert len(outputs[1].outputs[0].token_ids) == 1
    assert outputs[1].outputs[0].finish_reason == "length"


def test_too_little_memory_is_said_with_what_is_needed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(InsufficientMemoryError, match=r"the weights need .* GiB in float32"):
        LLM(str(tiny_model))
    free = itertools.chain([10**12], itertools.repeat(70_000_000))  # before and after the weights
    monkeypatch.setattr(memory, "available_memory", lambda: next(free))
    with pytest.raises(InsufficientMemoryError, match=r"one sequence of 256 tokens needs .* GiB"):
        LLM(str(tiny_model), max_model_len=256, gpu_memory_utilization=0.0001)


def test_eos_and_stop_tokens_end_an_output(llm: LLM) -> None:
    free = llm.generate("begin", GREEDY)[0].outputs[0]
    cut = free.token_ids[4]
    at = free.token_ids.index(cut)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[cut])
    stopped = llm.generate("begin", params)[0].outputs[0]
    assert stopped.token_ids == free.token_ids[: at + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", cut)
    assert stopped.text == llm.get_tokenizer().decode(free.token_ids[:at])
    params.include_stop_str_in_output = True
    assert llm.generate("begin", params)[0].outputs[0].text == llm.get_tokenizer().decode(free.token_ids[: at + 1])
    eos = SamplingParams(temperature=0, max_tokens=12, logit_bias={1: 100.0})
    ended = llm.generate("begin", eos)[0].outputs[0]
    assert (ended.token_ids, ended.text, ended.finish_reason, ended.stop_reason) == ([1], "", "stop", None)
    eos.min_tokens = 5
    later = llm.generate("begin", eos)[0].outputs[0]
    assert len(later.token_ids) == 6
    assert later.token_ids[-1] == 1
    assert 1 not in later.token_ids[:-1]


def test_stop_strings_end_an_output_also_across_tokens(llm: LLM) -> None:
    spelled = llm.get_tokenizer().encode("abcdefghijkl")

    def spell(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[spelled[len(output)]] = 1e4  # one letter a token
        return logits

    base: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "logits_processors": [spell]}
    out = llm.generate("x", SamplingParams(stop=["def", "zz"], **base))[0].outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == ("abc", "stop", "def")
    assert out.token_ids == spelled[:6]
    out = llm.generate("x", SamplingParams(stop="def", include_stop_str_in_output=True, **base))[0].outputs[0]
    assert out.text == "abcdef"
    out = llm.generate("x", SamplingParams(stop="lm", **base))[0].outputs[0]
    assert (out.text, out.finish_reason) == ("abcdefghijkl", "length")


def test_streamed_text_grows_and_never_shows_a_stop_string(llm: LLM) -> None:
    spelled = llm.get_tokenizer().encode("grün und blau STOP nie")

    def spell(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[spelled[len(output)]] = 1e4
        return logits

    kind = RequestOutputKind.DELTA
    params = SamplingParams(temperature=0, max_tokens=23, stop="STOP", logits_processors=[spell], output_kind=kind)
    llm.llm_engine.add_request("r", "x", params)
    seen: list[str] = []
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            assert "�" not in text(output)
            assert "S" not in text(output)
            seen.append(text(output))
    assert "".join(seen) == "grün und blau "
    assert sum(map(bool, seen)) > 10


def test_n_completions_are_those_of_single_requests_with_the_seeds_that_follow(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=10, temperature=1.0, ignore_eos=True)
    together = llm.generate("many", params)[0].outputs
    alone = [
        llm.generate("many", SamplingParams(seed=11 + i, max_tokens=10, ignore_eos=True))[0].outputs[0]
        for i in range(3)
    ]
    assert [o.index for o in together] == [0, 1, 2]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert len({tuple(o.token_ids) for o in together}) == 3


def test_unseeded_requests_differ_from_each_other_but_not_from_run_to_run(tiny_model: Path) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    first = [o.outputs[0].token_ids for o in load(tiny_model).generate(["a", "a"], params)]
    again = [o.outputs[0].token_ids for o in load(tiny_model).generate(["a", "a"], params)]
    other = [o.outputs[0].token_ids for o in load(tiny_model, seed=1).generate(["a", "a"], params)]
    assert first == again
    assert first[0] != first[1]
    assert first != other


def test_logprobs_hold_the_chosen_token_first_then_the_best(llm: LLM) -> None:
    params = SamplingParams(seed=1, max_tokens=6, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    output = llm.generate("hello", params)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(logprobs)) == token
        assert sorted(p.rank for p in logprobs.values())[:2] == [1, 2]
        assert logprobs[token].decoded_token == llm.get_tokenizer().token_text(token)
    assert output.prompt_logprobs is not None
    assert [None if p is None else list(p) for p in output.prompt_logprobs] == [
        None,
        *([t] for t in output.prompt_token_ids[1:]),
    ]


def test_prompt_logprobs_are_whole_and_equal_in_chunks_and_after_preemption(tiny_model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=1, ignore_eos=True)
    prompts = ["abcdefghijkl", "a longer prompt than that"]
    whole = load(tiny_model).generate(prompts, params)
    for options in ({"max_num_batched_tokens": 5, "max_num_seqs": 4}, {"num_gpu_blocks_override": 13, "watermark": 0}):
        outputs = load(tiny_model, **options).generate(prompts, params)
        if "watermark" in options:
            assert sum(o.metrics.num_preemptions for o in outputs) > 0
        for output, expected in zip(outputs, whole, strict=True):
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            assert output.prompt_logprobs is not None
            assert expected.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
            for mine, theirs in zip(output.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
                assert mine is not None
                assert theirs is not None
                assert mine.keys() == theirs.keys()
                for token in mine:
                    assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-5)


def test_a_failing_processor_ends_its_request_alone(llm: LLM) -> None:
    def broken(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) == 2:
            raise RuntimeError("no luck")
        return logits

    bad = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logits_processors=[broken])
    good = llm.generate("good", GREEDY)[0].outputs[0].token_ids
    outputs = llm.generate(["good", "bad", "good"], [GREEDY, bad, GREEDY])
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert "no luck" in (outputs[1].outputs[0].error or "")
    assert len(outputs[1].outputs[0].token_ids) == 2
    assert [o.outputs[0].token_ids for o in outputs][::2] == [good, good]


def test_a_step_that_fails_once_ends_no_request(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(tiny_model, max_num_seqs=1)
    wanted = [output.outputs[0].token_ids for output in llm.generate(["a", "b"], GREEDY)]
    submit = llm.llm_engine.core.executor.submit
    calls = []

    def failing(plan: Any) -> Any:
        calls.append(plan)
        if len(calls) == 3:
            raise RuntimeError("the device is on fire")
        return submit(plan)

    monkeypatch.setattr(llm.llm_engine.core.executor, "submit", failing)
    outputs = llm.generate(["a", "b"], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == wanted
    assert llm.llm_engine.core.blocks.state.used == 0


def test_abort_at_any_moment_frees_everything(llm: LLM) -> None:
    engine = llm.llm_engine
    for steps in range(4):
        engine.add_request("keep", "keep", GREEDY, streaming=False)
        engine.add_request("drop", "drop", SamplingParams(n=2, max_tokens=50, ignore_eos=True))
        for _ in range(steps):
            engine.step()
        last = engine.abort_request("drop")
        assert last is not None
        assert [o.finish_reason for o in last.outputs] == ["abort", "abort"]
        assert [len(o.token_ids) for o in last.outputs] == [steps, steps]
        assert engine.abort_request("drop") is None
        assert run(engine).keys() == {"keep"}
        assert engine.core.blocks.state.used == 0


def test_statistics_are_a_snapshot(llm: LLM) -> None:
    engine = llm.llm_engine
    before = engine.stats()
    steps = before.steps
    llm.generate("counted", GREEDY)
    after = engine.stats()
    assert before.steps == steps
    assert after.steps - before.steps > 0
    assert after.prefill_tokens - before.prefill_tokens > 0


def test_a_request_id_in_use_is_refused(llm: LLM) -> None:
    llm.llm_engine.add_request("same", "x", GREEDY)
    with pytest.raises(InvalidRequestError, match="'same' is in use"):
        llm.llm_engine.add_request("same", "y", GREEDY)
    llm.llm_engine.abort_request("same")


def test_an_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.llm_engine.core.step
    calls = []

    def interrupted() -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.core, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()


def test_metrics_are_in_order(llm: LLM) -> None:
    llm.llm_engine.reset_prefix_cache()
    m = llm.generate("hello", GREEDY)[0].metrics
    assert m.first_scheduled_time is not None
    assert m.first_token_time is not None
    assert m.finished_time is not None
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time
    assert m.time_in_queue == m.first_scheduled_time - m.arrival_time
    assert (m.num_cached_tokens, m.num_preemptions) == (0, 0)


def test_the_time_of_the_last_token_is_known_at_the_end(llm: LLM) -> None:
    m = llm.generate("hello", GREEDY)[0].metrics
    assert m.first_token_time is not None
    assert m.last_token_time is not None
    assert m.finished_time is not None
    assert m.first_token_time < m.last_token_time <= m.finished_time
    computed = llm.generate("hello", SamplingParams(max_tokens=0))[0].metrics
    assert (computed.first_token_time, computed.last_token_time) == (None, None)


def test_an_arrival_time_orders_requests_and_counts_in_their_metrics(tiny_model: Path) -> None:
    engine = load(tiny_model, max_num_seqs=1).llm_engine
    now = time.monotonic()
    engine.add_request("late", "a", GREEDY)
    engine.add_request("early", "b", GREEDY, arrival_time=now - 5)
    ended = []
    while engine.has_unfinished_requests():
        ended += [o for o in engine.step() if o.finished]
    assert [o.request_id for o in ended] == ["early", "late"]
    assert ended[0].metrics.arrival_time == now - 5
    assert ended[0].metrics.time_in_queue is not None
    assert ended[0].metrics.time_in_queue >= 5


@pytest.mark.parametrize("value", [1e18, float("nan"), float("-inf"), True, "5", 10**400])
def test_an_arrival_time_of_another_clock_is_refused(llm: LLM, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="arrival_time"):
        llm.llm_engine.add_request("a", "x", GREEDY, arrival_time=value)
    assert not llm.llm_engine.has_unfinished_requests()


def test_priorities_are_integers_and_finite_floats_and_the_lower_goes_first(tiny_model: Path) -> None:
    engine = load(tiny_model, max_num_seqs=1, scheduling_policy="static").llm_engine
    for name, priority in [("c", 2), ("b", 0.5), ("a", -1.5), ("d", 10**15)]:
        engine.add_request(name, "x", GREEDY, priority=priority)
    ended = []
    while engine.has_unfinished_requests():
        ended += [o.request_id for o in engine.step() if o.finished]
    assert ended == ["a", "b", "c", "d"]
    for wrong in (True, False, "1", float("nan"), float("inf"), [1]):
        with pytest.raises(InvalidRequestError, match="priority must be a finite number, not"):
            engine.add_request("x", "x", GREEDY, priority=wrong)


class ByLength(Policy):
    """A policy of a user's own, of which nothing is said of priorities."""

    def key(self, group: SequenceGroup) -> int:
        return len(group.request.prompt_token_ids)


class NeverByPriority(ByLength):
    uses_priority = False


def test_targets_and_users_reach_the_scheduler_and_targets_without_effect_are_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(tiny_model, scheduling_policy="deadline", ttft_target=0.5)
    seen: list[EngineCoreRequest] = []
    policy = llm.llm_engine.core.scheduler.queues.policy
    on_arrival = policy.on_arrival

    def watched(group: SequenceGroup) -> None:
        seen.append(group.request)
        on_arrival(group)

    monkeypatch.setattr(policy, "on_arrival", watched)
    outputs = llm.generate(["a", "b"], GREEDY, user=["me", "you"], ttft_target=[1.0, None], tpot_target=0.1)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "length"]
    assert [(r.options.user, r.options.ttft_target, r.options.tpot_target) for r in seen] == [
        ("me", 1.0, 0.1),
        ("you", None, 0.1),
    ]
    for keywords, words in [
        ({"ttft_target": -1.0}, "ttft_target"),
        ({"tpot_target": 0.0}, "above 0"),
        ({"user": 3}, "user must be"),
    ]:
        with pytest.raises(InvalidRequestError, match=words):
            llm.generate("a", GREEDY, **keywords)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="policies that do: deadline"):
        load(tiny_model).generate("a", GREEDY, ttft_target=1.0)


@pytest.mark.parametrize(
    ("policy", "accepted"),
    [
        *((name, name == "static") for name in POLICIES),
        (f"{__name__}:ByLength", True),
        (f"{__name__}:NeverByPriority", False),
    ],
)
def test_a_priority_without_effect_is_refused(tiny_model: Path, policy: str, accepted: bool) -> None:
    llm = load(tiny_model, scheduling_policy=policy)
    outputs = llm.generate(["a", "b"], GREEDY, priority=[3, 0])
    assert outputs[1].outputs[0].finish_reason == "length"
    if accepted:
        assert outputs[0].outputs[0].finish_reason == "length"
    else:
        assert "scheduling_policy" in str(outputs[0].outputs[0].error)
        assert "static" in str(outputs[0].outputs[0].error)


def test_no_end_before_min_tokens_also_when_the_end_token_is_ignored(llm: LLM) -> None:
    eos = llm.llm_engine.core.model_config.eos_token_ids[0]
    wanted: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "logit_bias": {eos: 100.0}}
    outputs = llm.generate(["x", "x"], [SamplingParams(**wanted, min_tokens=n) for n in (0, 4)])
    assert outputs[0].outputs[0].token_ids == [eos] * 6
    late = outputs[1].outputs[0].token_ids
    assert eos not in late[:4]
    assert late[4:] == [eos] * 2


def test_how_many_logprobs_may_be_asked_for_is_an_option(tiny_model: Path, llm: LLM) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        asked: dict[str, Any] = {name: 101}
        with pytest.raises(InvalidRequestError, match=rf"{name} must be in \[0, 100\], not 101.*max_logprobs"):
            llm.generate("x", SamplingParams(**asked))
    few = load(tiny_model, max_logprobs=3)
    few.generate("x", SamplingParams(logprobs=3, max_tokens=1))
    with pytest.raises(InvalidRequestError, match=r"logprobs must be in \[0, 3\], not 4.*max_logprobs"):
        few.generate("x", SamplingParams(logprobs=4))
    every = load(tiny_model, max_logprobs=-1)
    vocab = every.llm_engine.core.model_config.vocab_size
    output = every.generate("x", SamplingParams(logprobs=vocab, prompt_logprobs=0, max_tokens=2))[0].outputs[0]
    assert output.logprobs is not None
    assert [len(position) for position in output.logprobs] == [vocab, vocab]
    total = sum(math.exp(value.logprob) for value in output.logprobs[0].values())
    assert total == pytest.approx(1.0, abs=1e-4)


def test_the_default_token_budget_depends_on_how_steps_are_filled(tiny_model: Path) -> None:
    def budget(**options: Any) -> int:
        engine = LLMEngine.from_config(make_config(model=str(tiny_model), num_gpu_blocks_override=64, **options))
        return engine.core.options.token_budget

    assert budget(device="cpu") == 512
    assert budget(device="cpu", max_num_seqs=600) == 600
    assert budget(device="cpu", max_num_batched_tokens=100) == 100
    assert budget(device="cpu", batching="prefill_first") == 2048
    assert budget(device="cpu", enable_chunked_prefill=False) == 512, "its context of 256 tokens fits"
    config = make_config(model="m")
    assert config.with_token_budget("cpu", 8192).token_budget == 512
    assert config.with_token_budget("cuda", 8192).token_budget == 2048
    whole = make_config(model="m", batching="prefill_first")
    assert whole.with_token_budget("cpu", 8192).token_budget == 8192
    chunked_off = make_config(model="m", enable_chunked_prefill=False)
    assert chunked_off.with_token_budget("cuda", 4096).token_budget == 4096


def test_that_fewer_sequences_run_than_by_default_is_logged(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="octavo"):
        llm = load(tiny_model, max_num_batched_tokens=64)
    assert llm.llm_engine.core.options.max_num_seqs == 64
    assert "at most 64 sequences run at once" in caplog.text


def test_chat_renders_the_template_for_one_or_many(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    single = llm.chat(conversation, GREEDY)[0]
    # A newline after a block of the template is trimmed.
    assert llm.get_tokenizer().decode(single.prompt_token_ids) == "user: hiassistant: "
    several = llm.chat([conversation, [{"role": "user"}], conversation], GREEDY)
    assert [o.outputs[0].finish_reason for o in several] == ["length", "error", "length"]
    assert several[0].outputs[0].token_ids == single.outputs[0].token_ids
    with pytest.raises(InvalidRequestError):
        llm.chat([{"role": "user", "content": 3}], GREEDY)


def test_without_detokenizing_there_is_no_text(llm: LLM) -> None:
    out = llm.generate("x", SamplingParams(temperature=0, detokenize=False, ignore_eos=True))[0].outputs[0]
    assert out.text == ""
    assert len(out.token_ids) == 16


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_request_gets_the_same_tokens_in_any_company(tiny_model: Path, data: st.DataObject) -> None:
    """Random batch mixes, chunk sizes and pool sizes; greedy and sampled; accounting exact after every step."""
    requests = data.draw(
        st.lists(
            st.tuples(
                st.text("abcdefgh", min_size=1, max_size=40),
                st.sampled_from([0.0, 0.8]),
                st.integers(0, 3),
                st.integers(1, 20),
            ),
            min_size=1,
            max_size=8,
        )
    )
    budget = data.draw(st.integers(8, 64))
    blocks = data.draw(st.integers(17, 64))
    llm = load(tiny_model, max_num_batched_tokens=budget, max_num_seqs=8, num_gpu_blocks_override=blocks, watermark=0)
    engine = llm.llm_engine
    params = [SamplingParams(temperature=t, seed=seed, max_tokens=n, ignore_eos=True) for _, t, seed, n in requests]
    for i, ((prompt, *_), p) in enumerate(zip(requests, params, strict=True)):
        engine.add_request(str(i), prompt, p, streaming=False)
        if data.draw(st.booleans()):
            engine.step()
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            done[output.request_id] = output
        held = engine.core.blocks
        assert held.state.used + held.state.available == held.num_blocks
    assert engine.core.blocks.state.used == 0
    alone = load(tiny_model)
    for i, ((prompt, *_), p) in enumerate(zip(requests, params, strict=True)):
        if str(i) in done:
            expected = alone.generate(prompt, p, use_tqdm=False)[0].outputs[0].token_ids
            assert done[str(i)].outputs[0].token_ids == expected


def test_an_option_that_contradicts_the_model_is_refused(tiny_model: Path) -> None:
    from octavo import ConfigError

    with pytest.raises(ConfigError, match="longer than the model's context length"):
        LLM(str(tiny_model), max_model_len=257)
    with pytest.raises(ConfigError, match="enable_chunked_prefill"):
        LLM(str(tiny_model), enable_chunked_prefill=False, max_num_batched_tokens=255, max_num_seqs=4)
    assert LLMEngine.from_config(make_config(model=str(tiny_model), max_model_len=100)).core.max_model_len == 100


def test_a_named_max_tokens_that_the_context_has_no_room_for_is_refused_and_the_default_is_cut(
    tiny_model: Path,
) -> None:
    llm = LLM(str(tiny_model), max_model_len=32, num_gpu_blocks_override=16)
    prompt = list(range(2, 30))  # 28 tokens: room for 4 more
    with pytest.raises(InvalidRequestError, match=r"max_tokens: 5 does not fit: the prompt has 28 .* 4 or None"):
        llm.generate(prompt, SamplingParams(max_tokens=5))
    with pytest.raises(InvalidRequestError, match=r"max_tokens: 16 does not fit"):
        llm.generate(prompt, SamplingParams(max_tokens=16))
    with pytest.raises(InvalidRequestError, match=r"max_tokens: 5 does not fit"):
        llm.generate(prompt, BeamSearchParams(beam_width=2, max_tokens=5))
    for params in (SamplingParams(max_tokens=4), SamplingParams(), None, SamplingParams(max_tokens=None)):
        if params is not None:
            params.ignore_eos = True
        completion = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        if params is not None:
            assert (len(completion.token_ids), completion.finish_reason) == (4, "length")
    beams = llm.generate(prompt, BeamSearchParams(beam_width=2, ignore_eos=True), use_tqdm=False)[0].outputs
    assert [len(beam.token_ids) for beam in beams] == [4, 4]
    assert SamplingParams().max_tokens == 16
