"""What a server adds to the steps of a profile: measured on ``octavo serve``, with the client on the same machine."""

from __future__ import annotations

import asyncio
import functools
import statistics
from collections.abc import Sequence

import msgspec

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.lab.bench import serve_load
from octavo.lab.bench.own_server import SERVED_NAME, running_server, token_id_range
from octavo.lab.bench.serve_client import Client, RequestOutcome
from octavo.lab.bench.serve_workload import requests
from octavo.lab.simulate.step_profile import Overhead, StepProfile
from octavo.lab.simulate.work import StepWork
from octavo.lab.workloads.tokens import token_ids
from octavo.lab.workloads.work_items import WorkItem

#: Tokens of each prompt and of each answer, requests of one client, and of several that send at once.
_INPUT, _OUTPUT, _ALONE, _TOGETHER = 16, 33, 16, 64
_CLIENTS = 8
_TIMEOUT = 3600.0


def calibrate_server(profile: StepProfile, options: EngineConfig) -> StepProfile:
    """The profile with ``server`` measured: a server is started, and requests of known steps are sent to it.

    The time between tokens beyond the profile's time of the step is ``step``; the time to the first token beyond that,
    and beyond what the engine takes to add a request, is half the way there (``arrival``) and half the way back
    (``answer``). Overheads that would be negative are 0: the profile's steps were slower than the server's.

    Raises:
        ConfigError: the server does not start, or a request fails.
    """
    with running_server(options) as url:
        client = Client(url, "completions", {"model": SERVED_NAME}, None, _TIMEOUT)
        alone = _send(client, options, "alone", _ALONE, 1)
        client = Client(url, "completions", {"model": SERVED_NAME}, None, _TIMEOUT)
        together = _send(client, options, "together", _TOGETHER, _CLIENTS)
    return msgspec.structs.replace(profile, server=overhead(profile, alone, together))


def overhead(profile: StepProfile, alone: Sequence[RequestOutcome], together: Sequence[RequestOutcome]) -> Overhead:
    """From requests sent one after the other, and by ``_CLIENTS`` clients at once."""
    gaps = [[o.tpot for o in some if o.tpot is not None] for some in (alone, together)]
    extra = [
        statistics.median(of_some) - profile.seconds(_decodes(count))
        for of_some, count in zip(gaps, (1, _CLIENTS), strict=True)
    ]
    step = max(0.0, statistics.fmean(extra))
    prompt = StepWork(_INPUT, 0, 0, 1, _INPUT * (_INPUT + 1) // 2, 1)
    first = statistics.median(o.ttft for o in alone) - profile.seconds(prompt)
    way = max(0.0, (first - step - profile.offline.request) / 2)
    return Overhead(request=profile.offline.request, step=step, answer=way, arrival=way)


def _decodes(count: int) -> StepWork:
    """A step in the middle of the answers."""
    return StepWork(count, count, count * (_INPUT + _OUTPUT // 2), 0, 0, count)


def _send(client: Client, options: EngineConfig, name: str, count: int, clients: int) -> list[RequestOutcome]:
    items = [
        WorkItem(at=0.0, input_len=_INPUT, output_len=_OUTPUT, stream=f"calibrate/{name}/{i}") for i in range(count)
    ]
    to_send = requests(items, functools.partial(token_ids, id_range=token_id_range(options)))
    outcomes, _ = asyncio.run(
        serve_load.measure(client, to_send, clients=clients, warmup=to_send[:1], ended=lambda: None)
    )
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    if failed:
        raise ConfigError(f"{len(failed)} of {count} requests to the server failed: {failed[0]}")
    return outcomes
