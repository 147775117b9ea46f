"""How long the garbage collector stops the processes of a server under streaming load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running_server import Running

#: Writes each collection of a process to a file of its own: generation and seconds of processor time.
RECORDER = """
import gc, os, time
_started = [0.0]
def _record(phase, info):
    if phase == "start":
        _started[0] = time.thread_time()
    else:
        with open(f"{os.environ['COLLECTIONS']}/{os.getpid()}", "a") as file:
            file.write(f"[{info['generation']}, {time.thread_time() - _started[0]}]\\n")
gc.callbacks.append(_record)
"""


async def load(url: str, clients: int, seconds: float) -> int:
    """Streams of as many clients, one after the other, short and long prompts in turn; the number of requests."""
    loop = asyncio.get_running_loop()
    end, requests = loop.time() + seconds, 0

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        nonlocal requests
        while loop.time() < end:
            prompt = [number % 60 + 3] * (20, 150)[requests % 2]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 90, "stream": True, "ignore_eos": True}
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                assert response.status_code == 200
                async for _ in response.aiter_bytes():
                    pass
            requests += 1

    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        await asyncio.gather(*(ask(client, i) for i in range(clients)))
    return requests


@pytest.mark.slow
def test_pauses_under_streaming_load(serve: Callable[..., Running], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(RECORDER)
    collections = tmp_path / "collections"
    collections.mkdir()
    env = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).resolve().parents[2]}", "COLLECTIONS": str(collections)}
    flags = ("--served-model-name", "tiny", "--num-gpu-blocks-override", "20000", "--max-num-seqs", "256")
    server = serve(*flags, env=env)
    pids = {"server": server.process.pid, "engine core": server.core_pid()}
    before = {name: len(_read(collections / str(pid))) for name, pid in pids.items()}
    requests = asyncio.run(load(server.url, clients=200, seconds=60))
    for name, pid in pids.items():
        found = _read(collections / str(pid))[before[name] :]
        longest = [max((s for g, s in found if g == generation), default=0.0) * 1e3 for generation in range(3)]
        counts = [sum(g == generation for g, _ in found) for generation in range(3)]
        total = sum(s for _, s in found)
        print(
            f"\n{name}: {requests} requests, collections {counts}, longest ms {[round(s, 2) for s in longest]}, "
            f"all {total:.3f} s"
        )
        assert max(longest) < 50


def _read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
