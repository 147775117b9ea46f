"""Engines with little room, their prompts, and what to compare of their outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo import LLM, BeamSearchParams, SamplingParams

#: Prompts of 2 to 60 tokens for a model of one token a byte, and what is asked of them.
WORK: list[tuple[str, Any]] = [
    ("ab", SamplingParams(temperature=0, max_tokens=40, logprobs=2, ignore_eos=True)),
    ("the quick brown fox jumps over the lazy dog, twice", SamplingParams(temperature=1, seed=4, max_tokens=30, n=3)),
    ("a prompt", SamplingParams(temperature=0.8, seed=2, max_tokens=20, presence_penalty=0.5, prompt_logprobs=1)),
    ("b" * 60, SamplingParams(temperature=0, max_tokens=12, logprobs=0, repetition_penalty=1.1)),
    ("beams", BeamSearchParams(beam_width=3, max_tokens=8)),
    ("the quick brown fox jumps over the lazy cat", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)),
    ("one", SamplingParams(temperature=0, max_tokens=1)),
    ("c" * 33, SamplingParams(temperature=0.5, seed=9, max_tokens=25, min_tokens=10, logprobs=1)),
]
#: 24 blocks of 4 tokens hold two or three of them; chunks of 16 tokens.
TIGHT: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 36,
}


def make(model: Path, **options: Any) -> LLM:
    return LLM(str(model), device="cpu", num_threads=1, **{**TIGHT, "engine_restarts": 0, **options})


def answers(llm: LLM, work: list[tuple[str, Any]] = WORK) -> list[Any]:
    """Tokens and logprobs of every completion, and of the prompts where they were asked for."""
    outputs = llm.generate([prompt for prompt, _ in work], [params for _, params in work], use_tqdm=False)
    return [
        (output.prompt_logprobs, [(c.token_ids, c.logprobs, c.finish_reason, c.error) for c in output.outputs])
        for output in outputs
    ]
