"""The demo: downloads a small model and answers a few questions as one batch."""

from __future__ import annotations

import argparse
import time

QUESTIONS = (
    "What is the capital of France?",
    "Give the plural of mouse.",
    "Which animal says meow?",
    "Write one sentence about the sea.",
)
MODEL = "smollm2-135m"


def main() -> None:
    start = time.perf_counter()
    from octavo import LLM, SamplingParams
    from octavo.loader.resolve import resolve_model

    import_seconds = time.perf_counter() - start
    print(f"== downloading {MODEL} (unless it is cached)", flush=True)
    resolve_model(MODEL)

    print(f"== loading {MODEL}", flush=True)
    start = time.perf_counter()
    llm = LLM(model=MODEL, dtype="bfloat16")
    load_seconds = time.perf_counter() - start

    print(f"== asking {len(QUESTIONS)} questions as one batch\n", flush=True)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    start = time.perf_counter()
    outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=96), use_tqdm=False)
    seconds = time.perf_counter() - start

    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"Q: {question}\nA: {output.outputs[0].text.strip()}\n")
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    first = min(o.metrics.first_token_time - o.metrics.arrival_time for o in outputs if o.metrics.first_token_time)
    print(
        f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s for the batch "
        f"(import {import_seconds:.2f} s, load {load_seconds:.2f} s, first token after {first:.2f} s)"
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
