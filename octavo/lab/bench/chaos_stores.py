"""KV stores of a chaos run: a folder and a Redis server, and what damages, fills, kills and freezes them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.core.errors import ConfigError

#: damage: values on the disk are changed, cut off, lengthened, exchanged or removed. fill: a full disk for some time,
#: or no folder where no disk of its own can be mounted. store-kill: SIGKILL of the Redis server, then an empty one
#: after some time. store-pause: SIGSTOP, and SIGCONT later.
FAULTS = {"damage": "disk", "fill": "disk", "store-kill": "shared", "store-pause": "shared"}
#: Stores that a run can have.
STORES = ("disk", "shared")
#: Bytes of each, so that both evict.
STORE_BYTES = 64 << 20
#: Most values that are damaged at once; and seconds up to which a store stays away.
_MOST_DAMAGED, _LONGEST_AWAY = 64, 5.0
_SERVERS = ("redis-server", "valkey-server")
_PASSWORD = "chaos"
_START_SECONDS = 10.0


class ChaosStores:
    """Owns the stores of a run: the options of the server, and the faults."""

    def __init__(self, folder: Path, stores: Sequence[str]) -> None:
        """``folder``: an empty one, for all that belongs to the stores.

        Raises:
            ConfigError: there is no such store, or no program to serve it.
        """
        if unknown := set(stores) - set(STORES):
            raise ConfigError(f"there is no store {sorted(unknown)[0]!r}; there are {', '.join(STORES)}")
        self._folder, self._stores = folder, stores
        self._disk = folder / "disk"
        self._mounted = False
        self._server: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._program = next((path for name in _SERVERS if (path := shutil.which(name))), None)
        if "shared" in stores and self._program is None:
            raise ConfigError(f"a shared store needs one of these programs: {', '.join(_SERVERS)}")

    @contextmanager
    def running(self) -> Iterator[dict[str, Any]]:
        """The options of an engine with these stores, for the time of a block."""
        options: dict[str, Any] = {}
        try:
            if "disk" in self._stores:
                self._disk.mkdir()
                self._mounted = self._mount()
                options |= {"kv_disk": str(self._disk / "store"), "kv_disk_bytes": STORE_BYTES}
            if "shared" in self._stores:
                with socket.socket() as free:
                    free.bind(("127.0.0.1", 0))
                    self._port = free.getsockname()[1]
                self._start()
                options["kv_store"] = f"redis://:{_PASSWORD}@127.0.0.1:{self._port}/0"
            yield options
        finally:
            self._kill()
            if self._mounted:
                subprocess.run(["umount", "--lazy", str(self._disk)], check=False, capture_output=True)

    async def hit(self, kind: str, draw: random.Random) -> None:
        """One fault; waits for its end."""
        away = draw.uniform(0.1, _LONGEST_AWAY)
        if kind == "damage":
            for path in self._values(draw):
                with contextlib.suppress(OSError):
                    _damage(path, draw)
        elif kind == "fill":
            await self._fill(away)
        elif kind == "store-kill":
            self._kill()
            await asyncio.sleep(away)
            self._start()
        elif self._server is not None:
            self._server.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(away)
            finally:
                self._server.send_signal(signal.SIGCONT)

    # --- the disk -----------------------------------------------------------------------------------------------------

    def _mount(self) -> bool:
        """Mounts a small file system, which can be filled; only root may."""
        size = f"size={2 * STORE_BYTES}"
        command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self._disk)]
        try:
            return subprocess.run(command, check=False, capture_output=True).returncode == 0
        except OSError:
            return False

    def _values(self, draw: random.Random) -> list[Path]:
        files = sorted(path for path in (self._disk / "store").glob("??/*") if path.is_file())
        return draw.sample(files, min(len(files), draw.randint(1, _MOST_DAMAGED)))

    async def _fill(self, seconds: float) -> None:
        """Leaves no room on the disk for some seconds; if it is not one of its own, there is no folder meanwhile."""
        if not self._mounted:
            store, away = self._disk / "store", self._disk / "away"
            with contextlib.suppress(OSError):
                store.rename(away)
                try:
                    await asyncio.sleep(seconds)
                finally:
                    shutil.rmtree(store, ignore_errors=True)
                    away.rename(store)
            return
        filler = self._disk / "filler"
        try:
            with contextlib.suppress(OSError), filler.open("wb") as stream:
                while True:
                    stream.write(bytes(1 << 16))
            await asyncio.sleep(seconds)
        finally:
            filler.unlink(missing_ok=True)

    # --- the server ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        assert self._program is not None
        settings = {
            "port": self._port, "bind": "127.0.0.1", "requirepass": _PASSWORD, "save": "", "appendonly": "no",
            "maxmemory": STORE_BYTES, "maxmemory-policy": "allkeys-lru", "dir": self._folder,
        }  # fmt: skip
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        self._server = subprocess.Popen([self._program, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
                return
            time.sleep(0.02)
        raise ConfigError(f"{self._program} does not start")

    def _kill(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None


def _damage(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    how = draw.randrange(5)
    if how == 0 and content:
        for _ in range(draw.randint(1, 8)):
            content[draw.randrange(len(content))] ^= draw.randint(1, 255)
    elif how == 1:
        del content[draw.randrange(len(content) + 1) :]
    elif how == 2:
        content += draw.randbytes(draw.randint(1, 64))
    elif how == 3:
        others = sorted(path.parent.iterdir())
        content = bytearray(draw.choice(others).read_bytes())
    else:
        path.unlink()
        return
    path.write_bytes(content)


def store_counts(url: str) -> dict[str, dict[str, int]]:
    """By tier and event: how many blocks, as a server's /metrics has them; empty without KV stores."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        text = response.read().decode()
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name == "octavo_kv_store_blocks" else ():
            if sample.name.endswith("_total"):
                counts[sample.labels["tier"]][sample.labels["event"]] += int(sample.value)
    return {tier: dict(events) for tier, events in counts.items()}
