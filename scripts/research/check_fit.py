"""Compares what ``octavo fit`` promises with what runs give: memory, refusals, and speed.

Each case is a built-in shape with random weights, a limit of memory (``ulimit -v`` of the engine's process, which is
stricter than a control group's), a context and a number of users. Of each that fits, every choice, or the best one, is
run in a process of its own: all users fill their contexts. A line of JSON for each run, and a summary.

    python scripts/research/check_fit.py --shapes gpt2-shape gemma-3-270m-shape --memory 1.0 2.0 --contexts 512
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GIB = 1 << 30
#: Tokens that each user generates.
OUTPUT = 17
#: Repetitions of a measurement, of which the median counts.
ROUNDS = 3


def run_engine(options: dict[str, Any], users: int, prompt: int, limit: int) -> None:
    """Prints peak memory, and times to the first token of one prompt and per token of all users, as JSON."""
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    import logging

    logging.disable(logging.CRITICAL)
    from octavo import LLM, SamplingParams

    llm = LLM(load_format="dummy", skip_tokenizer_init=True, **options)
    loaded = peak()
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, temperature=0.0)

    def run(count: int, first: int) -> tuple[float, float]:
        """Seconds to the first token, and the median of a step of all users."""
        engine.reset_prefix_cache()
        for number in range(count):
            ids = [(first + number + 7 * place) % 997 + 3 for place in range(prompt)]
            engine.add_request(f"{first} {number}", {"prompt_token_ids": ids}, params)
        start, times = time.perf_counter(), list[float]()
        while engine.has_unfinished_requests():
            if engine.step():
                times.append(time.perf_counter())
        steps = [b - a for a, b in itertools.pairwise(times[-(OUTPUT - 1) :])]
        return times[0] - start, statistics.median(steps)

    run(1, 0)  # buffers
    alone = [run(1, 100 * (number + 1)) for number in range(ROUNDS)]
    together = [run(users, 1000 * (number + 1)) for number in range(ROUNDS)]
    status = Path("/proc/self/status").read_text()
    addresses = 1024 * int(status.partition("VmPeak:")[2].split()[0])
    result = {
        "loading": loaded,
        "addresses": addresses,
        "peak": peak(),
        "ttft": statistics.median(first for first, _ in alone),
        "tpot": statistics.median(step for _, step in together),
    }
    print(json.dumps(result))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check(shape: str, limit: int, context: int, users: int, *, every: bool, limited: bool) -> list[dict[str, Any]]:
    from octavo.cli.fit import open_fit
    from octavo.config.engine_config import make_config
    from octavo.engine.fit import Load, MemoryBounds

    case = {"shape": shape, "memory_gib": limit / GIB, "context": context, "users": users}
    with open_fit(make_config(model=shape, load_format="dummy"), limit) as fit:
        assert fit._rates is not None
        server = fit._rates.step().server_bytes
        fit.bounds = MemoryBounds(min(fit.bounds.available, limit), limit if limited else None)
        prompt = context - OUTPUT
        choices = [each for each in fit.choices(Load(users, context, prompt)) if each.fits]
        lines = []
        for choice in choices if every else choices[:1]:
            options = {"model": shape, **fit.engine_options(choice)}
            words = [sys.executable, __file__, "--run", json.dumps([options, users, prompt, limit if limited else 0])]
            run = subprocess.run(words, capture_output=True, text=True, timeout=900, env=os.environ)
            line: dict[str, Any] = case | {"choice": f"{choice.dtype} {choice.quantization} {choice.kv_cache_dtype}"}
            assert choice.speed is not None
            line["promised"] = dataclasses.asdict(choice.speed) | {
                "peak": choice.needed_bytes - server,
                "addresses": fit.addresses(choice),
            }
            if run.returncode:
                line["failed"] = run.stderr.strip().splitlines()[-1] if run.stderr else f"signal {-run.returncode}"
            else:
                line["run"] = json.loads(run.stdout.splitlines()[-1])
                for name, got in line["run"].items():
                    if name in line["promised"]:
                        line[f"{name} promised / run"] = round(line["promised"][name] / got, 3)
            lines.append(line)
    return lines or [case | {"does not fit": True}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = ["gpt2-shape", "gemma-3-270m-shape", "qwen3.5-0.8b-shape", "llama-3.2-1b-shape"]
    parser.add_argument("--shapes", nargs="+", default=shapes)
    parser.add_argument("--memory", nargs="+", type=float, default=[1.0, 2.0, 4.0], metavar="GIB")
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--users", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--every", action="store_true", help="run every choice that fits, not only the best one")
    parser.add_argument("--no-limit", action="store_true", help="do not limit the processes: measure alone")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run_engine(*json.loads(arguments.run))
        return
    lines: list[dict[str, Any]] = []
    for shape, memory, context, users in itertools.product(
        arguments.shapes, arguments.memory, arguments.contexts, arguments.users
    ):
        limited = not arguments.no_limit
        for line in check(shape, int(memory * GIB), context, users, every=arguments.every, limited=limited):
            print(json.dumps(line), flush=True)
            lines.append(line)
    runs = [line for line in lines if "run" in line]
    print(f"{len(lines)} cases: {len(runs)} run, {sum('failed' in each for each in lines)} promised and failed")
    for name in ("peak", "addresses", "ttft", "tpot"):
        errors = sorted(abs(line[f"{name} promised / run"] - 1) for line in runs)
        if errors:
            print(f"{name}: error median {statistics.median(errors):.1%}, worst {errors[-1]:.1%}")
    sys.exit(any("failed" in line for line in lines))


if __name__ == "__main__":
    main()
