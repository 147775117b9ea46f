"""Whether a server leaves nothing behind: of its engine cores while it goes on, and of itself when it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from octavo.lab.bench.chaos_processes import (
    marked_processes,
    open_descriptors,
    server_processes,
    shared_memory,
    unused_shared_memory,
)
from octavo.lab.bench.own_server import OwnServer

#: Seconds in which an idle server must be as before, and in which its processes must have ended after it.
_SETTLE_SECONDS, _END_SECONDS = 120.0, 15.0
#: Seconds that a server may take to end after SIGTERM.
_STOP_SECONDS = 60.0
#: Processes of which a server may have more than before: they are started when they are needed, and stay.
_ON_DEMAND = ("sandbox",)


@dataclass(frozen=True)
class Holdings:
    """What an idle server holds."""

    #: Processes by what they are.
    processes: Counter[str]
    #: Open descriptors of the front end by what they are.
    descriptors: Counter[str]
    #: Names of files and folders in its temporary folder.
    files: frozenset[str]

    @classmethod
    def of(cls, server: OwnServer, temp: Path) -> Holdings:
        """What it holds now; ``temp`` is its temporary folder."""
        pid = server.process.pid
        processes = Counter(role for role, _ in server_processes(pid))
        return cls(processes, open_descriptors(pid), frozenset(path.name for path in temp.iterdir()))

    def beyond(self, before: Holdings) -> list[str]:
        """What is not as before, in words."""
        lines = []
        for role in sorted(self.processes | before.processes):
            now, then = self.processes[role], before.processes[role]
            if now != then and role not in _ON_DEMAND:
                lines.append(f"processes ({role}): {now}, before {then}")
        # Each sandbox has a pipe for each direction.
        pipes = 2 * max(0, self.processes["sandbox"] - before.processes["sandbox"])
        for kind in sorted(self.descriptors):
            now, then = self.descriptors[kind], before.descriptors[kind]
            if now > then + (pipes if kind == "pipe" else 0):
                lines.append(f"descriptors of the front end ({kind}): {now}, before {then}")
        # Each core has a folder for its sockets, with a name of its own.
        if len(self.files) > len(before.files):
            names = ", ".join(sorted(self.files - before.files))
            lines.append(f"files in the temporary folder: {len(self.files)}, before {len(before.files)}; new: {names}")
        return lines


async def until_settled(server: OwnServer, temp: Path, before: Holdings) -> list[str]:
    """Waits until the idle server is ready and as before; what still is not, in words."""
    end = time.monotonic() + _SETTLE_SECONDS
    while True:
        if server.process.poll() is not None:
            return [f"the server has ended with code {server.process.returncode}"]
        left = Holdings.of(server, temp).beyond(before)
        if not await asyncio.to_thread(_is_healthy, server.url):
            left.insert(0, "/health does not answer 200")
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(0.2)


def _is_healthy(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=10) as response:
        return bool(response.status == 200)
    return False


def after_its_end(server: OwnServer, temp: Path, mark: str, shm_before: set[str]) -> list[str]:
    """Ends the server; what is left of it, in words. Processes that are left are killed."""
    server.process.terminate()
    try:
        code = server.process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        return [f"the server has not ended within {_STOP_SECONDS:g} s of SIGTERM"]
    left = [] if code == 0 else [f"the server's exit code is {code}"]
    end = time.monotonic() + _END_SECONDS
    while (processes := marked_processes(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            left.append(f"process {process.pid} is left: {' '.join(process.cmdline())}")
            process.kill()
    left += [f"file {path.name} is left in the temporary folder" for path in sorted(temp.iterdir())]
    new = shared_memory() - shm_before
    left += [f"/dev/shm/{name} is left" for name in sorted(unused_shared_memory(new))]
    return left
