"""The place of the policy lab that is an ``octavo serve`` of its own for each run, under the client's open loop."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from octavo.bench import serve
from octavo.bench.policies.figures import Outcome
from octavo.bench.policies.places import Place
from octavo.bench.serve_client import Client
from octavo.bench.serve_client import Outcome as Answer
from octavo.bench.serve_workload import requests, with_targets
from octavo.core.config import EngineConfig
from octavo.core.config_sources import OPTIONS, PREFIX
from octavo.core.errors import ConfigError
from octavo.loader.resolve import resolve_model
from octavo.models.config import read_model_config
from octavo.simulate.figures import Completions
from octavo.workloads.items import WorkItem
from octavo.workloads.tokens import ID_RANGE, token_ids

#: Seconds that a server may take to start, and to end.
_START, _END = 900.0, 30.0
#: Seconds that a request may take.
_TIMEOUT = 36_000.0
#: So that no request is turned away: how many may wait is the scenario's business.
_MOST_WAITING = 1 << 30


class OwnServer(Place):
    """A server on the loopback interface, a new one for each run, which has learned and cached nothing.

    Latencies count from the moment at which the client was to send a request.
    """

    name = "server"

    def __init__(self, about: str) -> None:
        self.about = about

    def run(self, options: EngineConfig, items: Sequence[WorkItem], limit: int | None) -> Outcome:
        """See ``Place``."""
        if limit is not None:
            raise ConfigError(
                "requests to a server state the length at which they end: scenarios that hide it need the place "
                "process or simulated"
            )
        to_send = [with_targets(r) for r in requests(items, functools.partial(token_ids, id_range=_ids(options)))]
        warmup = requests([WorkItem(at=0.0, input_len=16, output_len=8, stream="warm-up")], _prompt_of(options))
        with _running(options) as url:
            client = Client(url, "completions", {"model": options.model}, None, _TIMEOUT)
            answers, _ = asyncio.run(serve.measure(client, to_send, clients=None, warmup=warmup, ended=lambda: None))
            preemptions = _preemptions(url)
        return Outcome(_completions(items, answers), preemptions)


def _prompt_of(options: EngineConfig) -> functools.partial[list[int]]:
    return functools.partial(token_ids, id_range=_ids(options))


@functools.lru_cache(maxsize=8)
def _vocab_size(model: str, revision: str | None) -> int:
    return read_model_config(resolve_model(model, revision=revision, weights=False)).vocab_size


def _ids(options: EngineConfig) -> tuple[int, int]:
    """Token ids of prompts: common ones, or all of a small vocabulary."""
    size = _vocab_size(options.model, options.revision)
    return ID_RANGE if ID_RANGE[1] < size else (0, size - 1)


def _completions(items: Sequence[WorkItem], answers: Sequence[Answer]) -> Completions:
    """On a clock on which requests are due at their ``at``."""
    done = Completions()
    for number, (item, answer) in enumerate(zip(items, answers, strict=True)):
        if answer.error is not None:
            done.failed[answer.error] += 1
            continue
        start = answer.due - item.at
        done.add(number, item.at, answer.chunks[0] - start, answer.ended - start, item.input_len, answer.output_tokens)
    return done


@contextmanager
def _running(options: EngineConfig) -> Iterator[str]:
    """The URL of a server with these options, for the time of a block."""
    given = options.model_dump(mode="json", exclude_unset=True)
    server = {"port": 0, "max_queued_requests": _MOST_WAITING, "max_queued_tokens": _MOST_WAITING}
    server |= {"request_timeout": _TIMEOUT}
    with tempfile.TemporaryDirectory(prefix="octavo-lab-") as name:
        folder = Path(name)
        config, log = folder / "options.yaml", folder / "log"
        config.write_text(json.dumps(given | server), encoding="utf-8")  # JSON is YAML
        # Variables win over the file, and what they say is in it already.
        options_of_file = {PREFIX + option.upper() for option in OPTIONS} | {"OCTAVO_CONFIG", "OCTAVO_API_KEYS"}
        environ = {key: value for key, value in os.environ.items() if key not in options_of_file}
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "octavo", "serve", "--config", str(config)],
                stdout=stream,
                stderr=stream,
                env=environ,
            )
        try:
            yield _url(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where the server listens, once it does.

    Raises:
        ConfigError: it ended, or takes too long.
    """
    end = time.monotonic() + _START
    while True:
        text = log.read_text(errors="replace")
        if found := re.search(r'serving .* on (http://[^\s"]+)', text):
            return found.group(1)
        if process.poll() is not None or time.monotonic() > end:
            raise ConfigError(f"the server did not start: {text[-2000:].strip()}")
        time.sleep(0.02)


def _preemptions(url: str) -> int:
    """Of all kinds, from the server's metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        page = response.read().decode()
    return round(sum(float(value) for value in re.findall(r"^octavo_preemptions_total\{.*\} (\S+)$", page, re.M)))
