"""What a step's outputs become for a user: increments that lose nothing, at a cost that does not grow."""

from __future__ import annotations

import functools
import operator
import time

import pytest

from octavo.core.outputs import RequestOutput
from octavo.core.plan import EngineCoreOutputs, PositionLogprobs, SequenceOutput, SequenceResult
from octavo.core.request import EngineCoreRequest, Generate
from octavo.core.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.output_processor import OutputProcessor, RequestState
from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from octavo.loader.resolve import resolve_model
from tests.busy_machine import once_in_three

PROMPT = [1, 2, 3]


@functools.cache
def demo_tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m"))


def opened(params: SamplingParams, *, streaming: bool = True) -> tuple[OutputProcessor, RequestState]:
    processor = OutputProcessor(demo_tokenizer())
    group = EngineCoreRequest(group_id=0, prompt_token_ids=PROMPT, task=Generate(params, 0))
    request = RequestState("a", None, PROMPT, params, group)
    kind = RequestOutputKind.DELTA if streaming else RequestOutputKind.FINAL_ONLY
    return processor, processor.open(request, kind)


def position(token: int) -> PositionLogprobs:
    return PositionLogprobs(token, -1.0, 1, [], [])


def add(processor: OutputProcessor, token: int | None, extra: SequenceResult | None = None, index: int = 0) -> bool:
    """One step of one sequence; whether there is something to take."""
    token_ids = [] if token is None else [token]
    ready, _ = processor.process(EngineCoreOutputs(sequences=[SequenceOutput(0, index, token_ids, extra)]))
    return bool(ready)


def test_what_is_not_taken_adds_up() -> None:
    params = SamplingParams(n=2, logprobs=0, max_tokens=9)
    parts: list[RequestOutput] = []
    single: list[RequestOutput] = []
    processor, request = opened(params)
    every_step, every = opened(params)
    for i, token in enumerate(range(1000, 1012)):
        extra = SequenceResult(logprobs=[position(token)])
        assert add(processor, token, extra, i % 2) and add(every_step, token, extra, i % 2)
        if i % 5 == 4:
            parts.append(request.take())
        single.append(every.take())
    parts.append(request.take())
    assert [len(o.token_ids) for part in parts for o in part.outputs] == [3, 2, 2, 3, 1, 1]
    joined = parts[0] + parts[1] + parts[2]
    assert joined.outputs == functools.reduce(operator.add, single).outputs
    assert joined.outputs[0].token_ids == list(range(1000, 1012, 2))
    assert len(joined.outputs[0].logprobs or []) == 6
    assert joined.outputs[0].cumulative_logprob == -6.0


def test_what_follows_a_stop_text_in_its_step_is_no_part_of_the_answer() -> None:
    tokenizer = demo_tokenizer()
    token_ids = tokenizer.encode(" one two three four five")
    assert len(token_ids) == 5
    for ended in (None, "length", "stop"):
        for stop, kept in ((" three", 3), ("ee fo", 4), (" one", 1)):
            processor, _ = opened(SamplingParams(stop=[stop], logprobs=0, max_tokens=9))
            extra = SequenceResult(logprobs=[position(token) for token in token_ids])
            update = SequenceOutput(0, 0, token_ids, extra, ended)
            ready, stopped = processor.process(EngineCoreOutputs(sequences=[update]))
            (output,) = ready[0].take().outputs
            assert output.token_ids == token_ids[:kept] and len(output.logprobs or []) == kept
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)
            assert output.cumulative_logprob == -kept
            assert output.text == " one two three four five".partition(stop)[0]
            assert stopped == ([(0, 0)] if ended is None else []), "the core is told unless it has ended it"


def test_tokens_of_a_step_are_shown_as_if_they_had_come_one_by_one() -> None:
    tokenizer = demo_tokenizer()
    token_ids = tokenizer.encode("Several tokens, 多個 in a step \N{PARTY POPPER}.")
    joined, single = [opened(SamplingParams(max_tokens=99))[0] for _ in range(2)]
    (request,), _ = joined.process(EngineCoreOutputs(sequences=[SequenceOutput(0, 0, token_ids, None, "length")]))
    for i, token in enumerate(token_ids):
        end = "length" if i == len(token_ids) - 1 else None
        (other,), _ = single.process(EngineCoreOutputs(sequences=[SequenceOutput(0, 0, [token], None, end)]))
    assert request.take().outputs == other.take().outputs


def test_logprobs_of_a_prompt_come_once_and_whole() -> None:
    processor, request = opened(SamplingParams(prompt_logprobs=0))
    # A chunk of the prompt alone is no output.
    assert not add(processor, None, SequenceResult(prompt_logprobs=[position(2)], prompt_start=1))
    assert add(processor, 7, SequenceResult(prompt_logprobs=[position(3)], prompt_start=2))
    first = request.take()
    assert [p and list(p) for p in first.prompt_logprobs or []] == [None, [2], [3]]
    assert add(processor, 8)
    second = request.take()
    assert second.prompt_logprobs is None
    assert (first + second).prompt_logprobs == first.prompt_logprobs


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_token_costs_the_same_however_long_the_answer_is(count: int) -> None:
    def cost(params: SamplingParams, *, streaming: bool) -> tuple[float, float]:
        """Seconds of ``count`` tokens at the beginning, and after 31 times as many others."""
        processor, request = opened(params, streaming=streaming)
        seconds = []
        for start in range(0, 32 * count, count):
            extras = [
                SequenceResult(logprobs=[position(t)]) if params.logprobs is not None else None for t in range(count)
            ]
            began = time.thread_time()
            for token in range(count):
                if add(
                    processor,
                    1000 + (start + token * 7) % 40000,
                    extras[token] if params.logprobs is not None else None,
                ):
                    request.take()
            seconds.append(time.thread_time() - began)
        return min(seconds[:4]), min(seconds[-4:])

    def measure() -> dict[str, bool]:
        claims = {}
        for logprobs in (None, 0):
            for streaming in (True, False):
                first, last = cost(SamplingParams(logprobs=logprobs), streaming=streaming)
                claims[f"logprobs={logprobs}, {streaming=}: {first} s, later {last} s"] = last < 2 * first + 0.002
        return claims

    once_in_three(measure)
