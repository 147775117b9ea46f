"""A request's tokens and logprobs are bit for bit the same whatever company it keeps (CPU kernels, real model)."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import LLM, RequestOutput, SamplingParams

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

LENGTHS = (1, 2, 15, 16, 17, 40, 130, 200)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(100, 40000) for _ in range(n)] for n in LENGTHS]


def params() -> list[SamplingParams]:
    """Greedy and sampled in turn; different lengths, so that the batch changes."""
    return [
        SamplingParams(
            temperature=(0.0, 0.9)[i % 2],
            top_p=(1.0, 0.9)[i % 2],
            seed=i,
            max_tokens=8 + i,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1,
        )
        for i in range(len(LENGTHS))
    ]


def load(kind: dict[str, str], **options: Any) -> LLM:
    options = {"num_gpu_blocks_override": 400, "max_num_seqs": 8, **kind, **options}
    return LLM("smollm2-135m", kernels="cpu", max_model_len=640, **options)


def everything(output: RequestOutput) -> Any:
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert output.prompt_logprobs is not None
    return (
        completion.token_ids,
        [{t: (p.logprob, p.rank) for t, p in position.items()} for position in completion.logprobs],
        [None if p is None else {t: (v.logprob, v.rank) for t, v in p.items()} for p in output.prompt_logprobs],
    )


#: Float32 is compared in test_against_transformers.py.
KINDS = {"bfloat16": {"dtype": "bfloat16"}, "int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"}}


@pytest.fixture(scope="module")
def alone() -> Callable[[str], list[Any]]:
    """What each request gives alone, its prompt computed at once, by one thread: recorded once for a kind."""

    @functools.cache
    def record(kind: str) -> list[Any]:
        llm = load(KINDS[kind], num_threads=1)
        return [
            everything(llm.generate({"prompt_token_ids": prompt}, p, use_tqdm=False)[0])
            for prompt, p in zip(prompts(), params(), strict=True)
        ]

    return record


BATCH: dict[str, Any] = {}
CHUNKS = {"max_num_batched_tokens": 61, "num_threads": 2}
SMALL = {"max_num_batched_tokens": 16, "block_size": 5, "num_gpu_blocks_override": 1000, "num_threads": 2}
PREEMPTED = {"num_gpu_blocks_override": 19, "watermark": 0.0}
FEW_AT_ONCE = {"max_num_seqs": 3}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(("bfloat16", o) for o in (SMALL, PREEMPTED)),
        *(pytest.param("bfloat16", o, marks=pytest.mark.slow) for o in (BATCH, CHUNKS, FEW_AT_ONCE)),
        # What an int8 cache changes: how blocks are written and read. By default test_async_scheduling.py says so.
        *(pytest.param("int8 cache", o, marks=pytest.mark.slow) for o in (SMALL, PREEMPTED)),
    ],
    ids=lambda o: o if isinstance(o, str) else ", ".join(f"{k}={v}" for k, v in o.items()) or "one batch",
)
def test_bit_for_bit_the_same_in_a_batch(alone: Callable[[str], list[Any]], kind: str, options: dict[str, Any]) -> None:
    llm, expected = load(KINDS[kind], **options), alone(kind)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params(), use_tqdm=False)
    if options.get("num_gpu_blocks_override") == 19:
        assert sum(o.metrics.num_preemptions for o in outputs) > 0
    for output, wanted in zip(outputs, expected, strict=True):
        assert everything(output) == wanted


@pytest.mark.slow  # by default test_engine.py says so on a tiny network
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bit_for_bit_the_same_when_requests_arrive_at_any_time(
    alone: Callable[[str], list[Any]], data: st.DataObject
) -> None:
    llm = load(KINDS["bfloat16"], max_num_batched_tokens=data.draw(st.integers(8, 200)))
    engine, all_params, all_prompts = llm.llm_engine, params(), prompts()
    done: dict[str, RequestOutput] = {}

    def step() -> None:
        for output in engine.step():
            done[output.request_id] = output

    for i in data.draw(st.permutations(range(len(LENGTHS)))):
        engine.add_request(str(i), {"prompt_token_ids": all_prompts[i]}, all_params[i], streaming=False)
        for _ in range(data.draw(st.integers(0, 4))):
            step()
    while engine.has_unfinished_requests():
        step()
    assert [everything(done[str(i)]) for i in range(len(LENGTHS))] == alone("bfloat16")
