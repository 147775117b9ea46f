"""What quantisation costs: the perplexity of the demo model on a text that it was not trained on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.kernels import BACKENDS, load_kernels

TEXT = Path(__file__).parents[1] / "data" / "perplexity.txt"
#: Tokens of a context; those of its first half are context only.
CONTEXT = 512
#: At most this many times the perplexity in bfloat16. The demo model's weights come from a file of 4 bits with minima:
#: "gguf" computes with just these, and "int4" rounds them to another grid of 4 bits.
LIMITS = {"int8": 1.02, "gguf": 1.02, "int4": 1.25}

pytestmark = pytest.mark.slow


def perplexity(quantization: str | None) -> float:
    llm = LLM(model="smollm2-135m", kernels="cpu", quantization=quantization, max_model_len=CONTEXT + 16)
    ids = llm.get_tokenizer().encode(TEXT.read_text(encoding="utf-8"))
    contexts = [ids[i : i + CONTEXT] for i in range(0, len(ids) - CONTEXT + 1, CONTEXT)]
    assert len(contexts) >= 3
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": context} for context in contexts], params, use_tqdm=False)
    losses = []
    for context, output in zip(contexts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for position in range(CONTEXT // 2 + 1, CONTEXT):
            logprobs = output.prompt_logprobs[position]
            assert logprobs is not None
            losses.append(-logprobs[context[position]].logprob)
    return math.exp(math.fsum(losses) / len(losses))


@pytest.fixture(scope="module")
def unquantised() -> float:
    if "cpu" not in BACKENDS or load_kernels("auto", "cpu").name != "cpu":
        pytest.skip("the CPU kernels are not built")
    return perplexity(None)


def test_a_sensible_model_reads_plain_english(unquantised: float) -> None:
    print(f"bfloat16: perplexity {unquantised:.2f}")
    assert 20 < unquantised < 30


@pytest.mark.parametrize("quantization", LIMITS)
def test_quantisation_costs_little(unquantised: float, quantization: str) -> None:
    quantised = perplexity(quantization)
    print(f"{quantization}: perplexity {quantised:.2f}")
    assert quantised < LIMITS[quantization] * unquantised
