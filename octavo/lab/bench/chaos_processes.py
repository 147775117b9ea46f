"""The processes of a server, by what they do, and what is left of them when it has ended."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

#: What a process of a server is, by the module that it runs.
_ROLES = {
    "octavo.engine.core_process": "core",
    "octavo.executor.worker_loop": "worker",
    "octavo.process.sandbox_process": "sandbox",
    "multiprocessing.resource_tracker": "tracker",
}
#: As Ray names the process of an actor of ``RayExecutor``.
_RAY_WORKER = "ray::RayWorker"
#: The variable that marks all processes of a run, also those whose parent has ended.
MARK = "CHAOS_RUN"
_SHARED_MEMORY = Path("/dev/shm")


def role_of(process: psutil.Process) -> str:
    """What a process is: core, worker, sandbox, tracker or other; gone if it has ended."""
    try:
        command = process.cmdline()
        ended = process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return "gone"
    if ended:
        return "gone"
    words = " ".join(command)
    return next((role for module, role in _ROLES.items() if module in words), "other")


def server_processes(pid: int) -> Iterator[tuple[str, psutil.Process]]:
    """(role, process) of all that the server with this front end has started and that lives, without the front end.

    Its workers on a Ray cluster of this machine, which is that of RAY_ADDRESS, are among them.
    """
    try:
        family = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    for process in family:
        if (role := role_of(process)) != "gone":
            yield role, process
    if address := os.environ.get("RAY_ADDRESS"):
        for process in _ray_workers(address):
            yield "worker", process


def _ray_workers(address: str) -> Iterator[psutil.Process]:
    """Actors of the cluster with this address; of other clusters on the machine none."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (process.cmdline() or [""])[0].startswith(_RAY_WORKER):
                parent = process.parent()
                if parent is not None and f"--gcs-address={address}" in parent.cmdline():
                    yield process


def marked_processes(mark: str) -> list[psutil.Process]:
    """All living processes that have inherited this value of the variable ``MARK``, whoever their parent is."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                processes.append(process)
    return processes


def open_descriptors(pid: int) -> Counter[str]:
    """How many descriptors a process has open, by what they are: socket, pipe, anon_inode:[eventpoll], a path."""
    counts: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            counts[re.sub(r"^(socket|pipe):\[\d+\]$", r"\1", os.readlink(link))] += 1
    return counts


def shared_memory() -> set[str]:
    """The names in /dev/shm."""
    with contextlib.suppress(OSError):
        return {path.name for path in _SHARED_MEMORY.iterdir()}
    return set()


def unused_shared_memory(names: set[str]) -> set[str]:
    """Those of these names in /dev/shm that exist and that no process has mapped or open."""
    unused = names & shared_memory()
    for process in psutil.process_iter() if unused else ():
        with contextlib.suppress(psutil.Error, OSError):
            used = {mapped.path for mapped in process.memory_maps()} | {file.path for file in process.open_files()}
            unused -= {Path(path).name for path in used if path.startswith(f"{_SHARED_MEMORY}/")}
    return unused
