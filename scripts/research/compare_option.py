"""What an engine option changes: two engines in one process, one with the option, run the same greedy batches in turn.

    python scripts/research/compare_option.py smollm2-135m --option async_scheduling=false --batches 1,2,4

Prompts are pieces of a text. Prints, for each batch size, the median and the 10 % quantile of the times of steps in
which all sequences decode, without and with the option, and fails if the tokens differ.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from octavo import LLM, SamplingParams

TEXT = Path(__file__).resolve().parents[2] / "tests" / "data" / "perplexity.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument(
        "--option", required=True, metavar="NAME=VALUE", help="that of the second engine; the value in JSON"
    )
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=48)
    arguments = parser.parse_args()
    name, value = arguments.option.split("=", 1)
    options = {"max_model_len": arguments.input_len + arguments.output_len, "enable_prefix_caching": False}
    engines = [LLM(arguments.model, **options, **extra) for extra in ({}, {name: json.loads(value)})]
    tokens = engines[0].get_tokenizer().encode(TEXT.read_text())
    rng = random.Random(0)
    for batch in map(int, arguments.batches.split(",")):
        seconds: list[list[float]] = [[], []]
        for turn in range(arguments.rounds):
            places = [rng.randrange(len(tokens) - arguments.input_len) for _ in range(batch)]
            prompts = [tokens[place : place + arguments.input_len] for place in places]
            answers = {}
            for i in (0, 1) if turn % 2 else (1, 0):
                answers[i], steps = run(engines[i], prompts, arguments.output_len)
                seconds[i] += steps
            if answers[0] != answers[1]:
                raise SystemExit(f"with {arguments.option} other tokens were generated")
        medians = [statistics.median(steps) * 1e3 for steps in seconds]
        fast = [statistics.quantiles(steps, n=10)[0] * 1e3 for steps in seconds]
        print(
            f"batch {batch}: median {change(medians)}, 10 % quantile {change(fast)}, {len(seconds[0])} steps",
            flush=True,
        )


def change(milliseconds: list[float]) -> str:
    before, after = milliseconds
    return f"{before:.2f} -> {after:.2f} ms ({after / before - 1:+.1%})"


def run(llm: LLM, prompts: list[list[int]], output_len: int) -> tuple[list[list[int]], list[float]]:
    """The tokens, and the seconds of each step in which all sequences decode."""
    engine, steps = llm.llm_engine, []
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    tokens: dict[str, list[int]] = {}
    counts = engine.core.scheduler.counts
    while engine.has_unfinished_requests():
        prefilled, decoded, start = counts().prefill_tokens, counts().decode_tokens, time.perf_counter()
        for output in engine.step():
            tokens[output.request_id] = output.outputs[0].token_ids
        seconds = time.perf_counter() - start
        if counts().prefill_tokens == prefilled and counts().decode_tokens == decoded + len(prompts):
            steps.append(seconds)
    return [tokens[str(i)] for i in range(len(prompts))], steps


if __name__ == "__main__":
    main()
