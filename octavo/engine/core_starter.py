"""Starts engine cores: those of the replicas, those that take the place of one that has died, and those in reserve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from octavo.core.errors import ConfigError, EngineDeadError, OctavoError
from octavo.core.messages import Ready, Start
from octavo.engine.core_client import CoreClient
from octavo.engine.core_start import CoreProcess
from octavo.loader.checkpoint_digest import checkpoint_digest, description_digest
from octavo.loader.resolve import gguf_folder

#: Seconds within which the starts of a replica are counted: more than ``engine_restarts`` of them are not tried.
RESTART_WINDOW = 600.0
#: A start that takes so many times as long as the first one is given up; at least so many seconds.
_PATIENCE, _LEAST_PATIENCE = 10.0, 60.0
#: Seconds after a core from the reserve has taken over in which no other is started: to load a model would take
#: processors from the first steps of those who have waited.
REFILL_DELAY = 3.0

logger = logging.getLogger("octavo")


@dataclass(frozen=True)
class StartedCore:
    """A core whose model is loaded."""

    client: CoreClient
    ready: Ready
    #: When it was begun, on the clock of ``time.monotonic``.
    began: float = 0.0


class RestartLimit:
    """Counts the starts of one replica."""

    def __init__(self, most: int) -> None:
        """``most``: starts within ``RESTART_WINDOW`` seconds."""
        self._most = most
        self._times: deque[float] = deque()
        #: Starts so far.
        self.count = 0

    def take(self) -> bool:
        """Counts one more start, if there may be one."""
        now = time.monotonic()
        while self._times and now - self._times[0] > RESTART_WINDOW:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        self.count += 1
        return True

    def forgive(self, count: int) -> None:
        """The last ``count`` starts do not count any more: one request was to blame, which has ended."""
        for _ in range(min(count, len(self._times))):
            self._times.pop()

    @property
    def num_recent(self) -> int:
        """Starts that count now."""
        return len(self._times)


class CoreStarter:
    """Owns how a core is started, and the cores in reserve. For one event loop."""

    def __init__(self, num_standby: int, limit: RestartLimit) -> None:
        """``num_standby``: cores that are kept loaded in reserve, from ``fill_reserve`` on.

        ``limit``: of the starts after one of them has died there.
        """
        self._num_standby, self._limit = num_standby, limit
        self._start: Start | None = None
        self._first_start = time.monotonic()
        #: What the first cores took to load.
        self.start_seconds = 0.0
        self._reserve: list[StartedCore] = []
        self._filling: asyncio.Task[None] | None = None
        self._starting: set[CoreClient] = set()
        #: Ends of cores that have died in reserve, whose sockets are still open.
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False
        #: Of the files that the front end has read, see ``description_digest``.
        self.description = ""

    def begin(self, clients: list[CoreClient], options: dict[str, Any], log_level: int, folder: Path) -> None:
        """Tells the first cores to load the model, as all later ones will be told."""
        self._start = Start(options, str(folder), log_level)
        for number, client in enumerate(clients):
            client.send(self._message(number))

    def _message(self, number: int) -> Start:
        assert self._start is not None, "begin comes first"
        return Start(self._start.options, self._start.folder, self._start.log_level, number)

    def all_ready(self) -> None:
        """The first cores have loaded: so long does it take."""
        self.start_seconds = time.monotonic() - self._first_start

    async def start(self, number: int, after: CoreClient | None = None) -> StartedCore:
        """Starts a core in the place of replica ``number``, whose memory is free when ``after`` has ended.

        Raises:
            OctavoError: it could not load the model.
            ConfigError: the model's configuration or tokenizer was changed.
            EngineDeadError: it has ended meanwhile, or takes far longer than the first one did.
        """
        await self.check_files()
        began = time.monotonic()
        patience = max(_LEAST_PATIENCE, _PATIENCE * self.start_seconds)
        client = CoreClient(CoreProcess())  # it imports its modules meanwhile
        self._starting.add(client)
        try:
            if after is not None:
                await after.kill()
            client.send(self._message(number))
            async with asyncio.timeout(patience):
                return StartedCore(client, await client.ready, began)
        except TimeoutError:
            await client.kill()
            raise EngineDeadError(f"the engine's process was not ready after {patience:.0f} s") from None
        except BaseException:
            await client.kill()
            raise
        finally:
            self._starting.discard(client)

    async def check_files(self) -> None:
        """A core that is started now would have the configuration and the tokens that the front end knows.

        Raises:
            ConfigError: the files were changed.
        """
        if await asyncio.to_thread(lambda: description_digest(self._folder())) != self.description:
            raise ConfigError(
                "the model's configuration or tokenizer was changed since it was loaded: the whole engine must be "
                "started again"
            )

    async def digest_now(self) -> str:
        """The digest of the model that a core has which is started now."""
        assert self._start is not None
        return await asyncio.to_thread(checkpoint_digest, self._start.options["model"], self._folder())

    def _folder(self) -> Path:
        """Where the model's configuration and tokenizer are now; those of a GGUF file that was changed are read."""
        assert self._start is not None, "begin comes first"
        model = Path(os.path.expanduser(self._start.options["model"]))
        return gguf_folder(model) if os.path.isfile(model) else Path(self._start.folder)

    async def renew_reserve(self, since: float) -> None:
        """Ends the cores in reserve that were begun before ``since``, and waits for others in their place.

        Raises:
            EngineDeadError: they are not ready.
        """
        if not self._num_standby:
            return
        if self._filling is not None:
            await asyncio.wait([self._filling])
        old = [core for core in self._reserve if core.began < since]
        self._reserve = [core for core in self._reserve if core.began >= since]
        await asyncio.gather(*(core.client.kill() for core in old))
        self.fill_reserve()
        if self._filling is not None:
            await asyncio.wait([self._filling])
        if len(self._reserve) < self._num_standby:
            raise EngineDeadError("no engine's process could be started in reserve; the log says why")

    def fill_reserve(self, after: float = 0.0) -> None:
        """Starts cores in reserve, in so many seconds, until there are as many as there shall be."""
        if self._filling is None and len(self._reserve) < self._num_standby and not self._closed:
            self._filling = asyncio.create_task(self._fill(after))

    async def _fill(self, after: float) -> None:
        try:
            await asyncio.sleep(after)
            while len(self._reserve) < self._num_standby:
                number = len(self._reserve)
                core = await self.start(number)
                core.client.on_death = partial(self._lose, core)
                self._reserve.append(core)
                logger.info("an engine's process is ready in reserve")
        except OctavoError as e:
            logger.error("no engine's process is in reserve: %s", e)
        finally:
            self._filling = None

    def _lose(self, core: StartedCore, error: OctavoError) -> None:
        self._reserve.remove(core)
        logger.error("an engine's process in reserve has ended: %s", error)
        ending = asyncio.create_task(core.client.kill())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        if self._limit.take():
            self.fill_reserve()

    def take_reserve(self) -> StartedCore | None:
        """A core in reserve, if there is one."""
        return next((self._reserve.pop(i) for i, core in enumerate(self._reserve) if core.client.error is None), None)

    @property
    def num_reserve(self) -> int:
        """Cores in reserve that live."""
        return len(self._reserve)

    async def close(self) -> None:
        """Ends the cores that no replica has."""
        self._closed = True
        if self._filling is not None:
            self._filling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._filling
        await asyncio.gather(*self._ending, *(client.kill() for client in [*self._starting, *self._clients()]))

    def end(self) -> None:
        """Ends them at once, without waiting for their end."""
        self._closed = True
        for client in [*self._starting, *self._clients()]:
            client.end()

    def _clients(self) -> list[CoreClient]:
        return [core.client for core in self._reserve]
