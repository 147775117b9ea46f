"""The engine cores behind one front end: each request goes to one of them, and goes on at another when that is lost."""

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
from octavo.core.errors import EngineDeadError, EngineKilledError, InvalidRequestError, OctavoError
from octavo.core.messages import Add, Ready, StepDone, ToCore
from octavo.engine.blame import GUILTY, Blame
from octavo.engine.core_client import CoreClient
from octavo.engine.core_start import CoreProcess
from octavo.engine.core_starter import REFILL_DELAY, RESTART_WINDOW, CoreStarter, RestartLimit, StartedCore
from octavo.engine.output_processor import RequestState
from octavo.engine.replica import OpenRequest, Replica, ReplicaState
from octavo.engine.router import router_of
from octavo.engine.watchdog import watch

#: Output tokens that a request without a limit is expected to take.
_EXPECTED_TOKENS = 256

#: Why requests end that cannot go on. The first are those that were for one core only.
CORE_ENDED = "the engine's process has ended"
_MODEL_CHANGED = (
    "the model's files were changed while the answer was being generated, and no engine has those that it began with"
)

logger = logging.getLogger("octavo")
T = TypeVar("T")


class Replicas:
    """Owns the cores, and which of them each open request was given to. For one event loop.

    A core that dies is started again, within limits; meanwhile its requests go on at others, or wait for one. A request
    ends by a fault only if it is to blame for it, if its model was changed, or if no core is left and none is started
    again: then ``on_death`` is called, once.
    """

    def __init__(self, processes: list[CoreProcess], config: EngineConfig) -> None:
        """Connects to the processes, which have no model yet."""
        self.router = router_of(config)
        self.starter = CoreStarter(config.standby_engines, RestartLimit(config.engine_restarts))
        self.all = [
            Replica(number, CoreClient(process), RestartLimit(config.engine_restarts))
            for number, process in enumerate(processes)
        ]
        self._open: dict[int, OpenRequest] = {}
        #: Of them, those that wait for a core.
        self._waiting: dict[int, OpenRequest] = {}
        self._blame = Blame()
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
        #: Called with a request that has failed, and why.
        self.on_failed: Callable[[RequestState, str], None] = lambda request, reason: None
        self.on_death: Callable[[OctavoError], None] = lambda error: None
        #: Requests that went from one core to another, or to the same replica's next one.
        self.num_resumed = 0

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

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: RequestState, number: int | None = None) -> None:
        """Gives a request to the core of replica ``number``, or to the one that the router chooses.

        Raises:
            InvalidRequestError: as ``CoreClient.send``.
        """
        group = request.group
        limit = group.task.max_tokens
        work = len(group.prompt_token_ids) + (_EXPECTED_TOKENS if limit is None else limit)
        entry = self._open[request.group_id] = OpenRequest(request, work, is_fixed=number is not None)
        try:
            self._place(entry, number)
        except InvalidRequestError:
            self.forget(request.group_id)
            raise

    def _place(self, entry: OpenRequest, number: int | None = None) -> None:
        """Sends a request to a core, or has it wait for one, or fail if there will be none that can go on with it."""
        usable = [replica.number for replica in self.all if self._may_take(replica, entry)]
        if number is None and not usable:
            later = any(replica.status == "starting" or replica.is_restarting for replica in self.all)
            if not later and entry.digest is not None and any(replica.lives for replica in self.all):
                self._fail(entry, _MODEL_CHANGED)
            else:
                self._waiting[entry.group_id] = entry
            return
        self._waiting.pop(entry.group_id, None)
        group = entry.request.group
        chosen = self.router.choose(
            group.prompt_token_ids, entry.work, group.cache_context, usable if number is None else [number]
        )
        entry.replica = replica = self.all[chosen]
        replica.open[entry.group_id] = entry
        self.num_resumed += entry.was_sent
        entry.was_sent = True
        replica.client.send(Add(entry.request.resume(self._blame.alone(entry.request))))

    def _may_take(self, replica: Replica, entry: OpenRequest) -> bool:
        return replica.status == "ready" and entry.digest in (None, replica.digest)

    def _fail(self, entry: OpenRequest, reason: str) -> None:
        self.forget(entry.group_id)
        self.on_failed(entry.request, reason)

    def send(self, group_id: int, message: ToCore) -> None:
        """Sends a message about a request to the core that has it; nothing happens if none has."""
        entry = self._open.get(group_id)
        if entry is not None and entry.replica is not None:
            entry.replica.client.send(message)

    def forget(self, group_id: int) -> None:
        """The request has ended."""
        entry = self._open.pop(group_id, None)
        if entry is not None:
            self._take_back(entry)
            self._waiting.pop(group_id, None)
            self._blame.forget(group_id)

    def _take_back(self, entry: OpenRequest) -> None:
        """The core that had a request has it no longer."""
        if entry.replica is not None:
            entry.replica.open.pop(entry.group_id, None)
            self.router.release(entry.replica.number, entry.work)
            entry.replica = None

    async def move(self, number: int, next_digest: str | None = None) -> int:
        """Gives the requests of a replica, which takes no more, to others that can go on with them: how many.

        ``next_digest``: of the model that the next core of this replica will have, for which requests can wait. Those
        that can go on nowhere else stay.

        Raises:
            EngineDeadError: its core has died meanwhile; its requests are where they shall be.
        """
        replica = self.all[number]
        others = [r for r in self.all if r is not replica]
        movable = [
            i
            for i, entry in replica.open.items()
            if not entry.is_fixed
            and (
                any(self._may_take(r, entry) for r in others)
                or (next_digest is not None and entry.digest in (None, next_digest))
            )
        ]
        if not movable:
            return 0
        await replica.client.hand_over(movable)
        return self._send_on([entry for i in movable if (entry := replica.open.get(i)) is not None])

    def _send_on(self, entries: list[OpenRequest]) -> int:
        """Requests that no core has any more go to other cores, in order of their arrival: how many."""
        entries.sort(key=lambda entry: entry.group_id)
        for entry in entries:
            self._take_back(entry)
        for entry in entries:
            if entry.is_fixed:
                self._fail(entry, CORE_ENDED)
            else:
                self._place(entry)
        return len(entries)

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
        for admission in step.outputs.admissions:
            entry = self._open.get(admission.group_id)
            if entry is not None:
                entry.digest = replica.digest
        if step.stats.replica != replica.number:  # it was in reserve
            step.stats = msgspec.structs.replace(step.stats, replica=replica.number)
        await self.on_step(step)

    def _lose(self, replica: Replica, client: CoreClient, error: OctavoError) -> None:
        """A core has died: its requests go to others, or wait for the one that is started in its place."""
        dead = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        lost = list(replica.open.values())
        guilty = None
        if not isinstance(error, EngineKilledError):
            guilty = self._blame.observe_death(client.read_recorder(), [entry.request for entry in lost])
        for entry in lost:
            self._take_back(entry)
        self.router.restart(replica.number)
        if guilty is not None:
            lost = [entry for entry in lost if entry.group_id != guilty]
            self._fail(self._open[guilty], GUILTY.format(dead))
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
        self._send_on(lost)
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
            self._send_on(list(self._waiting.values()))

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
        self.router.restart(replica.number)
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
        self._send_on(list(self._waiting.values()))

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
