"""The engine cores behind one front end: a core that is lost is replaced, and its requests go on at others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import (
    ConfigError,
    EngineDeadError,
    EngineKilledError,
    EngineStateError,
    InvalidRequestError,
    OctavoError,
)
from octavo.core.request import AdmissionStats
from octavo.core.stats import EngineView
from octavo.engine.blame import GUILTY, Blame
from octavo.engine.core_client import (
    REFILL_DELAY,
    RESTART_WINDOW,
    CoreClient,
    CoreStarter,
    RestartLimit,
    StartedCore,
    watch,
)
from octavo.engine.core_start import CoreProcess
from octavo.engine.messages import Add, Ready, StepDone, ToCore
from octavo.engine.output_processor import RequestState
from octavo.memory.prefix_cache import PrefixChain
from octavo.process.children import ProcessorWaits

# One of the places behind a front end in which an engine core serves requests.

#: "drained": it lives, and gets no requests. "dead": it is not started again.
ReplicaStatus = Literal["starting", "ready", "drained", "dead"]


@dataclass(frozen=True)
class ReplicaState:
    """What an operator may know of a replica."""

    number: int
    status: ReplicaStatus
    #: The process of its engine core, if it has one.
    pid: int | None
    num_open: int
    num_restarts: int


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended."""

    request: RequestState
    #: Tokens that it counts for in the router.
    work: int
    #: None: it waits for a core.
    replica: Replica | None = None
    #: The digest of the model that has begun it; None: nothing of it was computed.
    digest: str | None = None
    #: Whether a core was ever given it.
    was_sent: bool = False
    #: Whether it is about this replica, and of no use elsewhere.
    is_fixed: bool = False

    @property
    def group_id(self) -> int:
        """As the engine cores know it; later requests have higher ones."""
        return self.request.group_id


@dataclass(slots=True, eq=False)
class Replica:
    """A place, and the core that has it now.

    Its requests are those in ``open``; a core that is lost loses none of them.
    """

    number: int
    client: CoreClient
    restarts: RestartLimit
    status: ReplicaStatus = "starting"
    open: dict[int, OpenRequest] = field(default_factory=dict)
    #: Of all of its cores: the first step of a later one is as fast as any, as what was compiled for it is kept.
    num_steps: int = 0
    #: Of the model that its core has loaded.
    digest: str = ""
    #: Whether an operator wants it to take no requests.
    drained: bool = False
    #: Whether its core is being started again on purpose.
    is_restarting: bool = False
    #: Steps when the watchdog last looked, and seconds for which there was none since although it could have run.
    seen_steps: int = -1
    quiet: float = 0.0
    #: Of its core and the core's workers.
    waits: ProcessorWaits = field(default_factory=ProcessorWaits)

    @property
    def lives(self) -> bool:
        """Whether a core can answer."""
        return self.status in ("ready", "drained")

    def state(self) -> ReplicaState:
        """As it is now."""
        pid = self.client.pid if self.lives else None
        return ReplicaState(self.number, self.status, pid, len(self.open), self.restarts.count)

    def is_hung(self, elapsed: float, patience: float) -> bool:
        """Whether its core has done no step for ``patience`` seconds of its own; to be asked every ``elapsed`` seconds.

        Seconds in which a thread of the core or of its workers was ready to run while others had the processors do not
        count: on a busy machine a step takes long, and the core would be ended again and again with the same requests,
        which would be blamed for it.
        """
        held_up = self.waits.since_last([self.client.pid]) if self.open else 0.0
        if not self.open or self.seen_steps != self.num_steps:
            self.seen_steps, self.quiet = self.num_steps if self.open else -1, 0.0
            return False
        self.quiet += max(0.0, elapsed - held_up)
        return self.quiet > patience


# Chooses the replica of a data-parallel engine that serves a request.

Routing = Literal["prefix", "least_loaded", "round_robin"]

#: Blocks whose replica is remembered, of each replica: 20 million tokens in blocks of 16.
MAX_BLOCKS = 1 << 20
#: A prefix is looked for in this many blocks of a prompt at most, so that long prompts do not hold up the event loop.
_LONGEST_PREFIX = 2048


@dataclass
class RoutedReplica:
    """What is known of one replica."""

    #: Tokens of its open requests that are still to be computed, as far as that is known.
    outstanding: int = 0
    #: Digests of the blocks of prompts that it was given, least recently used first.
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def cached(self, digests: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks it was given before."""
        return next((i for i, digest in enumerate(digests) if digest not in self.blocks), len(digests))

    def remember(self, digests: Sequence[bytes], most: int) -> None:
        """It is given these blocks; the ``most`` that it was given last are kept."""
        # Last block first: when room is short the ends of prompts go before their beginnings.
        for digest in reversed(digests):
            self.blocks[digest] = None
            self.blocks.move_to_end(digest)
        while len(self.blocks) > most:
            self.blocks.popitem(last=False)


class Router:
    """Owns what is known of each replica: its outstanding tokens, and the prefixes that its cache probably holds.

    "prefix": the replica with the fewest tokens to compute if it got the request, of which a prefix that it was given
    before need not be computed again. "least_loaded": that with the fewest outstanding tokens. "round_robin": the next.
    """

    def __init__(
        self, replicas: int, block_size: int, routing: Routing = "prefix", max_blocks: int = MAX_BLOCKS
    ) -> None:
        """``block_size``: tokens of a block of the replicas' prefix caches; ``max_blocks``: remembered of each."""
        self._replicas = [RoutedReplica() for _ in range(replicas)]
        self._block_size = block_size
        self._routing = routing
        self._max_blocks = max_blocks
        self._next = 0

    def choose(
        self, prompt: list[int], work: int, context: str | bytes = "", among: Sequence[int] | None = None
    ) -> int:
        """The replica for a request, which counts as given to it.

        Args:
            prompt: its token ids.
            work: tokens that it takes to compute, prompt and expected output.
            context: what its blocks depend on besides their tokens, such as a salt or an adapter.
            among: the replicas that can serve it, at least one; None: all.
        """
        usable = range(len(self._replicas)) if among is None else among
        if self._routing == "prefix":
            chain = PrefixChain(context, self._block_size)
            chain.extend(prompt, min(len(prompt) // self._block_size, _LONGEST_PREFIX))
            digests = chain.digests[1:]
            cost = {
                i: self._replicas[i].outstanding - self._replicas[i].cached(digests) * self._block_size for i in usable
            }
            chosen = min(usable, key=lambda i: (cost[i], (i - self._next) % len(self._replicas)))
            self._replicas[chosen].remember(digests, self._max_blocks)
        elif self._routing == "least_loaded":
            turns = {i: (i - self._next) % len(self._replicas) for i in usable}
            chosen = min(usable, key=lambda i: (self._replicas[i].outstanding, turns[i]))
        else:
            chosen = next((i for i in usable if i >= self._next), usable[0])
        self._next = (chosen + 1) % len(self._replicas)
        self._replicas[chosen].outstanding += work
        return chosen

    def release(self, replica: int, work: int) -> None:
        """Tokens of a request are computed, or the request has ended."""
        self._replicas[replica].outstanding -= work

    def forget_prefixes(self) -> None:
        """The prefix caches were reset."""
        for replica in self._replicas:
            replica.blocks.clear()

    def restart(self, replica: int) -> None:
        """The replica has ended, and with it its cache and all that it was given."""
        self._replicas[replica] = RoutedReplica()


def router_of(config: EngineConfig) -> Router:
    """The router of an engine's replicas.

    Prompts are remembered only where that can decide something: among several replicas that have prefix caches.
    """
    routing, size = config.data_parallel_routing, config.data_parallel_size
    if routing == "prefix" and (size == 1 or not config.enable_prefix_caching):
        routing = "least_loaded"
    return Router(size, config.block_size, routing)


# Which engine core has each open request: one that the router chooses, and another when that is lost or drained.

#: Output tokens that a request without a limit is expected to take.
_EXPECTED_TOKENS = 256

#: Why requests end that cannot go on. The first are those that were for one core only.
CORE_ENDED = "the engine's process has ended"
_MODEL_CHANGED = (
    "the model's files were changed while the answer was being generated, and no engine has those that it began with"
)


class Placement:
    """Owns the open requests: each is at one replica, or waits until one takes requests. For one event loop."""

    def __init__(self, replicas: Sequence[Replica], router: Router) -> None:
        self.router = router
        self._replicas = replicas
        self._open: dict[int, OpenRequest] = {}
        #: Of them, those that wait for a core.
        self._waiting: dict[int, OpenRequest] = {}
        self._blame = Blame()
        #: Called with a request that has failed, and why.
        self.on_failed: Callable[[RequestState, str], None] = lambda request, reason: None
        #: Requests that went from one core to another, or to the same replica's next one.
        self.num_resumed = 0

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
        usable = [replica.number for replica in self._replicas if _may_take(replica, entry)]
        if number is None and not usable:
            later = any(replica.status == "starting" or replica.is_restarting for replica in self._replicas)
            if not later and entry.digest is not None and any(replica.lives for replica in self._replicas):
                self._fail(entry, _MODEL_CHANGED)
            else:
                self._waiting[entry.group_id] = entry
            return
        self._waiting.pop(entry.group_id, None)
        group = entry.request.group
        chosen = self.router.choose(
            group.prompt_token_ids, entry.work, group.cache_context, usable if number is None else [number]
        )
        entry.replica = replica = self._replicas[chosen]
        replica.open[entry.group_id] = entry
        self.num_resumed += entry.was_sent
        entry.was_sent = True
        replica.client.send(Add(entry.request.resume(self._blame.alone(entry.request))))

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

    def observe_admissions(self, replica: Replica, admissions: Iterable[AdmissionStats]) -> None:
        """The core of a replica has begun these requests, so that only the same model can go on with them."""
        for admission in admissions:
            entry = self._open.get(admission.group_id)
            if entry is not None:
                entry.digest = replica.digest

    # --- from one core to another -----------------------------------------------------------------------------------

    def _take_back(self, entry: OpenRequest) -> None:
        """The core that had a request has it no longer."""
        if entry.replica is not None:
            entry.replica.open.pop(entry.group_id, None)
            self.router.release(entry.replica.number, entry.work)
            entry.replica = None

    def take_all(self, replica: Replica, error: EngineDeadError, computed: set[int] | None) -> list[OpenRequest]:
        """The requests that a core had, which has died of ``error``; that which is to blame for it fails.

        ``computed``: the groups of its last steps; None: it was killed from outside.
        """
        lost, verdict = list(replica.open.values()), None
        if computed is not None:
            requests = [entry.request for entry in lost]
            verdict = self._blame.observe_death(computed, requests, replica.number)
        for entry in lost:
            self._take_back(entry)
        self.router.restart(replica.number)
        if verdict is not None:
            lost = [entry for entry in lost if entry.group_id != verdict.group_id]
            self._fail(self._open[verdict.group_id], GUILTY.format(error))
            for number in verdict.replicas:  # it is not the cores that fail: one request must not end a server
                self._replicas[number].restarts.forgive(1)
        return lost

    async def move(self, number: int, next_digest: str | None = None) -> int:
        """Gives the requests of a replica, which takes no more, to others that can go on with them: how many.

        ``next_digest``: of the model that the next core of this replica will have, for which requests can wait. Those
        that can go on nowhere else stay.

        Raises:
            EngineDeadError: its core has died meanwhile; its requests are where they shall be.
        """
        replica = self._replicas[number]
        others = [r for r in self._replicas if r is not replica]
        movable = [
            i
            for i, entry in replica.open.items()
            if not entry.is_fixed
            and (
                any(_may_take(r, entry) for r in others)
                or (next_digest is not None and entry.digest in (None, next_digest))
            )
        ]
        if not movable:
            return 0
        await replica.client.hand_over(movable)
        moved = [entry for i in movable if (entry := replica.open.get(i)) is not None]
        self.send_on(moved)
        return len(moved)

    def send_on(self, entries: list[OpenRequest]) -> None:
        """Requests that no core has any more go to other cores, in order of their arrival."""
        entries.sort(key=lambda entry: entry.group_id)
        for entry in entries:
            self._take_back(entry)
        for entry in entries:
            if entry.is_fixed:
                self._fail(entry, CORE_ENDED)
            else:
                self._place(entry)

    def send_waiting(self) -> None:
        """Places the requests that wait for a core again: a replica has begun to take requests, or one more is lost."""
        self.send_on(list(self._waiting.values()))


def _may_take(replica: Replica, entry: OpenRequest) -> bool:
    return replica.status == "ready" and entry.digest in (None, replica.digest)


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


# Requests that leave a replica on purpose: it is drained, or its engine core is started again.

#: Seconds between two looks at what is left on a replica.
_POLL = 0.02


class Migration:
    """Moves the requests of replicas without breaking a stream. For one event loop."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._restarting = False

    def _replica(self, number: int) -> Replica:
        if not 0 <= number < len(self._replicas.all):
            raise ConfigError(f"there is no replica {number}; there are 0 to {len(self._replicas.all) - 1}")
        return self._replicas.all[number]

    async def drain(self, number: int) -> int:
        """Has a replica take no more requests, and others go on with those that it has: how many.

        Those that only its core can go on with end there: the model was changed, and the others have its new files.

        Raises:
            ConfigError: there is no such replica.
            EngineStateError: no other one takes requests.
        """
        replica = self._replica(number)
        if not any(other.status == "ready" for other in self._replicas.all if other is not replica):
            raise EngineStateError(f"no replica takes requests except {number}, so it cannot be drained")
        replica.drained = True
        if replica.status == "ready":
            replica.status = "drained"
        return await self._move(replica)

    def undrain(self, number: int) -> None:
        """Has a replica take requests again; nothing happens if it does.

        Raises:
            ConfigError: there is no such replica.
        """
        replica = self._replica(number)
        replica.drained = False
        if replica.status == "drained" and not replica.is_restarting:
            self._replicas.open_replica(replica)

    async def _move(self, replica: Replica, next_digest: str | None = None) -> int:
        try:
            return await self._replicas.requests.move(replica.number, next_digest)
        except EngineDeadError:  # its requests have gone to others, as whenever a core dies
            return 0

    async def restart(self) -> None:
        """Starts the core of each replica again, one after the other, with the files that the model has now.

        The requests of a replica go on at the others; if there is no other, they and new ones wait for its new core.
        An answer that was begun ends with the files that it began with: where these were changed, and no other replica
        has them any more, the old core goes on until it has finished it. Cores in reserve are started again first: they
        take the place of the old ones at once.

        Raises:
            EngineStateError: this is being done already.
            ConfigError: the model's configuration or tokenizer was changed, which this process has read too.
            EngineDeadError: a core could not be started; those of the replicas after it run on.
            OctavoError: a core in reserve could not load the model; nothing was changed.
        """
        if self._restarting:
            raise EngineStateError("the replicas are being started again already")
        self._restarting = True
        # A caller that goes away leaves nothing half done.
        await asyncio.shield(self._replicas.run(self._restart_all()))

    async def _restart_all(self) -> None:
        try:
            await self._replicas.starter.check_files()
            began = time.monotonic()
            for replica in self._replicas.all:
                await self._replicas.starter.renew_reserve(began)
                replica.is_restarting = True
                try:
                    await self._restart(replica)
                finally:
                    replica.is_restarting = False
        finally:
            self._restarting = False

    async def _restart(self, replica: Replica) -> None:
        while replica.status == "starting":
            await asyncio.sleep(_POLL)
        old = replica.client
        if replica.lives:
            replica.status = "drained"
            next_digest = await self._replicas.starter.digest_now()
            while replica.open and old.error is None:
                await self._move(replica, next_digest)
                await asyncio.sleep(_POLL)
        if replica.client is old and (old.error is None or replica.status == "dead"):
            await self._replicas.replace(replica)
        while replica.status == "starting":  # it was lost meanwhile, and is started again for that
            await asyncio.sleep(_POLL)
        if not replica.lives:
            raise EngineDeadError(f"replica {replica.number} could not be started again")
