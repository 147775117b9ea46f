"""Logprobs of token ids that a request lists: those that the whole vocabulary has, whatever runs beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.errors import InvalidRequestError

LISTED = [3, 77, 250]


def positions(llm: LLM, params: list[SamplingParams]) -> list[list[dict[int, tuple[float, int | None]]]]:
    outputs = llm.generate(["one", "two", "three"][: len(params)], params, use_tqdm=False)
    return [
        [{i: (p.logprob, p.rank) for i, p in at.items()} for at in output.outputs[0].logprobs or []]
        for output in outputs
    ]


@pytest.mark.parametrize("bias", [None, {5: 3.0}], ids=["plain", "processed"])
def test_listed_logprobs_are_those_of_the_whole_vocabulary(tiny_model: Path, bias: dict[int, float] | None) -> None:
    llm = LLM(str(tiny_model), num_gpu_blocks_override=64, max_logprobs=-1)
    common: dict[str, Any] = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True, "logit_bias": bias}
    [whole] = positions(llm, [SamplingParams(**common, logprobs=-1)])
    listed = SamplingParams(**common, logprob_token_ids=LISTED)
    [alone] = positions(llm, [listed])
    beside = positions(llm, [listed, SamplingParams(max_tokens=5), SamplingParams(**common, logprobs=2)])[0]
    assert alone == beside
    for found, every in zip(alone, whole, strict=True):
        assert set(LISTED) < set(found) or len(found) == len(LISTED)
        assert all(every[token] == value for token, value in found.items())


def test_parallel_samples_and_limits(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), num_gpu_blocks_override=64, max_logprobs=3)
    params = SamplingParams(n=2, max_tokens=4, seed=1, ignore_eos=True, logprob_token_ids=LISTED)
    [output] = llm.generate(["one"], params, use_tqdm=False)
    for completion in output.outputs:
        assert all(set(LISTED) <= set(at) for at in completion.logprobs or [{}])
    for wrong in ([*LISTED, 4], [10**6]):
        [output] = llm.generate(["one"], SamplingParams(logprob_token_ids=wrong), use_tqdm=False)
        assert "logprob_token_ids" in (output.outputs[0].error or "")
    with pytest.raises(InvalidRequestError, match="logprob_token_ids"):
        SamplingParams(logprob_token_ids=[1], logprobs=2)
