"""Seconds from the kill of an engine core to the first further token, with many requests running."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time

from octavo import AsyncLLM, SamplingParams


async def one(llm: AsyncLLM, name: str, length: int, arrivals: list[float], counts: dict[str, int]) -> None:
    """A stream whose tokens are counted, and of which each output's time is kept."""
    prompt = {"prompt_token_ids": [1000 + int(name), *range(100, 115)]}
    params = SamplingParams(temperature=0, max_tokens=2 * length, ignore_eos=True)
    async for output in await llm.submit(name, prompt, params):
        counts[name] = counts.get(name, 0) + sum(len(completion.token_ids) for completion in output.outputs)
        arrivals.append(time.monotonic())


async def measure(llm: AsyncLLM, count: int, length: int) -> tuple[float, float, float]:
    """Seconds from the kill to the first further token of any request, of the median one, and of the last."""
    arrivals: list[list[float]] = [[] for _ in range(count)]
    counts: dict[str, int] = {}
    tasks = [asyncio.create_task(one(llm, str(i), length, arrivals[i], counts)) for i in range(count)]
    while len(counts) < count or min(counts.values()) < length:
        await asyncio.sleep(0.02)
    pid = llm.replica_states()[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    await asyncio.sleep(0.1)  # what had been sent arrives
    known = [len(times) for times in arrivals]
    while any(len(times) == had for times, had in zip(arrivals, known, strict=True)):
        await asyncio.sleep(0.01)
    first = sorted(times[had] - killed for times, had in zip(arrivals, known, strict=True))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return first[0], statistics.median(first), first[-1]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500, help="tokens that each has when the core is killed")
    parser.add_argument("--kills", type=int, default=3)
    args = parser.parse_args()
    for standby in (0, 1):
        options = {"max_num_seqs": args.requests, "max_model_len": 2048, "standby_engines": standby}
        async with AsyncLLM(args.model, engine_restarts=args.kills, **options) as llm:
            for _ in range(args.kills):
                if standby:
                    while not llm.num_standby:
                        await asyncio.sleep(0.05)
                first, median, last = await measure(llm, args.requests, args.tokens)
                print(
                    f"standby_engines={standby}: {args.requests} requests of {args.tokens} tokens: the first goes on "
                    f"after {first:.2f} s, the median one after {median:.2f} s, the last after {last:.2f} s",
                    flush=True,
                )


if __name__ == "__main__":
    asyncio.run(main())
