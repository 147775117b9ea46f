"""Replicas behind one front end: throughput against one engine, and what routing by prefix finds in the caches.

    python scripts/research/compare_replicas.py [MODEL]

Throughput: as many clients as asked for, each with one request after the other, on one engine with all processors and
on two pinned to half of them each. Routing: conversations of several turns, whose prompts are all that was said before.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

from octavo import AsyncLLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


async def complete(llm: AsyncLLM, name: str, prompt: list[int], params: SamplingParams) -> list[int]:
    """The tokens of one answer."""
    outputs = [output async for output in llm.generate(name, {"prompt_token_ids": prompt}, params, streaming=False)]
    return outputs[-1].outputs[0].token_ids


async def throughput(model: str, clients: int, replicas: int) -> float:
    """Output tokens a second of ``clients``, three requests of 128 tokens each."""
    options: dict[str, Any] = {"data_parallel_size": replicas, "max_model_len": 512, "pin_threads": replicas > 1}
    async with AsyncLLM(model, **options) as llm:
        numbers = random.Random(1)

        async def client(i: int, requests: int) -> int:
            prompts = [[numbers.randrange(1000, 40000) for _ in range(128)] for _ in range(requests)]
            return sum([len(await complete(llm, f"{i}-{n}", p, GREEDY)) for n, p in enumerate(prompts)])

        await asyncio.gather(*(client(i, 1) for i in range(clients)))  # warms up
        start = time.perf_counter()
        tokens = await asyncio.gather(*(client(i, 3) for i in range(clients)))
        return sum(tokens) / (time.perf_counter() - start)


async def hit_rate(model: str, routing: str, conversations: int = 12, turns: int = 5) -> tuple[float, float]:
    """Share of prompt tokens found in a prefix cache, and seconds, for conversations in turns on two replicas."""
    options: dict[str, Any] = {"data_parallel_size": 2, "max_model_len": 1024, "data_parallel_routing": routing}
    short = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    async with AsyncLLM(model, **options) as llm:
        numbers = random.Random(2)
        system = [numbers.randrange(1000, 40000) for _ in range(64)]

        async def talk(i: int) -> None:
            said = system[:]
            for turn in range(turns):
                said += [numbers.randrange(1000, 40000) for _ in range(48)]
                said += await complete(llm, f"{i}-{turn}", said, short)
                await asyncio.sleep(numbers.random() * 0.05)

        start = time.perf_counter()
        await asyncio.gather(*(talk(i) for i in range(conversations)))
        seconds = time.perf_counter() - start
        stats = await llm.stats()
        return stats.prefix_hit_tokens / stats.prefix_queried_tokens, seconds


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--clients", default="1,8,32", help="numbers of clients (1,8,32)")
    arguments = parser.parse_args()
    print("clients  1 engine, tok/s  2 pinned replicas, tok/s  ratio")
    for clients in map(int, arguments.clients.split(",")):
        one, two = (asyncio.run(throughput(arguments.model, clients, replicas)) for replicas in (1, 2))
        print(f"{clients:7}  {one:15.1f}  {two:24.1f}  {two / one:5.2f}", flush=True)
    print("\nrouting       prompt tokens found cached  seconds")
    for routing in ("prefix", "least_loaded", "round_robin"):
        share, seconds = asyncio.run(hit_rate(arguments.model, routing))
        print(f"{routing:12}  {share:26.1%}  {seconds:7.1f}", flush=True)


if __name__ == "__main__":
    main()
