"""Offline throughput of Octavo, vLLM or transformers on the same work, one JSON line for each batch size.

Run it once for each engine, with the Python of an environment that has the engine, on an idle machine and close
together in time, as only ratios of one machine at one time are meaningful.

    python scripts/research/compare_engines.py --engine octavo --model FOLDER --batches 1,8,64

Every engine gets the same random prompts (token ids), decodes greedily to the same length, ignoring the end-of-sequence
token, and answers a question, so that wrong output is noticed.

With ``--row MACHINE`` the last line is a row of the table in docs/performance.md: the machine, the engine and what
it was asked for, and the seconds of each batch.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
Batch = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="engine option")
    parser.add_argument("--row", metavar="MACHINE", help="print a row of a Markdown table, too")
    arguments = parser.parse_args()
    batches = [int(word) for word in arguments.batches.split(",")]
    start = time.perf_counter()
    answer, run = ENGINES[arguments.engine](arguments, max(batches))
    ready = time.perf_counter() - start
    rng = random.Random(0)
    times = []
    for batch in batches:
        prompts = [[rng.randrange(100, 40000) for _ in range(arguments.input_len)] for _ in range(batch)]
        start = time.perf_counter()
        run(prompts)
        seconds = time.perf_counter() - start
        times.append(seconds)
        figures = {
            "engine": arguments.engine,
            "options": arguments.option,
            "batch": batch,
            "seconds": round(seconds, 2),
            "output_tokens_per_s": round(batch * arguments.output_len / seconds, 1),
            "ready_s": round(ready, 1),
            "answer": answer,
        }
        print(json.dumps(figures), flush=True)
    if arguments.row:
        what = ", ".join([arguments.engine, arguments.dtype, *arguments.option])
        print(f"| {' | '.join([arguments.row, what, *(f'{seconds:.3g}' for seconds in times)])} |")


def vllm_compatible(module: str) -> Callable[[Any, int], tuple[str, Callable[[Batch], None]]]:
    """An engine with vLLM's interface, which Octavo has too."""

    def load(arguments: Any, max_num_seqs: int) -> tuple[str, Callable[[Batch], None]]:
        engine = __import__(module)
        options = dict(option.split("=", 1) for option in arguments.option)
        values = {name: {"true": True, "false": False}.get(text, text) for name, text in options.items()}
        length = max(2048, arguments.input_len + arguments.output_len)
        llm = engine.LLM(
            model=arguments.model, dtype=arguments.dtype, max_model_len=length, max_num_seqs=max_num_seqs, **values
        )
        params = engine.SamplingParams(temperature=0, max_tokens=arguments.output_len, ignore_eos=True)

        def run(batch: Batch) -> None:
            outputs = llm.generate([{"prompt_token_ids": p} for p in batch], params, use_tqdm=False)
            assert all(len(o.outputs[0].token_ids) == arguments.output_len for o in outputs)

        answer = llm.chat(QUESTION, engine.SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text
        return answer, run

    return load


def transformers(arguments: Any, max_num_seqs: int) -> tuple[str, Callable[[Batch], None]]:
    """Eager ``generate`` of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))

    def run(batch: Batch) -> None:
        ids = torch.tensor(batch)
        length = arguments.output_len
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length, min_new_tokens=length
        )

    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=20)
    return tokenizer.decode(output[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True), run


ENGINES = {"octavo": vllm_compatible("octavo"), "vllm": vllm_compatible("vllm"), "transformers": transformers}

if __name__ == "__main__":
    main()
