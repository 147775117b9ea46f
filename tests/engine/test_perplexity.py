"""What quantisation costs: the perplexity of the built-in models on a text that they were not trained on."""

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


def perplexity(
    quantization: str | None, model: str = "smollm2-135m", *, dtype: str = "auto", bos: int | None = None
) -> float:
    """As llama-perplexity computes it; the first token of each context becomes ``bos``, if it is given."""
    llm = LLM(model=model, kernels="cpu", quantization=quantization, dtype=dtype, max_model_len=CONTEXT + 16)
    ids = llm.get_tokenizer().encode(TEXT.read_text(encoding="utf-8"))
    contexts = [ids[i : i + CONTEXT] for i in range(0, len(ids) - CONTEXT + 1, CONTEXT)]
    assert len(contexts) >= 3
    if bos is not None:
        contexts = [[bos, *context[1:]] for context in contexts]
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
def compiled() -> None:
    if "cpu" not in BACKENDS or load_kernels("auto", "cpu").name != "cpu":
        pytest.skip("the CPU kernels are not built")


@pytest.fixture(scope="module")
def unquantised(compiled: None) -> float:
    return perplexity(None)


def test_a_sensible_model_reads_plain_english(unquantised: float) -> None:
    print(f"bfloat16: perplexity {unquantised:.2f}")
    assert 20 < unquantised < 30


@pytest.mark.parametrize("quantization", LIMITS)
def test_quantisation_costs_little(unquantised: float, quantization: str) -> None:
    quantised = perplexity(quantization)
    print(f"{quantization}: perplexity {quantised:.2f}")
    assert quantised < LIMITS[quantization] * unquantised


#: ``llama-perplexity -m FILE -f perplexity.txt -c 512 -b 512`` (b11434) of gemma-3-270m-q4_k_m.gguf, where it rounds
#: activations to 8 bits, and of the same in float32 (``llama-quantize --allow-requantize ... F32``).
GEMMA_OWN_BITS, GEMMA_FLOAT32 = 24.3415, 24.1963


@pytest.mark.parametrize(
    ("quantization", "dtype", "llama_cpp", "tolerance"),
    [
        ("gguf", "auto", GEMMA_OWN_BITS, 0.01),
        ("none", "bfloat16", GEMMA_FLOAT32, 0.01),
        ("none", "float32", GEMMA_FLOAT32, 1e-4),
    ],
)
def test_gemma_has_the_perplexity_of_llama_cpp(
    quantization: str, dtype: str, llama_cpp: float, tolerance: float, compiled: None
) -> None:
    ours = perplexity(quantization, "gemma3-270m", dtype=dtype, bos=2)
    print(f"{quantization}, {dtype}: perplexity {ours:.4f}, {ours / llama_cpp - 1:+.3%}")
    assert abs(ours / llama_cpp - 1) < tolerance
