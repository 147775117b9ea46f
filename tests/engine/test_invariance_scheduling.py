"""Tokens and logprobs are bit for bit the same under every way of scheduling (CPU kernels, real model)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

import pytest

from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams
from tests.whole_outputs import everything

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

Params = SamplingParams | BeamSearchParams

#: Three prompts begin alike for 40 tokens, which is no multiple of the block size.
_RNG = random.Random(11)
_SHARED = [_RNG.randrange(100, 40000) for _ in range(40)]
LENGTHS = (9, 60, 44, 70, 16, 52, 130, 48)
PROMPTS = [
    (_SHARED if i in (2, 5, 7) else []) + [_RNG.randrange(100, 40000) for _ in range(n - 40 * (i in (2, 5, 7)))]
    for i, n in enumerate(LENGTHS)
]
PARAMS: list[Params] = [
    SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.9, seed=1, n=3, max_tokens=20, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, seed=2, top_p=0.9, max_tokens=15, ignore_eos=True, logprobs=1),
    BeamSearchParams(beam_width=3, max_tokens=12),
    SamplingParams(temperature=0.7, seed=4, n=2, best_of=3, max_tokens=22, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True, logprobs=1, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, seed=6, max_tokens=10, ignore_eos=True, logprobs=1, prompt_logprobs=1),
    BeamSearchParams(beam_width=2, max_tokens=15, ignore_eos=True, length_penalty=0.5),
]


def load(**options: Any) -> LLM:
    defaults = {"num_gpu_blocks_override": 400, "max_num_seqs": 16, "max_num_batched_tokens": 128, "watermark": 0.0}
    return LLM("smollm2-135m", kernels="cpu", dtype="bfloat16", max_model_len=256, **{**defaults, **options})


def run(llm: LLM) -> list[RequestOutput]:
    policy = llm.llm_engine.core.options.scheduling_policy
    return llm.generate(
        [{"prompt_token_ids": p} for p in PROMPTS],
        PARAMS,
        use_tqdm=False,
        priority=[i * 5 % 8 if policy == "static" else 0 for i in range(8)],
        user=["a" if i < 5 else "b" for i in range(8)],
        ttft_target=[60.0 - i if policy == "deadline" else None for i in range(8)],
    )


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """What each request gives when there is no other and nothing is cached."""
    llm = load(enable_prefix_caching=False)
    results = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        results.append(everything(llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]))
    return results


#: By default the one; more combinations, swapping among them, run on a tiny network, see test_async_scheduling.py.
DEFAULT = [("mixed", "recompute", True)]
COMBINATIONS = [
    pytest.param(*one, marks=[] if one in DEFAULT else pytest.mark.slow)
    for one in itertools.product(("mixed", "prefill_first"), ("recompute", "swap", "auto"), (True, False))
]


@pytest.mark.parametrize(("batching", "mode", "caching"), COMBINATIONS)
def test_under_preemption(alone: list[Any], batching: str, mode: str, caching: bool) -> None:
    llm = load(
        batching=batching,
        preemption_mode=mode,
        enable_prefix_caching=caching,
        num_gpu_blocks_override=26,
        max_num_batched_tokens=200,
        num_host_blocks_override=100,
    )
    outputs = run(llm)
    stats = llm.llm_engine.core.scheduler.stats()
    if mode != "swap":
        assert stats.preemptions_by_recompute > 0 or mode == "auto"
    if mode != "recompute":
        assert stats.preemptions_by_swap > 0
        assert stats.swapped_in_blocks > 0
    assert [everything(o) for o in outputs] == alone
    assert stats.blocks_used == stats.host_blocks_used == 0


@pytest.mark.slow  # by default test_async_scheduling.py says so on a tiny network
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
def test_under_every_policy(alone: list[Any], policy: str, victim: str) -> None:
    llm = load(
        scheduling_policy=policy,
        preemption_victim=victim,
        num_gpu_blocks_override=26,
        num_host_blocks_override=12,
        host_prefix_cache=victim == "last",
        priority_preemption=policy == "static",
    )
    outputs = run(llm)
    assert llm.llm_engine.core.scheduler.stats().preemptions_by_swap > 0
    assert [everything(o) for o in outputs] == alone


def test_fair_preempts_a_flood_and_cuts_its_prompts(alone: list[Any]) -> None:
    llm = load(scheduling_policy="fair", max_num_seqs=7)
    engine = llm.llm_engine

    def add(numbers: Iterable[int], user: str) -> None:
        for i in numbers:
            engine.add_request(str(i), {"prompt_token_ids": PROMPTS[i]}, PARAMS[i], user=user, streaming=False)

    add(range(5), "flood")
    outputs = [output for _ in range(3) for output in engine.step()]
    add(range(5, 8), "victim")
    while engine.has_unfinished_requests():
        outputs += engine.step()
    outputs.sort(key=lambda output: int(output.request_id))
    assert [everything(output) for output in outputs] == alone
    stats = engine.core.scheduler.stats()
    assert stats.preemptions_by_recompute + stats.preemptions_by_swap > 0
    assert stats.blocks_used == 0


@pytest.mark.slow  # by default test_async_scheduling.py says so on a tiny network
def test_with_every_prefix_in_the_cache(alone: list[Any]) -> None:
    llm = load()
    run(llm)
    again = run(llm)
    assert [everything(o) for o in again] == alone
    for output, params, length in zip(again, PARAMS, LENGTHS, strict=True):
        wants_prompt = isinstance(params, SamplingParams) and params.prompt_logprobs is not None
        assert output.metrics.num_cached_tokens == (0 if wants_prompt else length - 1)
