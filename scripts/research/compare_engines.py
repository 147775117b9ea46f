"""Offline throughput of Octavo, vLLM or transformers on the same work, one JSON line for each engine and batch size.

    python scripts/research/compare_engines.py --engine octavo --model FOLDER --batches 1,8,64
    python scripts/research/compare_engines.py --engine octavo --engine vllm=/venvs/vllm/bin/python --model FOLDER

Each engine runs in a process of its own, with the Python of an environment that has it (without one, this Python). The
engines take turns (A B, B A) on an otherwise idle machine, as only ratios of one machine at one time are meaningful. A
run beside which the machine changed is repeated, and marked if that did not help (``octavo.lab.bench.steady``).

Every engine gets the same random prompts (token ids), decodes greedily to the same length, ignoring the end-of-sequence
token, and answers a question, so that wrong output is noticed. Figures are medians of the rounds.

With ``--row MACHINE`` the last lines are rows of the table in docs/performance.md: the machine, the engine and what
it was asked for, and the seconds of each batch, with the range of the rounds.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
Batch = list[list[int]]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--engine", action="append", required=True, metavar="NAME[=PYTHON]", help=f"one of {', '.join(ENGINES)}"
    )
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument(
        "--option", action="append", default=[], metavar="[ENGINE:]NAME=VALUE", help="option of all engines, or of one"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each batch with each engine (3)")
    parser.add_argument("--again", type=int, default=2, help="most repeats of a run that was disturbed (2)")
    parser.add_argument("--row", metavar="MACHINE", help="print rows of a Markdown table, too")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


# --- a process for each engine, with its Python: it does what a line of JSON on its standard input says -------------


def work(arguments: argparse.Namespace) -> None:
    """Loads the engine, says its answer, and runs batches until standard input ends."""
    channel = sys.stdout
    sys.stdout = sys.stderr  # engines print
    start = time.perf_counter()
    answer, run = ENGINES[arguments.engine[0]](arguments, max(map(int, arguments.batches.split(","))))
    print(json.dumps({"answer": answer, "ready_s": time.perf_counter() - start}), file=channel, flush=True)
    for line in sys.stdin:
        batch, seed = json.loads(line)
        rng = random.Random(seed)
        prompts = [[rng.randrange(100, 40000) for _ in range(arguments.input_len)] for _ in range(batch)]
        start = time.perf_counter()
        run(prompts)
        print(json.dumps(time.perf_counter() - start), file=channel, flush=True)


class Engine:
    """A process with an engine."""

    def __init__(self, text: str, arguments: argparse.Namespace) -> None:
        self.name, _, python = text.partition("=")
        of_one = [option.partition(":") for option in arguments.option]
        # A value may hold a colon.
        texts = [(of, rest) if of in ENGINES else (self.name, of + colon + rest) for of, colon, rest in of_one]
        self.options = [option for of, option in texts if of == self.name]
        command = [python or sys.executable, __file__, "--worker", "--engine", self.name, "--model", arguments.model]
        command += ["--dtype", arguments.dtype, "--batches", arguments.batches]
        command += ["--input-len", str(arguments.input_len), "--output-len", str(arguments.output_len)]
        command += [f"--option={option}" for option in self.options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        said = self._answer()
        self.answer, self.ready = said["answer"], said["ready_s"]

    def run(self, batch: int, seeds: Any) -> float:
        """Seconds of a batch with prompts that it has not seen."""
        assert self._process.stdin is not None
        print(json.dumps([batch, next(seeds)]), file=self._process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    arguments = make_parser().parse_args()
    if unknown := [text for text in arguments.engine if text.partition("=")[0] not in ENGINES]:
        raise SystemExit(f"no engine {unknown[0]!r}; known: {', '.join(ENGINES)}")
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    from octavo.lab.bench.steady import Guard, GuardedRun, median_and_range

    batches = [int(word) for word in arguments.batches.split(",")]
    engines = [Engine(text, arguments) for text in arguments.engine]
    guard = Guard(again=arguments.again, say=lambda text: print(text, file=sys.stderr, flush=True))
    runs: dict[tuple[Engine, int], list[GuardedRun[float]]] = {}
    for number in range(arguments.rounds):
        for batch in batches:
            # Both engines get the same prompts, and a repeated run others, which no cache has.
            seeds = {engine: iter(range(number * 1000, (number + 1) * 1000)) for engine in engines}
            jobs = {
                f"{engine.name} {place} (batch {batch}, round {number})": functools.partial(
                    engine.run, batch, seeds[engine]
                )
                for place, engine in enumerate(engines)
            }
            for engine, each in zip(engines, guard.measure(jobs, backwards=number % 2 == 1), strict=True):
                runs.setdefault((engine, batch), []).append(each)
    for (engine, batch), of_batch in runs.items():
        seconds = [run.result for run in of_batch]
        figures = {
            "engine": engine.name,
            "options": engine.options,
            "batch": batch,
            "seconds": round(statistics.median(seconds), 3),
            "least_s": round(min(seconds), 3),
            "largest_s": round(max(seconds), 3),
            "rounds": len(seconds),
            "disturbed": sum(run.is_disturbed for run in of_batch),
            "output_tokens_per_s": round(batch * arguments.output_len / statistics.median(seconds), 1),
            "ready_s": round(engine.ready, 1),
            "answer": engine.answer,
        }
        print(json.dumps(figures), flush=True)
    for engine in engines if arguments.row else ():
        what = ", ".join([engine.name, arguments.dtype, *engine.options])
        cells = []
        for batch in batches:
            of_batch = runs[engine, batch]
            marks = "*" * any(run.is_disturbed for run in of_batch)
            cells.append(median_and_range([run.result for run in of_batch]) + marks)
        print(f"| {' | '.join([arguments.row, what, *cells])} |")
    for line in guard.report():
        print(line, file=sys.stderr)
    for engine in engines:
        engine.close()


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
