"""Requests that one engine core begins and others go on with: the answers are those of one core, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo import BeamSearchParams, RequestOutput, SamplingParams, StructuredOutputsParams
from octavo.config.engine_config import make_config
from octavo.core.sampling_params import RequestOutputKind
from octavo.engine.llm_engine import LLMEngine
from tests.engine_state import replace_core
from tests.whole_outputs import everything

Params = SamplingParams | BeamSearchParams

OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "block_size": 4, "num_gpu_blocks_override": 200}
PROMPTS = [
    "a",
    "the quick brown fox " * 3,
    "x y z",
    "one, two, three, " * 2,
    "the quick brown dog",
    "b",
    "cc",
    "d" * 30,
]
PARAMS: list[Params] = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2, repetition_penalty=1.3),
    SamplingParams(temperature=0.9, seed=3, n=4, max_tokens=25, logprobs=0, stop=["e", "ab"]),
    BeamSearchParams(beam_width=3, max_tokens=18),
    SamplingParams(temperature=1.1, seed=5, max_tokens=30, prompt_logprobs=2, min_tokens=9, bad_words=["the"]),
    SamplingParams(temperature=1.0, seed=7, n=2, best_of=3, max_tokens=20),
    SamplingParams(
        temperature=0.8,
        seed=8,
        max_tokens=40,
        structured_outputs=StructuredOutputsParams(json='{"type":"object","properties":{"a":{"type":"integer"}}}'),
    ),
    BeamSearchParams(beam_width=2, max_tokens=25, ignore_eos=True, length_penalty=0.5),
    SamplingParams(max_tokens=0, prompt_logprobs=1, temperature=0),
]


@pytest.fixture(scope="module")
def whole(tiny_model: Path) -> list[Any]:
    """What one engine core answers."""
    return [everything(output) for output, _ in finish(engine(tiny_model))]


def engine(model: Path, **options: Any) -> LLMEngine:
    made = LLMEngine.from_config(make_config(model=str(model), **{**OPTIONS, **options}))
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        kind = RequestOutputKind.DELTA if isinstance(params, SamplingParams) else None
        if kind is not None:
            params = msgspec.structs.replace(params, output_kind=kind)
        made.add_request(str(number), prompt, params)
    return made


def finish(llm: LLMEngine, every: int = 10**9) -> list[tuple[RequestOutput, list[str]]]:
    """The whole output of each request and the pieces of its text; another core goes on after every so many steps with
    outputs."""
    parts: dict[str, list[RequestOutput]] = {}
    steps = 0
    while llm.has_unfinished_requests():
        new = llm.step()
        for output in new:
            parts.setdefault(output.request_id, []).append(output)
        steps += bool(new)
        if new and steps % every == 0:
            replace_core(llm)
    made = []
    for _, outputs in sorted(parts.items()):
        sum_of = outputs[0]
        for part in outputs[1:]:
            sum_of += part
        made.append((sum_of, [completion.text for part in outputs for completion in part.outputs]))
    return made


@pytest.mark.parametrize(
    ("every", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (4, {"max_num_batched_tokens": 24}),
        pytest.param(3, {"enable_prefix_caching": False}, marks=pytest.mark.slow),
        pytest.param(5, {"batching": "prefill_first"}, marks=pytest.mark.slow),
        (7, {"async_scheduling": True}),
        (4, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
        (6, {"num_gpu_blocks_override": 60, "preemption_mode": "swap", "num_host_blocks_override": 60}),
    ],
    ids=["every step", "chunks", "no cache", "prefill first", "ahead", "drafts", "swapping"],
)
def test_another_core_goes_on_with_the_same_bits(
    every: int, options: dict[str, Any], whole: list[Any], tiny_model: Path
) -> None:
    llm = engine(tiny_model, **options)
    results = finish(llm, every)
    assert [everything(output) for output, _ in results] == whole
    state = llm.core.scheduler.stats()
    assert state.blocks_used == state.host_blocks_used == 0


def test_counts_go_on_too(tiny_model: Path) -> None:
    """A resumption counts as a preemption; what is reported of the first admission and of drafts stays."""
    llm = engine(tiny_model, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    before = {}
    for _ in range(8):
        for output in llm.step():
            before[output.request_id] = output.metrics
    replace_core(llm)
    after = {output.request_id: output for output, _ in finish(llm)}
    for name in set(before) & set(after):
        first, last = before[name], after[name].metrics
        assert first is not None and last is not None
        assert last.first_scheduled_time == first.first_scheduled_time
        assert last.num_cached_tokens == first.num_cached_tokens
        assert last.num_preemptions == first.num_preemptions + 1
        for counts in ("drafted_per_position", "accepted_per_position"):
            now = getattr(last, counts)
            assert len(now) >= len(getattr(first, counts))
            assert all(count >= earlier for count, earlier in zip(now, getattr(first, counts), strict=False))
