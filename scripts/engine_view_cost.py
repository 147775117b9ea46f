"""What it costs a server that pages watch its engine: output tokens a second without a page, with one and with ten.

    python scripts/engine_view_cost.py smollm2-135m --rounds 6

Each round runs the same requests with every number of pages, in an order that turns from round to round, so that what
else the machine does falls on all alike; the figures are medians of ratios within rounds. Pages are connections to
/engine/events that read everything; what a browser takes to draw is not in it, as it may be another machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx

PROMPT = "Tell me about a town by a river, its bridges, its people and what they do on a day in spring. "


@contextlib.contextmanager
def server(model: str, flags: list[str]) -> Iterator[str]:
    """The address of a server."""
    with tempfile.NamedTemporaryFile("w+") as log:
        command = [sys.executable, "-m", "octavo", "serve", model, "--port", "0", "--status-interval", "0", *flags]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not (found := re.search(r"serving .* on (http://\S+)", Path(log.name).read_text())):
                if process.poll() is not None:
                    sys.exit(Path(log.name).read_text())
                time.sleep(0.1)
            yield found.group(1)
        finally:
            process.terminate()
            process.wait()


async def read_events(url: str, counts: list[int]) -> None:
    """A page: reads until it is cancelled; adds the bytes of what it reads."""
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"GET /engine/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    try:
        while data := await reader.read(1 << 16):
            counts.append(len(data))
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def pages(url: str, number: int) -> AsyncIterator[list[int]]:
    """So many pages for the time of a block."""
    counts: list[int] = []
    tasks = [asyncio.create_task(read_events(url, counts)) for _ in range(number)]
    try:
        yield counts
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(url: str, number: int, clients: int, tokens: int) -> tuple[float, float]:
    """Output tokens a second, and kilobytes a second that each page has read."""
    body = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    async with httpx.AsyncClient(base_url=url, timeout=600) as http, pages(url, number) as counts:
        await asyncio.sleep(1.0)
        counts.clear()
        start = time.perf_counter()
        requests = (http.post("/v1/completions", json={**body, "prompt": PROMPT + str(i)}) for i in range(clients))
        answers = await asyncio.gather(*requests)
        seconds = time.perf_counter() - start
        done = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)
        return done / seconds, sum(counts) / max(1, number) / seconds / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clients", type=int, default=16, help="requests at once")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of each")
    parser.add_argument("--pages", type=int, nargs="+", default=[0, 1, 10])
    parser.add_argument("--json", type=Path)
    arguments, flags = parser.parse_known_args()
    cases: list[int] = arguments.pages
    rates: dict[int, list[float]] = {number: [] for number in cases}
    sizes: dict[int, list[float]] = {number: [] for number in cases}
    load = os.getloadavg()
    with server(arguments.model, flags) as url:
        asyncio.run(measure(url, 0, arguments.clients, 16))  # warm
        for turn in range(arguments.rounds):
            order = cases[turn % len(cases) :] + cases[: turn % len(cases)]
            for number in order if turn % 2 else order[::-1]:
                rate, size = asyncio.run(measure(url, number, arguments.clients, arguments.tokens))
                rates[number].append(rate)
                sizes[number].append(size)
    print(f"load averages before and after: {load[0]:.2f}, {os.getloadavg()[0]:.2f} on {os.cpu_count()} processors")
    base = rates[cases[0]]
    ratios = {number: [rate / one for rate, one in zip(rates[number], base, strict=True)] for number in cases}
    for number in cases:
        spread = f"{min(ratios[number]):.3f} to {max(ratios[number]):.3f}"
        rate, ratio, size = (statistics.median(one[number]) for one in (rates, ratios, sizes))
        print(f"{number:3} pages: {rate:8.1f} tokens/s, {ratio:.4f} of none ({spread}), {size:.1f} kB/s to each page")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"load": load, "rates": rates, "ratios": ratios, "kB/s": sizes}, indent=1))


if __name__ == "__main__":
    main()
