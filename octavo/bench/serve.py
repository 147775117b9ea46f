"""Load on a server, from outside: open-loop arrivals or a fixed number of clients, and what they saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from octavo.bench.serve_client import Client, Outcome
from octavo.bench.serve_workload import Request


class Progress:
    """Counts the requests that have ended; ``report`` is called after each with their number."""

    def __init__(self, report: Callable[[int], None] = lambda ended: None) -> None:
        self._report = report
        self._ended = 0

    async def of(self, sending: Awaitable[Outcome]) -> Outcome:
        """Awaits it and counts."""
        outcome = await sending
        self._ended += 1
        self._report(self._ended)
        return outcome


async def open_loop(client: Client, requests: list[Request], progress: Progress) -> list[Outcome]:
    """Sends each request at its time, whatever became of those before: a slow server does not slow the arrivals."""
    start = time.perf_counter()
    tasks = []
    for request in requests:
        due = start + request.at
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(progress.of(client.send(request, due))))
    return list(await asyncio.gather(*tasks))


async def closed_loop(client: Client, requests: list[Request], clients: int, progress: Progress) -> list[Outcome]:
    """As many clients, each sending its next request when the one before has ended."""
    left = iter(enumerate(requests))
    outcomes: dict[int, Outcome] = {}

    async def work() -> None:
        for number, request in left:
            outcomes[number] = await progress.of(client.send(request))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(requests))):
            group.create_task(work())
    return [outcomes[number] for number in range(len(requests))]


async def measure(
    client: Client,
    requests: list[Request],
    *,
    clients: int | None,
    warmup: list[Request],
    progress: Progress,
) -> tuple[list[Outcome], float]:
    """Runs the warm-up, then the requests: closed-loop with ``clients``, or open-loop at their times if it is None.

    Returns:
        What became of each request in the order given, and the seconds of processor time that this process took.
    """
    async with client:
        if warmup:
            await closed_loop(client, warmup, clients or 8, Progress())
        cpu = time.process_time()
        if clients is None:
            outcomes = await open_loop(client, requests, progress)
        else:
            outcomes = await closed_loop(client, requests, clients, progress)
        return outcomes, time.process_time() - cpu
