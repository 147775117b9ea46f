"""Real servers in processes of their own, on free ports of this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from openai import DefaultHttpxClient, OpenAI

from octavo.process.fork_server import FORKS
from tests.busy_machine import PATIENCE, eventually

#: Small, so that runs of several servers at once do not fight for the machine.
TINY = ("--num-gpu-blocks-override", "400", "--num-threads", "1", "--max-num-seqs", "64", "--status-interval", "0")


@functools.cache
def certificates() -> ssl.SSLContext:
    """What clients would judge a server's certificate by, read once: that takes longer than most requests of tests."""
    return ssl.create_default_context()


class OpenAIConnections(DefaultHttpxClient):
    """Connections of a client of the openai package, which end with it."""

    def __del__(self) -> None:
        self.close()


@dataclass
class Running:
    """A running server, with helpers for tests."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    model: str

    def client(self, **options: Any) -> OpenAI:
        connections = OpenAIConnections(verify=certificates())
        usual = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": PATIENCE}
        return OpenAI(**{**usual, "http_client": connections, **options})

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(**{"base_url": self.url, "timeout": PATIENCE, "verify": certificates(), **options})

    def post(self, path: str, **body: Any) -> Any:
        """The JSON of the response, whose status must be 200."""
        with self.http() as http:
            response = http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, **fields: Any) -> dict[str, Any]:
        """The first choice of ``/v1/completions``."""
        choice: dict[str, Any] = self.post("/v1/completions", **fields)["choices"][0]
        return choice

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric now."""
        with self.http() as http:
            page = http.get("/metrics").text
        for line in page.splitlines():
            if re.match(rf"{name}[{{ ]", line) and all(f'{key}="{value}"' in line for key, value in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name} {labels} in\n{page}")

    def wait_until_running(self) -> None:
        """Waits until a request runs."""
        eventually(lambda: self.metric("octavo_requests", state="running") > 0)

    def wait_until_idle(self) -> None:
        """Waits until no request runs and no block is in use."""

        def held() -> tuple[float, float]:
            blocks = self.metric("octavo_kv_cache_blocks", state="used")
            return blocks, self.metric("octavo_requests", state="running")

        eventually(
            lambda: held() == (0, 0),
            lambda: f"blocks in use, and requests that run: {held()}\n{self.log.read_text()}",
        )

    def wait_for_log(self, words: str) -> str:
        """Waits for words in the log, which a thread of its own writes; all that is logged."""
        eventually(lambda: words in self.log.read_text(), lambda: f"no {words!r} in\n{self.log.read_text()}")
        return self.log.read_text()

    def core_pid(self) -> int:
        """The process of the engine; of several, the oldest one."""
        return self.core_pids()[0]

    def core_pids(self) -> list[int]:
        """The processes of the engines, oldest first; those of a server with many models may be forked."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = [child for child in children if "octavo.engine.core_process" in words_of(child)]
        forks = self.fork_server_pid()
        return [child.pid for child in sorted(found, key=lambda child: child.create_time()) if child.pid != forks]

    def fork_server_pid(self) -> int | None:
        """The process from which engines are forked, if there is one."""
        children = psutil.Process(self.process.pid).children()
        return next((child.pid for child in children if FORKS in words_of(child)), None)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


#: Starts servers: the type of the fixtures ``serve``, ``start_server`` and ``start_module_server``.
Serve = Callable[..., Running]


def start(model: Path | str | tuple[str, ...], log: Path, *flags: str, env: dict[str, str] | None = None) -> Running:
    """Starts a server and waits until it answers; ``model``: a name, or all words that say what it serves."""
    words = model if isinstance(model, tuple) else (str(model),)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("OCTAVO_") or key == "OCTAVO_CACHE"}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo", "serve", *words, "--port", "0", *flags],
            stdout=stream,
            stderr=stream,
            env={**clean, **(env or {})},
        )
    end = time.monotonic() + PATIENCE
    while not (found := re.search(r'serving .* on (https?://[^\s"]+)', log.read_text(errors="replace"))):
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise AssertionError(f"the server did not start: {log.read_text(errors='replace')}")
        time.sleep(0.05)
    return Running(process, found.group(1), log, words[-1])


@contextlib.contextmanager
def running(
    model: Path | str | tuple[str, ...], log: Path, *flags: str, env: dict[str, str] | None = None
) -> Iterator[Running]:
    """A server for the time of a block."""
    server = start(model, log, *flags, env=env)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def check_refusal(
    response: httpx.Response, status: int = 400, *words: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Checks a response in OpenAI's error format, which reveals nothing internal; returns the error."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert all(word in error["message"] for word in words), error
    assert param is None or error["param"] == param, error
    assert code is None or error["code"] == code, error
    assert "Traceback" not in response.text and ".py" not in response.text
    return error
