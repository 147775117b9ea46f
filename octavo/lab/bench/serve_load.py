"""Load on a server: open-loop arrivals or a fixed number of clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from octavo.lab.bench.serve_client import Client, RequestOutcome
from octavo.lab.bench.serve_workload import Request

#: Called when a request has ended.
Ended = Callable[[], object]


async def open_loop(client: Client, requests: list[Request], ended: Ended) -> list[RequestOutcome]:
    """Sends each request at its time, so that a slow server does not delay later arrivals."""
    start = time.perf_counter()
    tasks = []
    for request in requests:
        due = start + request.at
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(client.send(request, due))
        task.add_done_callback(lambda _: ended())
        tasks.append(task)
    return list(await asyncio.gather(*tasks))


async def closed_loop(client: Client, requests: list[Request], clients: int, ended: Ended) -> list[RequestOutcome]:
    """``clients`` clients, each sending its next request when the one before has ended."""
    left = iter(enumerate(requests))
    outcomes: dict[int, RequestOutcome] = {}

    async def work() -> None:
        for number, request in left:
            outcomes[number] = await client.send(request)
            ended()

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
    ended: Ended,
    begins: Callable[[str], object] = lambda phase: None,
) -> tuple[list[RequestOutcome], float]:
    """Runs the warm-up, then the requests: closed-loop with ``clients``, or open-loop at their times if it is None.

    ``begins`` is called with the name of each phase.

    Returns:
        The outcomes in the order of the requests, and the processor time of this process in seconds.

    Raises:
        ConfigError: there is no server.
    """
    try:
        await client.connect()
        if warmup:
            begins("warm-up")
            await closed_loop(client, warmup, clients or 8, lambda: None)
            begins("requests")
        cpu = time.process_time()
        if clients is None:
            outcomes = await open_loop(client, requests, ended)
        else:
            outcomes = await closed_loop(client, requests, clients, ended)
        return outcomes, time.process_time() - cpu
    finally:
        client.close()
