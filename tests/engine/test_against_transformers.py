"""Greedy tokens and logprobs of the demo model in float32: those of transformers, however the work is cut into steps.

Transformers is asked by teacher forcing: one forward pass over a prompt and our output gives its choice at every
position given the same context, so our tokens are its greedy tokens exactly when they agree at each position. It is
asked once, for all prompts in one batch; other ways to compute them must equal that batch bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.outputs import Logprob

LENGTHS = [1, 2, 15, 16, 17, 33, 64, 100]
NEW_TOKENS = 16
#: Of slow tests.
MORE_LENGTHS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 128, 256, 300, 600]
MORE_TOKENS = 64
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


def make_prompts(demo_model: Path, lengths: list[int]) -> list[list[int]]:
    from octavo.engine.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(demo_model)
    out = []
    for i, length in enumerate(lengths):
        text = "".join(PASSAGES[(i + j) % len(PASSAGES)] for j in range(40))
        out.append(tokenizer.encode(text)[:length])
    assert [len(p) for p in out] == lengths
    return out


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> list[list[int]]:
    return make_prompts(demo_model, LENGTHS)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=3, prompt_logprobs=2)


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def load(demo_model: Path, **options: Any) -> LLM:
    return LLM(str(demo_model), dtype="float32", **{"max_model_len": 1024, "max_num_seqs": 32, **options})


@pytest.fixture(scope="module")
def one_batch(demo_model: Path, prompts: list[list[int]]) -> list[RequestOutput]:
    """All prompts at once."""
    return run(load(demo_model), prompts, greedy(NEW_TOKENS))


@dataclass
class Place:
    """A token of an output or its prompt, and what transformers computes for its place."""

    sampled: bool
    token: int
    ours: dict[int, Logprob]
    theirs: dict[int, float]  # logprobs of the same tokens
    best: int
    gap: float  # between the two best logits
    behind: float  # of the token's logit, behind the best
    surely_better: int
    perhaps_better: int  # with the token itself


@pytest.fixture(scope="module")
def places(reference: Any, one_batch: list[RequestOutput]) -> list[list[Place]]:
    """Those of each output, from the prompt's second token on."""
    return [compare(reference, output) for output in one_batch]


def compare(reference: Any, output: RequestOutput) -> list[Place]:
    assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
    assert output.prompt_logprobs[0] is None
    tokens = output.prompt_token_ids + output.outputs[0].token_ids
    with torch.inference_mode():
        each = reference(torch.tensor([tokens])).logits[0, :-1]
    found = []
    ours = output.prompt_logprobs[1:] + output.outputs[0].logprobs
    for i, (token, logits, mine) in enumerate(zip(tokens[1:], each, ours, strict=True), start=1):
        assert mine is not None
        logprobs, best = logits.log_softmax(-1), logits.topk(2)
        found.append(
            Place(
                sampled=i >= len(output.prompt_token_ids),
                token=token,
                ours=mine,
                theirs={t: float(logprobs[t]) for t in mine},
                best=int(best.indices[0]),
                gap=float(best.values[0] - best.values[1]),
                behind=float(best.values[0] - logits[token]),
                surely_better=int((logits > logits[token] + ORDER).sum()),
                perhaps_better=int((logits > logits[token] - ORDER).sum()),
            )
        )
    return found


def test_one_batch_gives_the_tokens_of_transformers(places: list[list[Place]]) -> None:
    check_tokens(places, len(LENGTHS) * NEW_TOKENS)


def check_tokens(places: list[list[Place]], count: int) -> None:
    sampled = [place for each in places for place in each if place.sampled]
    assert len(sampled) == count
    other = [place for place in sampled if place.token != place.best]
    for place in other:
        assert place.gap < TIE, f"token {place.token} is not transformers' {place.best} (gap {place.gap})"
        assert place.behind < TIE
    print(f"{len(sampled)} tokens compared, {len(other)} differ inside a tie")
    assert len(other) <= 2


def test_logprobs_are_those_of_transformers(one_batch: list[RequestOutput], places: list[list[Place]]) -> None:
    check_logprobs(one_batch, places)


def check_logprobs(outputs: list[RequestOutput], places: list[list[Place]]) -> None:
    for output, each in zip(outputs, places, strict=True):
        for place in each:
            assert place.token in place.ours
            count = 3 if place.sampled else 2
            assert len(place.ours) in (count, count + 1)
            for t, logprob in place.ours.items():
                assert abs(logprob.logprob - place.theirs[t]) < 1e-3
            assert place.surely_better < place.ours[place.token].rank <= place.perhaps_better
        total = sum(place.ours[place.token].logprob for place in each if place.sampled)
        assert output.outputs[0].cumulative_logprob == pytest.approx(total)


@pytest.mark.slow
def test_longer_answers_to_more_prompts(demo_model: Path, reference: Any) -> None:
    outputs = run(load(demo_model), make_prompts(demo_model, MORE_LENGTHS), greedy(MORE_TOKENS))
    places = [compare(reference, output) for output in outputs]
    check_tokens(places, len(MORE_LENGTHS) * MORE_TOKENS)
    check_logprobs(outputs, places)


compiled = pytest.mark.skipif(find_spec("octavo._cpu") is None, reason="the CPU kernels are not built")
#: Of the prompts: those that other ways of computing them are compared for. The longest comes first, as what would wait
#: for blocks preempts nothing.
FEW = [i for i, length in reversed(list(enumerate(LENGTHS))) if length in (1, 15, 17, 33, 64, 100)]


def everything(output: RequestOutput) -> Any:
    completion = output.outputs[0]
    return output.prompt_logprobs, completion.token_ids, completion.logprobs


@compiled
@pytest.mark.parametrize(
    "options",
    [
        # By default test_invariance.py says so in bfloat16.
        pytest.param({"max_num_seqs": 1}, marks=pytest.mark.slow),
        pytest.param(
            {"max_num_batched_tokens": 16, "max_num_seqs": 16, "block_size": 5, "num_threads": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param({"num_gpu_blocks_override": 14, "max_model_len": 192, "watermark": 0.0}, marks=pytest.mark.slow),
    ],
    ids=["one by one", "chunks of 16 tokens in small blocks, two threads", "preempted"],
)
def test_bit_for_bit_the_same(
    demo_model: Path, prompts: list[list[int]], one_batch: list[RequestOutput], options: dict[str, Any]
) -> None:
    llm = load(demo_model, **{"max_model_len": 384, **options})
    outputs = run(llm, [prompts[i] for i in FEW], greedy(NEW_TOKENS))
    assert [*map(everything, outputs)] == [everything(one_batch[i]) for i in FEW]
    if "watermark" in options:
        assert sum(o.metrics.num_preemptions for o in outputs) > 0
    if options.get("max_num_batched_tokens") == 16:
        assert llm.llm_engine.core.times.steps > sum(LENGTHS[i] for i in FEW) // 16
    assert llm.llm_engine.core.blocks.state.used == 0


@compiled
def test_the_compiled_kernels_agree_with_the_reference(
    demo_model: Path, prompts: list[list[int]], one_batch: list[RequestOutput]
) -> None:
    """The two backends differ by rounding only."""
    few, params = FEW[1:], SamplingParams(max_tokens=1, prompt_logprobs=2)
    outputs = run(load(demo_model, kernels="reference"), [prompts[i] for i in few], params)
    for output, i in zip(outputs, few, strict=True):
        ours, theirs = one_batch[i].prompt_logprobs, output.prompt_logprobs
        assert ours is not None and theirs is not None
        for mine, other in zip(ours[1:], theirs[1:], strict=True):
            assert mine is not None and other is not None
            for token in mine.keys() & other.keys():
                assert mine[token].logprob == pytest.approx(other[token].logprob, abs=1e-3)
