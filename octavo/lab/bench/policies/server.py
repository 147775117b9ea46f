"""The place of the policy lab that is an ``octavo serve`` of its own for each run, under the client's open loop."""

from __future__ import annotations

import asyncio
import functools
import re
import urllib.request
from collections.abc import Sequence

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.lab.bench import serve_load
from octavo.lab.bench.own_server import REQUEST_TIMEOUT, SERVED_NAME, running_server, token_id_range
from octavo.lab.bench.policies.places import WARM_UP, Place
from octavo.lab.bench.policies.policy_figures import PlaceOutcome
from octavo.lab.bench.serve_client import Client, RequestOutcome
from octavo.lab.bench.serve_workload import requests, with_targets
from octavo.lab.simulate.figures import Completions
from octavo.lab.workloads.tokens import token_ids
from octavo.lab.workloads.work_items import WorkItem


class OwnServer(Place):
    """A server on the loopback interface, a new one for each run, which has learned and cached nothing.

    Latencies count from the moment at which the client was to send a request.
    """

    name = "server"
    hides_lengths = False

    def __init__(self, about: str) -> None:
        self.about = about

    def run(self, options: EngineConfig, items: Sequence[WorkItem], limit: int | None) -> PlaceOutcome:
        """See ``Place``."""
        if limit is not None:
            raise ConfigError("requests to a server state the length at which they end")
        prompt = functools.partial(token_ids, id_range=token_id_range(options))
        to_send = [with_targets(request) for request in requests(items, prompt)]
        warmup = requests([WARM_UP], prompt)
        with running_server(options) as url:
            client = Client(url, "completions", {"model": SERVED_NAME}, None, REQUEST_TIMEOUT)
            answers, _ = asyncio.run(
                serve_load.measure(client, to_send, clients=None, warmup=warmup, ended=lambda: None)
            )
            preemptions = _preemptions(url)
        return PlaceOutcome(_completions(items, answers), preemptions)


def _completions(items: Sequence[WorkItem], answers: Sequence[RequestOutcome]) -> Completions:
    """On a clock on which requests are due at their ``at``."""
    done = Completions()
    for number, (item, answer) in enumerate(zip(items, answers, strict=True)):
        if answer.error is not None:
            done.fail(item, f"{answer.error}: {answer.error_text[:200]}".rstrip(": "))
            continue
        start = answer.due - item.at
        done.add(number, item, item.at, answer.chunks[0] - start, answer.ended - start, answer.output_tokens)
    return done


def _preemptions(url: str) -> int:
    """Of all kinds, from the server's metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        page = response.read().decode()
    return round(sum(float(value) for value in re.findall(r"^octavo_preemptions_total\{.*\} (\S+)$", page, re.M)))
