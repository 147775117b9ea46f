"""Greedy tokens and logprobs of the demo model, equal to transformers' however the work is cut into steps.

Transformers is asked by teacher forcing: one forward pass over a prompt and our output gives its choice at every
position given the same context, so our tokens are its greedy tokens exactly when they agree at each position.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams

LENGTHS = [1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 128, 150, 200, 255, 256, 300, 450, 600]
NEW_TOKENS = 64
#: A difference is allowed only where transformers' two best logits lie closer than this.
TIE = 1e-4
#: The order of two logits is compared only where they lie further apart: either logit may be wrong by the arithmetic of
#: both sides. The largest errors against float64: torch's float32 1.1e-3; ours 1.8e-3 (AVX2), 2.35e-3 (AVX-512 BF16).
ORDER = 2 * (1.1e-3 + 2.35e-3)

# Thousands of steps of a real model in float32.
pytestmark = pytest.mark.timeout(900)

PASSAGES = [
    "The library was quiet except for the rain. She turned a page, read the same line twice, and looked up. ",
    "def merge(left, right):\n    out = []\n    while left and right:\n        out.append(min(left[0], right[0]))\n",
    "Die Brücke war alt, und niemand wusste mehr, wer sie gebaut hatte. Trotzdem ging jeden Morgen jemand hinüber. ",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597 are the first Fibonacci numbers. ",
    "Mix two cups of flour with a pinch of salt; add the butter, cold and cut small, and work it in by hand. ",
    "木の上に猫がいます。空は青く、風は静かです。 Il fait beau aujourd'hui, n'est-ce pas ? Да, конечно. ",
    '{"name": "octavo", "kind": "book", "pages": [1, 2, 3], "open": true, "note": null}\n',
    "Water boils at 100 degrees Celsius at sea level, but at a lower temperature on a high mountain, because ",
]


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> list[list[int]]:
    from octavo.engine.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(demo_model)
    out = []
    for i, length in enumerate(LENGTHS):
        text = "".join(PASSAGES[(i + j) % len(PASSAGES)] for j in range(40))
        out.append(tokenizer.encode(text)[:length])
    assert [len(p) for p in out] == LENGTHS
    return out


PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def load(demo_model: Path, **options: Any) -> LLM:
    return LLM(str(demo_model), dtype="float32", max_model_len=1024, **options)


@pytest.fixture(scope="module")
def one_batch(demo_model: Path, prompts: list[list[int]]) -> list[RequestOutput]:
    """All prompts at once, with logprobs."""
    llm = load(demo_model, max_num_seqs=32)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def steps_of_reference(reference: Any, output: RequestOutput) -> Iterator[tuple[int, torch.Tensor]]:
    """For each token of prompt and output but the first: the token, and transformers' logits for its place."""
    tokens = output.prompt_token_ids + output.outputs[0].token_ids
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens])).logits[0]
    yield from zip(tokens[1:], logits[:-1], strict=True)


def differences(reference: Any, outputs: list[RequestOutput]) -> tuple[int, int]:
    """Tokens compared, and those that differ inside a tie; any other difference fails."""
    compared = ties = 0
    for output in outputs:
        places = list(steps_of_reference(reference, output))[len(output.prompt_token_ids) - 1 :]
        assert len(places) == NEW_TOKENS
        for token, logits in places:
            compared += 1
            best = logits.topk(2).values
            if token != int(logits.argmax()):
                gap = float(best[0] - best[1])
                assert gap < TIE, f"token {token} is not transformers' {int(logits.argmax())} (gap {gap})"
                assert float(best[0] - logits[token]) < TIE
                ties += 1
    return compared, ties


def test_one_batch_gives_the_tokens_of_transformers(reference: Any, one_batch: list[RequestOutput]) -> None:
    compared, ties = differences(reference, one_batch)
    assert compared == len(LENGTHS) * NEW_TOKENS
    print(f"{compared} tokens compared, {ties} differ inside a tie")
    assert ties <= 2


def test_logprobs_are_those_of_transformers(reference: Any, one_batch: list[RequestOutput]) -> None:
    for output in one_batch:
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert output.outputs[0].logprobs is not None
        ours = output.prompt_logprobs[1:] + output.outputs[0].logprobs
        total = 0.0
        for i, ((token, logits), mine) in enumerate(
            zip(steps_of_reference(reference, output), ours, strict=True), start=1
        ):
            assert mine is not None
            theirs = logits.log_softmax(-1)
            count = 2 if i < len(output.prompt_token_ids) else 3
            assert set(mine) >= {token}
            assert len(mine) in (count, count + 1)
            for t, logprob in mine.items():
                assert abs(logprob.logprob - float(theirs[t])) < 1e-3
            surely_better = int((logits > logits[token] + ORDER).sum())
            perhaps_better = int((logits > logits[token] - ORDER).sum())  # with the token itself
            assert surely_better < mine[token].rank <= perhaps_better
            if i >= len(output.prompt_token_ids):
                total += mine[token].logprob
        assert output.outputs[0].cumulative_logprob == pytest.approx(total)


def same_tokens(ours: list[RequestOutput], theirs: list[RequestOutput]) -> bool:
    return [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in theirs]


def test_one_by_one(demo_model: Path, prompts: list[list[int]], reference: Any, one_batch: list[RequestOutput]) -> None:
    llm = load(demo_model, num_gpu_blocks_override=64)
    outputs = [llm.generate({"prompt_token_ids": p}, PARAMS, use_tqdm=False)[0] for p in prompts]
    assert same_tokens(outputs, one_batch) or differences(reference, outputs)[1] <= 2


def test_chunks_of_16_tokens(
    demo_model: Path, prompts: list[list[int]], reference: Any, one_batch: list[RequestOutput]
) -> None:
    llm = load(demo_model, max_num_batched_tokens=16, max_num_seqs=16)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], PARAMS, use_tqdm=False)
    assert llm.llm_engine.times.steps > sum(LENGTHS) // 16
    assert same_tokens(outputs, one_batch) or differences(reference, outputs)[1] <= 2


def test_so_few_blocks_that_requests_are_preempted(
    demo_model: Path, prompts: list[list[int]], reference: Any, one_batch: list[RequestOutput]
) -> None:
    llm = load(demo_model, num_gpu_blocks_override=45, watermark=0.0)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], PARAMS, use_tqdm=False)
    assert sum(o.metrics.num_preemptions for o in outputs) > 0
    assert same_tokens(outputs, one_batch) or differences(reference, outputs)[1] <= 2
    assert llm.llm_engine.core.blocks.num_used == 0
