"""A request's tokens and logprobs are bit for bit the same whatever company it keeps (CPU kernels, real model)."""

from __future__ import annotations

import random
from pathlib import Path
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
            max_tokens=8 + 3 * i,
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


KINDS = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}


@pytest.fixture(scope="module", params=KINDS)
def alone(request: pytest.FixtureRequest) -> tuple[dict[str, str], list[Any]]:
    """What each request gives alone, its prompt computed at once."""
    llm = load(KINDS[request.param])
    results = [
        everything(llm.generate({"prompt_token_ids": prompt}, p, use_tqdm=False)[0])
        for prompt, p in zip(prompts(), params(), strict=True)
    ]
    return KINDS[request.param], results


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 61},
        {"block_size": 5, "num_gpu_blocks_override": 1000},
        {"num_gpu_blocks_override": 19, "watermark": 0.0},
        {"num_threads": 1},
        {"max_num_seqs": 3},
    ],
    ids=lambda o: ", ".join(f"{k}={v}" for k, v in o.items()) or "one batch",
)
def test_bit_for_bit_the_same_in_a_batch(alone: tuple[dict[str, str], list[Any]], options: dict[str, Any]) -> None:
    kind, expected = alone
    llm = load(kind, **options)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params(), use_tqdm=False)
    if options.get("num_gpu_blocks_override") == 19:
        assert sum(o.metrics.num_preemptions for o in outputs) > 0
    for output, wanted in zip(outputs, expected, strict=True):
        assert everything(output) == wanted


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bit_for_bit_the_same_when_requests_arrive_at_any_time(
    alone: tuple[dict[str, str], list[Any]], data: st.DataObject
) -> None:
    kind, expected = alone
    llm = load(kind, max_num_batched_tokens=data.draw(st.integers(8, 200)))
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
    assert [everything(done[str(i)]) for i in range(len(LENGTHS))] == expected


def test_the_compiled_kernels_agree_with_the_reference(demo_model: Path) -> None:
    """In float32 the two backends differ by rounding only."""
    outputs = [
        LLM(str(demo_model), dtype="float32", kernels=kernels, num_gpu_blocks_override=400).generate(
            [{"prompt_token_ids": p} for p in prompts()], params(), use_tqdm=False
        )
        for kernels in ("cpu", "reference")
    ]
    for ours, theirs in zip(*outputs, strict=True):
        assert ours.prompt_logprobs is not None
        assert theirs.prompt_logprobs is not None
        for mine, other in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
            assert mine is not None
            assert other is not None
            for token in mine.keys() & other.keys():
                assert mine[token].logprob == pytest.approx(other[token].logprob, abs=1e-3)
