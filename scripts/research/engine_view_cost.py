"""What it costs a server that pages watch its engine: output tokens a second without a page, with one and with ten.

    python scripts/research/engine_view_cost.py smollm2-135m --rounds 6

Each round runs the same requests with every number of pages, in an order that turns from round to round, so that what
else the machine does falls on all alike; the figures are medians of ratios within rounds. Pages are connections to
/engine/events that read everything; what a browser takes to draw is not in it, as it may be another machine's.

On a machine that does other things, rates say little: then look at what does not depend on them, the share of the
engine core's time in which views are made (each says how long it took), and the server's own processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil

PROMPT = "Tell me about a town by a river, its bridges, its people and what they do on a day in spring. "


@contextlib.contextmanager
def server(model: str, flags: list[str]) -> Iterator[tuple[str, int]]:
    """The address of a server, and its process."""
    with tempfile.NamedTemporaryFile("w+") as log:
        command = [sys.executable, "-m", "octavo", "serve", model, "--port", "0", "--status-interval", "0", *flags]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not (found := re.search(r"serving .* on (http://\S+)", Path(log.name).read_text())):
                if process.poll() is not None:
                    sys.exit(Path(log.name).read_text())
                time.sleep(0.1)
            yield found.group(1), process.pid
        finally:
            process.terminate()
            process.wait()


class Page:
    """Reads a stream; sums up bytes, and the seconds in which its views were made."""

    def __init__(self) -> None:
        self.bytes, self.events, self.cost = 0, 0, 0.0

    async def read(self, url: str) -> None:
        """Reads until it is cancelled."""
        address = httpx.URL(url)
        reader, writer = await asyncio.open_connection(address.host, address.port, limit=16 << 20)
        writer.write(b"GET /engine/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            while line := await reader.readline():
                self.bytes += len(line)
                if line.startswith(b"data: "):
                    self.events += 1
                    self.cost += sum(float(cost) for cost in re.findall(rb'"cost":([0-9.e-]+)', line))
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def pages(url: str, number: int) -> AsyncIterator[list[Page]]:
    """So many pages for the time of a block."""
    shown = [Page() for _ in range(number)]
    tasks = [asyncio.create_task(page.read(url)) for page in shown]
    try:
        yield shown
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Run:
    """What one run has shown."""

    #: Output tokens a second.
    rate: float
    #: Of a page: kilobytes and events a second, and the share of the time in which its views were made.
    size: float
    events: float
    share: float
    #: Processor milliseconds of the server's process (not of the engine core) for each output token.
    processor: float


async def measure(url: str, pid: int, number: int, clients: int, tokens: int) -> Run:
    """Runs the requests while so many pages watch."""
    body = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    process = psutil.Process(pid)
    async with httpx.AsyncClient(base_url=url, timeout=600) as http, pages(url, number) as shown:
        await asyncio.sleep(1.0)
        before = [(page.bytes, page.events, page.cost) for page in shown[:1]] or [(0, 0, 0.0)]
        start, times = time.perf_counter(), process.cpu_times()
        requests = (http.post("/v1/completions", json={**body, "prompt": PROMPT + str(i)}) for i in range(clients))
        answers = await asyncio.gather(*requests)
        seconds, after = time.perf_counter() - start, process.cpu_times()
        done = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)
        first = shown[0] if shown else Page()
        size, events, cost = (
            now - old for now, old in zip((first.bytes, first.events, first.cost), before[0], strict=True)
        )
        processor = (after.user + after.system - times.user - times.system) / done
        return Run(done / seconds, size / seconds / 1e3, events / seconds, cost / seconds, 1e3 * processor)


def interval(values: list[float], samples: int = 4000) -> tuple[float, float]:
    """Between which 95 % of the medians of resampled values lie."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(samples))
    return medians[samples // 40], medians[-samples // 40]


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
    runs: dict[int, list[Run]] = {number: [] for number in cases}
    load = os.getloadavg()[0]
    with server(arguments.model, flags) as (url, pid):
        asyncio.run(measure(url, pid, 0, arguments.clients, 16))  # warm
        for turn in range(arguments.rounds):
            order = cases[turn % len(cases) :] + cases[: turn % len(cases)]
            for number in order if turn % 2 else order[::-1]:
                runs[number].append(asyncio.run(measure(url, pid, number, arguments.clients, arguments.tokens)))
    print(f"load averages before and after: {load:.2f}, {os.getloadavg()[0]:.2f} on {os.cpu_count()} processors")
    for number in cases:
        ratios = [run.rate / base.rate for run, base in zip(runs[number], runs[cases[0]], strict=True)]
        low, high = interval(ratios)
        median = {name: statistics.median(getattr(run, name) for run in runs[number]) for name in Run.__annotations__}
        print(
            f"{number:3} pages: {median['rate']:7.1f} tokens/s, {statistics.median(ratios):.4f} of none "
            f"(95 % of resampled medians: {low:.4f} to {high:.4f}); views {median['share']:.3%} of the core's time; "
            f"server {median['processor']:.3f} ms/token; each page {median['events']:.1f} events/s, "
            f"{median['size']:.1f} kB/s"
        )
    if arguments.json is not None:
        report = {str(number): [asdict(run) for run in runs[number]] for number in cases}
        arguments.json.write_text(json.dumps({"load": load, "runs": report}, indent=1))


if __name__ == "__main__":
    main()
