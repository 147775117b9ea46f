"""What KV stores bring and cost: first tokens of a long prompt, throughput, and what a second engine finds.

    .venv/bin/python scripts/research/measure_kv_store.py                          # smollm2-135m, 8,000 tokens
    .venv/bin/python scripts/research/measure_kv_store.py llama-3.2-1b-shape --load-format dummy --prompt 20000
    .venv/bin/python scripts/research/measure_kv_store.py --parts first,throughput,second --rounds 5

- first: seconds to the first token of a prompt that is computed; that is in memory; and that an engine finds on disk
  whose core was killed (SIGKILL) and started again. The answers must have the same bits.
- throughput: output tokens a second without stores, and with a disk on which nothing is found, in pairs.
- second: seconds to the first token at a second engine of a prompt that the first one has put into a Redis server.

Each figure is the median of the rounds with its range; runs that other processes disturbed are named.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from octavo import AsyncLLM, SamplingParams
from octavo.lab.bench.steady import Guard, median_and_range

ANSWER, BLOCK_SIZE = 16, 16
#: Requests of a run of throughput, and tokens of their prompts and answers.
REQUESTS, PROMPT, OUTPUT = 16, 256, 128
#: Seconds in which everything must be stored.
STORE_SECONDS = 60.0
#: Seconds after which an engine's stores are open.
OPEN_SECONDS = 2.0

Bits = list[tuple[int, float]]
Rows = list[tuple[str, list[float]]]
T = TypeVar("T")


def _run(job: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return asyncio.run(job())


class Measurement:
    """Options, and the guard that watches the runs."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rounds, self.prompt_len = args.rounds, args.prompt
        self.options: dict[str, Any] = {
            "model": args.model,
            "load_format": args.load_format,
            "max_model_len": args.prompt + 2 * ANSWER,
            "log_stats_interval": 0,
        }
        if args.num_threads:
            self.options["num_threads"] = args.num_threads
        self.guard = Guard(say=print)

    def run(self, jobs: dict[str, Callable[[], Coroutine[Any, Any, T]]], number: int) -> list[T]:
        """Each once, and again, from the beginning, if it was disturbed."""
        runs = self.guard.measure({name: partial(_run, job) for name, job in jobs.items()}, backwards=number % 2 == 1)
        return [run.result for run in runs]

    def prompt(self, seed: int, length: int | None = None) -> list[int]:
        """Random token ids."""
        return random.Random(seed).choices(range(1000, 8000), k=length or self.prompt_len)


async def first_token(llm: AsyncLLM, name: str, prompt: list[int]) -> tuple[float, Bits]:
    """Seconds to the first token; and all tokens with their logprobs."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False, logprobs=0)
    start = time.perf_counter()
    seconds, bits = 0.0, Bits()
    async for output in await llm.submit(name, {"prompt_token_ids": prompt}, params):
        seconds = seconds or time.perf_counter() - start
        for completion in output.outputs:
            assert completion.logprobs is not None
            for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
                bits.append((token, logprobs[token].logprob))
    return seconds, bits


async def until_stored(count: Callable[[], int], prompt: list[int]) -> None:
    """Waits until a store has the full blocks of a prompt; ``count``: its values now."""
    end = time.monotonic() + STORE_SECONDS
    while count() < len(prompt) // BLOCK_SIZE:
        if time.monotonic() > end:
            raise SystemExit(f"{count()} blocks were stored within {STORE_SECONDS:g} s")
        await asyncio.sleep(0.1)


async def killed(llm: AsyncLLM) -> None:
    """Kills the engine core, and waits for the next one."""
    before = llm.replica_states()[0]
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    while (state := llm.replica_states()[0]).pid in (None, before.pid) or state.status != "ready":
        await asyncio.sleep(0.05)


def measure_first(m: Measurement) -> Rows:
    """Rows of first tokens."""
    names = "computed", "in memory", "on disk, after SIGKILL"

    async def work(number: int) -> list[float]:
        with tempfile.TemporaryDirectory(prefix="kv-store-") as folder:
            async with AsyncLLM(kv_disk=folder, engine_restarts=10, **m.options) as llm:
                await first_token(llm, "warm", m.prompt(-1, 64))
                prompt = m.prompt(number)
                computed, truth = await first_token(llm, "computed", prompt)
                memory, again = await first_token(llm, "memory", prompt)
                await until_stored(lambda: sum(1 for _ in Path(folder).glob("??/*")), prompt)
                await killed(llm)
                await first_token(llm, "warm again", m.prompt(-2, 64))
                disk, restarted = await first_token(llm, "disk", prompt)
        if not truth == again == restarted:
            raise SystemExit("the answers differ")
        return [computed, memory, disk]

    runs = [m.run({f"first tokens, round {n}": partial(work, n)}, n)[0] for n in range(m.rounds)]
    return list(zip(names, map(list, zip(*runs, strict=True)), strict=True))


def measure_throughput(m: Measurement) -> Rows:
    """Rows of output tokens a second."""
    names = "no store", "a disk without hits"
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)

    async def work(number: int, with_disk: bool) -> float:
        with tempfile.TemporaryDirectory(prefix="kv-store-") as folder:
            stores: dict[str, Any] = {"kv_disk": folder} if with_disk else {}
            async with AsyncLLM(**m.options, **stores) as llm:
                await first_token(llm, "warm", m.prompt(-1, 64))
                await asyncio.sleep(OPEN_SECONDS)

                async def ask(i: int) -> None:
                    prompt = m.prompt(1000 * (number + 1) + i, PROMPT)
                    async for _ in await llm.submit(str(i), {"prompt_token_ids": prompt}, params):
                        pass

                start = time.perf_counter()
                await asyncio.gather(*map(ask, range(REQUESTS)))
                return REQUESTS * OUTPUT / (time.perf_counter() - start)

    runs = [m.run({name: partial(work, n, i == 1) for i, name in enumerate(names)}, n) for n in range(m.rounds)]
    return [*zip(names, map(list, zip(*runs, strict=True)), strict=True), ("with by without", [b / a for a, b in runs])]


@contextmanager
def redis_server() -> Iterator[str]:
    """The URL of a server of its own."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise SystemExit("the part 'second' needs redis-server or valkey-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--maxmemory", "4gb"]
    server = subprocess.Popen([program, *words, "--maxmemory-policy", "allkeys-lru"], stdout=subprocess.DEVNULL)
    try:
        time.sleep(0.5)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()


def measure_second(m: Measurement) -> Rows:
    """Rows of first tokens at two engines."""
    import redis  # of the extra store

    async def work(number: int) -> list[float]:
        with redis_server() as url:
            client: Any = redis.Redis.from_url(url)
            async with AsyncLLM(kv_store=url, **m.options) as first, AsyncLLM(kv_store=url, **m.options) as second:
                for llm in (first, second):
                    await first_token(llm, "warm", m.prompt(-1, 64))
                prompt = m.prompt(number)
                computed, truth = await first_token(first, "computed", prompt)
                await until_stored(client.dbsize, prompt)
                shared, bits = await first_token(second, "shared", prompt)
        if truth != bits:
            raise SystemExit("the answers differ")
        return [computed, shared]

    runs = [m.run({f"two engines, round {n}": partial(work, n)}, n)[0] for n in range(m.rounds)]
    names = "first engine, computed", "second engine, from Redis"
    return list(zip(names, map(list, zip(*runs, strict=True)), strict=True))


#: By name: what measures, and the unit of its figures.
PARTS: dict[str, tuple[Callable[[Measurement], Rows], str]] = {
    "first": (measure_first, "s to the first token"),
    "throughput": (measure_throughput, "output tokens/s"),
    "second": (measure_second, "s to the first token"),
}


def main() -> None:
    """Prints tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--prompt", type=int, default=8000, metavar="N", help="tokens of the long prompt (8000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--parts", default=",".join(PARTS), metavar="P,P", help=f"of {','.join(PARTS)}")
    m = Measurement(args := parser.parse_args())
    for part in args.parts.split(","):
        measure, unit = PARTS[part]
        print(f"\n| {m.options['model']}, {m.prompt_len} tokens | {unit}, median of {m.rounds} |\n| --- | ---: |")
        rows = measure(m)
        for name, values in rows:
            print(f"| {name} | {median_and_range(values)} |", flush=True)
        if part != "throughput":
            base = statistics.median(rows[0][1])
            for name, values in rows[1:]:
                print(f"| computed by {name} | {base / statistics.median(values):.1f} x |", flush=True)
    print("\n" + "\n".join(m.guard.report() or ["Nothing disturbed the runs."]))


if __name__ == "__main__":
    main()
