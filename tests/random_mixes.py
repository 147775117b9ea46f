"""Random traffic and engine options under which answers must be those of a plain engine."""

from __future__ import annotations

import random
from typing import Any

from octavo import SamplingParams


def random_mix(rng: random.Random) -> tuple[dict[str, Any], list[str], list[SamplingParams]]:
    """Options that preempt, cut and share; prompts; and parameters of each prompt."""
    batching = rng.choice(["mixed", "prefill_first"])
    options: dict[str, Any] = {
        "batching": batching,
        "max_num_batched_tokens": rng.choice([24, 128, 400]) if batching == "mixed" else 400,
        "num_gpu_blocks_override": rng.choice([110, 150, 250]),
        "preemption_mode": rng.choice(["recompute", "swap", "auto"]),
        "num_host_blocks_override": rng.choice([20, 100]),
        "enable_prefix_caching": rng.random() < 0.6,
        "async_scheduling": rng.random() < 0.4,
        "enable_chunked_prefill": True,
    }
    words = ["the ", "quick ", "fox", " 1, 2, 3,", " again", "x = y\n"]
    prompts, params = [], []
    for _ in range(16):
        prompts.append("".join(rng.choices(words, k=rng.randrange(1, 14))))
        params.append(random_params(rng))
    return options, prompts, params


def random_params(rng: random.Random, *, with_texts: bool = True) -> SamplingParams:
    """Parameters of a request; without ``with_texts`` the engine has no tokenizer for stop texts."""
    greedy = rng.random() < 0.5
    return SamplingParams(
        temperature=0.0 if greedy else 1.0,
        seed=rng.randrange(100),
        n=1 if greedy else rng.choice([1, 1, 2, 3]),
        max_tokens=rng.randrange(1, 50),
        logprobs=rng.choice([None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, 1]),
        ignore_eos=rng.random() < 0.5,
        stop=rng.choice([None, "e", "ab"]) if with_texts else None,
        stop_token_ids=rng.choice([None, [40, 50, 60]]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
        logit_bias=rng.choice([None, {30: 5.0}]),
    )
