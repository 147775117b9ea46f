"""Gemma 3 270M: beside transformers in float32, and beside llama.cpp on the same file.

``tests/data/gemma3_llama_cpp.json`` has llama.cpp's greedy tokens and how they were made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from tests.hub_folders import hub_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DATA = Path(__file__).parents[1] / "data"
RECORDED: list[dict[str, Any]] = json.loads((DATA / "gemma3_llama_cpp.json").read_text(encoding="utf-8"))["prompts"]
TOKENS = len(RECORDED[0]["float32"]["tokens"])
#: Logits that are less apart than this in float32 may come in another order where activations are rounded.
NEAR_TIE = 0.25
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=5, prompt_logprobs=0)


@pytest.fixture(scope="module")
def folder() -> Path:
    """The model as a folder in float32."""
    return hub_folder("gemma3-270m", "float32")


@pytest.fixture(scope="module")
def float32(folder: Path) -> Iterator[LLM]:
    yield load(str(folder), dtype="float32")


def load(model: str = "gemma3-270m", **options: Any) -> LLM:
    return LLM(model, max_model_len=1024, max_num_seqs=8, **options)


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams = PARAMS) -> Any:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


class Places:
    """An engine's logprobs at the places where llama.cpp chose a token, each after llama.cpp's tokens before it."""

    def __init__(self, llm: LLM, kind: str) -> None:
        prompts = [recorded["prompt_token_ids"] + recorded[kind]["tokens"] for recorded in RECORDED]
        outputs = run(llm, prompts, SamplingParams(max_tokens=1, prompt_logprobs=50))
        lengths = [len(recorded["prompt_token_ids"]) for recorded in RECORDED]
        self.places = [
            {token: logprob.logprob for token, logprob in place.items()}
            for length, output in zip(lengths, outputs, strict=True)
            for place in output.prompt_logprobs[length:]
        ]
        #: llama.cpp's choices.
        self.tokens = [token for recorded in RECORDED for token in recorded[kind]["tokens"]]
        self._seconds = [token for recorded in RECORDED for token in recorded[kind]["seconds"]]

    def gaps(self) -> Tensor:
        """The leads of llama.cpp's tokens before its second choices."""
        chosen = zip(self.tokens, self._seconds, self.places, strict=True)
        return torch.tensor([place[token] - place[second] for token, second, place in chosen])


def recorded_gaps(kind: str) -> Tensor:
    return torch.tensor([gap for recorded in RECORDED for gap in recorded[kind]["gaps"]])


def test_texts_have_the_tokens_of_llama_cpp(float32: LLM) -> None:
    for recorded in RECORDED:
        assert float32.get_tokenizer().encode(recorded["text"]) == recorded["prompt_token_ids"]


def test_float32_gives_the_tokens_of_llama_cpp(float32: LLM) -> None:
    """Its gaps have errors too: llama.cpp takes gelu from a table of float16."""
    for recorded, output in zip(RECORDED, run(float32, [r["prompt_token_ids"] for r in RECORDED]), strict=True):
        assert list(output.outputs[0].token_ids) == recorded["float32"]["tokens"]
    torch.testing.assert_close(Places(float32, "float32").gaps(), recorded_gaps("float32"), atol=0.02, rtol=0)


@pytest.mark.parametrize("quantization", ["gguf", "none"])
def test_rounded_activations_give_the_tokens_of_llama_cpp_but_in_near_ties(float32: LLM, quantization: str) -> None:
    """With the file's own bits, both engines round activations to 8 bits, each in its way; bfloat16 rounds as well.

    What is exact is known: the same file in float32, where both agree. So no place may be farther from it than
    roundings go, and all places together must not be farther than llama.cpp's.
    """
    exact, ours = Places(float32, "own_bits"), Places(load(quantization=quantization), "own_bits")
    errors, their_errors = ours.gaps() - exact.gaps(), recorded_gaps("own_bits") - exact.gaps()
    rms, their_rms = errors.square().mean().sqrt(), their_errors.square().mean().sqrt()
    print(f"{quantization}: errors of gaps {rms:.3f}, of llama.cpp {their_rms:.3f}")
    assert rms < their_rms
    different = 0
    for token, place, truth in zip(ours.tokens, ours.places, exact.places, strict=True):
        best = max(place, key=lambda each: place[each])
        if best != token:
            different += 1
            print(f"{best} {place[best]:.3f} here, llama.cpp's {token} {place[token]:.3f}", end="; ")
            print(f"in float32 {truth[best]:.3f} and {truth[token]:.3f}")
            assert abs(truth[best] - truth[token]) < NEAR_TIE
    assert different < 0.05 * len(ours.tokens)


def test_float32_gives_the_tokens_and_logprobs_of_transformers(float32: LLM, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    beyond_the_window = float32.get_tokenizer().encode((DATA / "perplexity.txt").read_text(encoding="utf-8"))[:600]
    prompts = [beyond_the_window, *(recorded["prompt_token_ids"] for recorded in RECORDED)]
    for prompt, output in zip(prompts, run(float32, prompts), strict=True):
        tokens = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            scores = model(torch.tensor([prompt + tokens])).logits[0, :-1].log_softmax(-1)
        assert scores[len(prompt) - 1 :].argmax(-1).tolist() == tokens
        places = output.prompt_logprobs[1:] + output.outputs[0].logprobs
        chosen = [place[token].logprob for token, place in zip((prompt + tokens)[1:], places, strict=True)]
        expected = scores.gather(1, torch.tensor((prompt + tokens)[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(chosen), expected, atol=1e-3, rtol=0)
