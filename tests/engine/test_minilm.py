"""The built-in model for vectors beside the reference: its own network in transformers, pooled as its files say."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM
from octavo.loader.resolve import resolve_model

#: What is asked, and which of the texts answers it.
QUESTIONS = {
    "How do plants make food from light?": "Photosynthesis turns carbon dioxide and water into sugar in green leaves.",
    "Who painted the ceiling of the Sistine Chapel?": "Michelangelo worked on the frescoes in Rome for four years.",
    "What makes bread rise?": "Yeast ferments the dough and fills it with bubbles of gas.",
    "Why is the sky blue?": "Short wavelengths of sunlight are scattered most by air.",
    "How do I get my money back?": "Refunds are paid within ten days after we receive the parcel.",
    "Which animal sleeps through winter?": "Hedgehogs hibernate in piles of leaves until spring.",
    "What does a compiler do?": "It translates programs into instructions that a processor runs.",
    "How far is the moon?": "Our satellite orbits at a distance of 384,000 kilometres.",
    "When was the wall in Berlin opened?": "On the ninth of November 1989 people crossed the border freely.",
    "How do I stop a tap from dripping?": "Turn off the water and replace the worn washer in the faucet.",
}
PLAIN = re.split(r"[.\n]+\s*", (Path(__file__).parent.parent / "data" / "perplexity.txt").read_text("utf-8"))
#: Sentences, and neighbours among them together: 5 to 200 tokens.
SENTENCES = [" ".join(PLAIN[i : i + count]) for count in (1, 2, 4, 6) for i in range(len(PLAIN) - count)][-200:]


def reference(texts: list[str]) -> np.ndarray:
    """Vectors float32 [n, 384] of transformers."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = resolve_model("all-minilm-l6-v2")
    network, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    vectors = []
    for text in texts:
        with torch.inference_mode():
            states = network(**tokenizer(text, return_tensors="pt", truncation=True, max_length=256)).last_hidden_state
        mean = states[0].mean(0)
        vectors.append((mean / mean.norm()).numpy())
    return np.stack(vectors)


def vectors(llm: LLM, texts: list[str]) -> np.ndarray:
    return np.array([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])


@pytest.mark.slow  # fetches 84 MB once
def test_vectors_are_those_of_the_reference() -> None:
    assert len(SENTENCES) == 200
    theirs = reference(SENTENCES)
    least = {}
    for dtype, quantization in (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")):
        ours = vectors(LLM("all-minilm-l6-v2", dtype=dtype, quantization=quantization), SENTENCES)
        least[dtype if quantization == "none" else quantization] = float((ours * theirs).sum(1).min())
    print(least)
    assert least["float32"] > 0.999999 and least["bfloat16"] > 0.9995 and least["int8"] > 0.995


@pytest.mark.slow
def test_rankings_are_those_of_the_reference() -> None:
    questions, answers = list(QUESTIONS), list(QUESTIONS.values())
    theirs = reference(questions) @ reference(answers).T
    llm = LLM("all-minilm-l6-v2")
    for question, scores, right in zip(questions, theirs, answers, strict=True):
        ranked = [index for index, _ in llm.rerank(question, answers, use_tqdm=False)]
        assert ranked == np.argsort(-scores, kind="stable").tolist()
        assert answers[ranked[0]] == right
