"""The engine cores behind one front end: a core that is lost is replaced, and its requests go on at others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from octavo.core.config import EngineConfig
from octavo.core.engine_view import EngineView
from octavo.core.errors import EngineDeadError, EngineKilledError, OctavoError
from octavo.core.messages import Ready, StepDone, ToCore
from octavo.engine.core_client import CoreClient
from octavo.engine.core_start import CoreProcess
from octavo.engine.core_starter import REFILL_DELAY, RESTART_WINDOW, CoreStarter, RestartLimit, StartedCore
from octavo.engine.placement import Placement
from octavo.engine.replica import Replica, ReplicaState
from octavo.engine.router import router_of
from octavo.engine.watchdog import watch

logger = logging.getLogger("octavo")
T = TypeVar("T")


class Replicas:
    """Owns the cores. For one event loop.

    A core that dies is started again, within limits; meanwhile its requests go on at others, or wait for one. A request
    ends by a fault only if it is to blame for it, if its model was changed, or if no core is left and none is started
    again: then ``on_death`` is called, once.
    """

    def __init__(self, processes: list[CoreProcess], config: EngineConfig) -> None:
        """Connects to the processes, which have no model yet."""
        self.starter = CoreStarter(config.standby_engines, RestartLimit(config.engine_restarts))
        self.all = [
            Replica(number, CoreClient(process), RestartLimit(config.engine_restarts))
            for number, process in enumerate(processes)
        ]
        self.requests = Placement(self.all, router_of(config))
        self._watchdog: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        #: Set while a core takes requests, or none ever will.
        self._available = asyncio.Event()
        self._closing = False
        #: Why no core is left, and none will be.
        self._error: OctavoError | None = None
        #: No core does a step although it has requests.
        self.paused = False
        #: Called with each step of a core, and awaited before its next message is looked at.
        self.on_step: Callable[[StepDone], Awaitable[None]] = _ignore
        #: Makes the core of a replica like the others before it takes requests.
        self.on_start: Callable[[int], Awaitable[None]] = _ignore
        self.on_death: Callable[[OctavoError], None] = lambda error: None

    async def ready(self) -> Ready:
        """Waits until all have loaded; the longest sequence is that of the core with the smallest KV cache.

        Raises:
            OctavoError: one could not load.
        """
        ready = await asyncio.gather(*(replica.client.ready for replica in self.all))
        for replica, its in zip(self.all, ready, strict=True):
            if replica.client.error is not None:
                raise replica.client.error
            self._connect(replica, StartedCore(replica.client, its))
            replica.status = "ready"
        self._available.set()
        self.starter.all_ready()
        profiles = [profile for r in ready for profile in r.profiles]
        return msgspec.structs.replace(ready[0], max_model_len=min(r.max_model_len for r in ready), profiles=profiles)

    def begin(self, options: dict[str, Any], log_level: int, folder: Path) -> None:
        """Tells every core to load its model; ``ready`` waits for them."""
        self.starter.begin([replica.client for replica in self.all], options, log_level, folder)

    def _connect(self, replica: Replica, core: StartedCore) -> None:
        replica.client, replica.digest = core.client, core.ready.digest
        core.client.on_step = partial(self._receive, replica)
        core.client.on_death = partial(self._lose, replica, core.client)

    # --- messages ---------------------------------------------------------------------------------------------------

    def send_all(self, message: ToCore) -> None:
        """Sends a message to all cores."""
        for replica in self.all:
            replica.client.send(message)

    async def call(self, method: str, kind: type[T], *args: Any) -> list[T]:
        """The answers of all cores that live to ``CoreClient.call``, by number; if none does, of the next that will.

        Raises:
            EngineDeadError: none is left.
            OctavoError: the call has failed on one.
        """
        while True:
            await self._available.wait()
            clients = [replica.client for replica in self.all if replica.lives]
            if not clients:
                raise EngineDeadError(str(self._error))
            answers = await asyncio.gather(
                *(client.call(method, kind, *args) for client in clients), return_exceptions=True
            )
            # One that dies meanwhile is not asked again: it begins anew.
            results = [a for a in answers if not isinstance(a, EngineDeadError)]
            for answer in results:
                if isinstance(answer, BaseException):
                    raise answer
            if results:
                return results  # type: ignore[return-value]
            await asyncio.sleep(0)  # their ends are observed

    async def views(self, fresh: bool) -> list[EngineView]:
        """What each core that lives looks like now (``ViewRecorder.view``); one that dies meanwhile is left out.

        Raises:
            OctavoError: the call has failed on one.
        """
        replicas = [replica for replica in self.all if replica.lives]
        calls = (replica.client.call("view", EngineView, fresh) for replica in replicas)
        views = []
        for replica, answer in zip(replicas, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answer, EngineView):
                answer.replica = replica.number
                views.append(answer)
            elif not isinstance(answer, EngineDeadError):
                raise answer
        return views

    async def call_one(self, number: int, method: str, *args: Any) -> None:
        """A ``CoreClient.call`` of one core.

        Raises:
            OctavoError: the call has failed.
        """
        await self.all[number].client.call(method, type(None), *args)

    # --- the cores --------------------------------------------------------------------------------------------------

    def states(self) -> list[ReplicaState]:
        """The replicas as they are now."""
        return [replica.state() for replica in self.all]

    @property
    def living(self) -> list[int]:
        """The numbers of the replicas whose core can answer."""
        return [replica.number for replica in self.all if replica.lives]

    @property
    def is_available(self) -> bool:
        """Whether a core takes requests now."""
        return any(replica.status == "ready" for replica in self.all)

    async def _receive(self, replica: Replica, step: StepDone) -> None:
        replica.num_steps += 1
        self.requests.observe_admissions(replica, step.outputs.admissions)
        if step.stats.replica != replica.number:  # it was in reserve
            step.stats = msgspec.structs.replace(step.stats, replica=replica.number)
        await self.on_step(step)

    def _lose(self, replica: Replica, client: CoreClient, error: OctavoError) -> None:
        """A core has died: its requests go to others, or wait for the one that is started in its place."""
        dead = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        computed = None if isinstance(error, EngineKilledError) else client.read_recorder()
        lost = self.requests.take_all(replica, dead, computed)
        restarts = not self._closing and replica.restarts.take()
        replica.status = "starting" if restarts else "dead"
        if all(r.status == "dead" for r in self.all):
            self.run(client.kill())
            self._end(dead)
            return
        logger.error(
            "replica %d of %d has ended (%s); its %d open requests go on%s",
            replica.number, len(self.all), dead, len(lost),
            f", and it is started again, for the {replica.restarts.num_recent}. time in {RESTART_WINDOW / 60:g} minutes"
            if restarts else "",
        )  # fmt: skip
        self.run(self._replace(replica, client) if restarts else client.kill())
        self.requests.send_on(lost)
        if not self.is_available:
            self._available.clear()

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that the end of the engine cancels, and nothing else."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _replace(self, replica: Replica, old: CoreClient) -> None:
        """Starts a core in the place of one that has ended, or takes one in reserve."""
        core = self.starter.take_reserve()
        while core is None:
            try:
                core = await self.starter.start(replica.number, after=old)
            except OctavoError as e:
                logger.error("replica %d could not be started again: %s", replica.number, e)
                if not replica.restarts.take():
                    self._give_up(replica, e)
                    return
        await self.install(replica, core)
        await old.kill()

    def _give_up(self, replica: Replica, error: OctavoError) -> None:
        replica.status = "dead"
        if all(r.status == "dead" for r in self.all):
            self._end(error)
        else:
            self.requests.send_waiting()

    def _end(self, error: OctavoError) -> None:
        self._error = error
        self._available.set()
        self.on_death(error)

    async def replace(self, replica: Replica) -> None:
        """Ends the core of a replica and starts another in its place, within the limit of its restarts."""
        replica.status = "starting"
        if not self.is_available:
            self._available.clear()
        old = replica.client
        await old.close()
        self.requests.router.restart(replica.number)
        await self._replace(replica, old)

    async def install(self, replica: Replica, core: StartedCore) -> None:
        """Gives a replica a core that is ready: what waits goes on there, and it takes requests."""
        self._connect(replica, core)
        with contextlib.suppress(EngineDeadError):  # then ``_lose`` was called
            try:
                await self.on_start(replica.number)
            except EngineDeadError:
                raise
            except OctavoError as e:
                logger.error("replica %d is not quite as it was: %s", replica.number, e)
        if core.client.error is not None:
            return
        self.open_replica(replica)
        self.starter.fill_reserve(REFILL_DELAY)

    def open_replica(self, replica: Replica) -> None:
        """From now on a replica takes requests; those that wait are the first."""
        replica.status = "drained" if replica.drained else "ready"
        self._available.set()
        logger.info("replica %d of %d takes requests", replica.number, len(self.all))
        self.requests.send_waiting()

    def watch(self, step_timeout: float) -> None:
        """From now on ends a core that does no step for ``step_timeout`` seconds while it has requests."""
        self._watchdog = asyncio.create_task(watch(self.all, step_timeout, lambda: self.paused))
        self.starter.fill_reserve()

    async def close(self) -> None:
        """Ends all cores, if possible after their current steps."""
        await self._end_tasks()
        await asyncio.gather(self.starter.close(), *(replica.client.close() for replica in self.all))

    async def kill(self) -> None:
        """Ends all cores at once."""
        await self._end_tasks()
        await asyncio.gather(self.starter.close(), *(replica.client.kill() for replica in self.all))

    async def _end_tasks(self) -> None:
        self._closing = True
        tasks = [*self._tasks] + ([] if self._watchdog is None else [self._watchdog])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def end(self) -> None:
        """Ends all cores at once, without waiting for their end, where there is no event loop."""
        self._closing = True
        self.starter.end()
        for replica in self.all:
            replica.client.end()


async def _ignore(_: object) -> None:
    """The default of ``on_step`` and ``on_start``."""
