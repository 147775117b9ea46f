"""The engine cores behind one front end (data parallelism).

``Replicas`` replaces cores that die, ``Placement`` knows which core has each request, and ``Router`` chooses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec

from octavo.config.engine_config import EngineConfig
from octavo.config.options import ReplicaRole
from octavo.core.errors import (
    ConfigError,
    EngineDeadError,
    EngineKilledError,
    EngineStateError,
    InvalidRequestError,
    OctavoError,
)
from octavo.core.failures import SequenceFailure
from octavo.core.request import AdmissionStats
from octavo.core.stats import EngineView
from octavo.engine.blame import GUILTY, Blame
from octavo.engine.core_handle import C
from octavo.engine.messages import Add, StepDone, ToCore
from octavo.engine.output_processor import RequestState
from octavo.memory.prefix_cache import PrefixChain
from octavo.process.children import ProcessorWaits

if TYPE_CHECKING:
    from octavo.engine.core_client import CoreClient, ProcessStarter

logger = logging.getLogger("octavo")
T = TypeVar("T")

#: "drained": it lives and gets no requests. "dead": it is not restarted.
ReplicaStatus = Literal["starting", "ready", "drained", "dead"]
Routing = Literal["prefix", "least_loaded", "round_robin"]
#: Seconds within which a replica's starts are counted, at most ``engine_restarts``.
RESTART_WINDOW = 600.0
#: Seconds between the use of a reserve core and the start of the next one, which would slow down the first steps.
REFILL_DELAY = 3.0
#: Most blocks that the router remembers per replica: 20 million tokens in blocks of 16.
MAX_BLOCKS = 1 << 20
#: Most blocks of a prompt that the router looks up, so that long prompts do not block the event loop.
_LONGEST_PREFIX = 2048
_EXPECTED_TOKENS = 256
#: Tokens of a prompt that are computed among decodes: with so few, moving a request costs more than it saves.
_SHORT_PROMPT = 256
#: Most keys of conversations whose replica is remembered.
_MAX_KEYS = 1 << 16
#: Seconds between two checks of a replica that is being drained.
_POLL = 0.02
#: The error of a request for one core only, such as that of a shared prefix, when the core ends.
CORE_ENDED = SequenceFailure("the engine's process has ended", "core_ended")
_MODEL_CHANGED = (
    "the model's files were changed while the answer was being generated, and no engine has those that it began with"
)


class Replicas(ABC, Generic[C]):
    """Owns the engine cores behind a front end: ``ProcessReplicas``, or ``LocalCores`` in this process.

    A core that dies is replaced, within limits; meanwhile its requests continue at others, or wait. A request fails
    only if it is the culprit, if its model has changed, or if all cores are lost for good: then ``on_death`` is called,
    once.
    """

    def __init__(self, cores: Sequence[C], config: EngineConfig) -> None:
        self.all = [Replica(i, core, RestartLimit(config.engine_restarts)) for i, core in enumerate(cores)]
        self.requests = Placement(self.all, router_of(config), config.replica_roles)
        #: Set while a core takes requests, and when all are lost for good.
        self._available = asyncio.Event()
        self._available.set()
        self._closing = False
        #: Why all cores are lost for good.
        self._error: OctavoError | None = None
        #: Whether generation is paused, so that cores with requests do no steps.
        self.paused = False
        #: Called with each step of a core in another process; its next message is processed after that.
        self.on_step: Callable[[StepDone], Awaitable[None]] = _ignore
        #: Gives a new core the engine's state before it takes requests.
        self.on_start: Callable[[int], Awaitable[None]] = _ignore
        self.on_death: Callable[[OctavoError], None] = lambda error: None
        for replica in self.all:
            self._connect(replica)

    @abstractmethod
    async def call(self, method: str, kind: type[T], *args: Any) -> list[T]:
        """Calls all living cores; returns their answers by number.

        Raises:
            EngineDeadError: all are lost.
            OctavoError: the call failed on one.
        """

    @abstractmethod
    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine that only the end of the engine may cancel."""

    @abstractmethod
    async def _start(self, number: int, after: C) -> C:
        """Returns a new core for replica ``number``, in the place of ``after``."""

    def _connect(self, replica: Replica[C]) -> None:
        core = replica.core
        core.connect(partial(self._receive, replica), lambda error: self.lose(replica, core, error))

    def send_all(self, message: ToCore) -> None:
        for replica in self.all:
            replica.core.send(message)

    @property
    def living(self) -> list[int]:
        return [replica.number for replica in self.all if replica.lives]

    @property
    def is_available(self) -> bool:
        return any(replica.status == "ready" for replica in self.all)

    async def _receive(self, replica: Replica[C], step: StepDone) -> None:
        replica.num_steps += 1
        self.requests.observe_admissions(replica, step.outputs.admissions)
        if (stores := step.stats.stores) is not None and stores.fetch_share is not None:
            self.requests.router.observe_fetches(replica.number, stores.fetch_share)
        if step.stats.replica != replica.number:  # it was in reserve
            step.stats = msgspec.structs.replace(step.stats, replica=replica.number)
        await self.on_step(step)

    def lose(self, replica: Replica[C], core: C, error: OctavoError) -> None:
        """Handles the death of a core: its requests go to others, or wait for its successor."""
        dead = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        computed = None if isinstance(error, EngineKilledError) else core.last_groups()
        lost = self.requests.take_all(replica, dead, computed)
        restarts = not self._closing and replica.restarts.take()
        replica.status = "starting" if restarts else "dead"
        if all(r.status == "dead" for r in self.all):
            self._run(core.kill())
            self._end(dead)
            return
        logger.error(
            "replica %d of %d has ended (%s); its %d open requests go on%s",
            replica.number, len(self.all), dead, len(lost),
            f", and it is started again, for the {replica.restarts.num_recent}. time in {RESTART_WINDOW / 60:g} minutes"
            if restarts else "",
        )  # fmt: skip
        self.requests.send_on(lost)
        if not self.is_available:
            self._available.clear()
        self._run(self._replace(replica, core) if restarts else core.kill())

    async def _replace(self, replica: Replica[C], old: C) -> None:
        """Puts another core in the place of one that has ended."""
        core = None
        while core is None:
            try:
                core = await self._start(replica.number, old)
            except OctavoError as e:
                logger.error("replica %d could not be started again: %s", replica.number, e)
                if replica.restarts.take():
                    continue
                replica.status = "dead"
                if all(r.status == "dead" for r in self.all):
                    self._end(e)
                else:
                    self.requests.send_waiting()
                return
        replica.core = core
        self._connect(replica)
        with contextlib.suppress(EngineDeadError):  # then ``lose`` was called
            try:
                await self.on_start(replica.number)
            except EngineDeadError:
                raise
            except OctavoError as e:
                logger.error("replica %d lacks a part of the engine's state: %s", replica.number, e)
        if core.error is None:
            self.open_replica(replica)
        await old.kill()

    def _end(self, error: OctavoError) -> None:
        self._error = error
        self._available.set()
        self.on_death(error)

    def open_replica(self, replica: Replica[C]) -> None:
        replica.status = "drained" if replica.drained else "ready"
        self._available.set()
        logger.info("replica %d of %d takes requests", replica.number, len(self.all))
        self.requests.send_waiting()


class ProcessReplicas(Replicas["CoreClient"]):
    """Cores in other processes. For one event loop."""

    def __init__(self, cores: Sequence[CoreClient], starter: ProcessStarter, config: EngineConfig) -> None:
        super().__init__(cores, config)
        self._starter = starter
        self._tasks: set[asyncio.Task[None]] = set()
        self._restarting = False

    async def call(self, method: str, kind: type[T], *args: Any) -> list[T]:
        """``Replicas.call``; if no core lives, it calls the next that does."""
        while True:
            await self._available.wait()
            if not self.living:
                raise EngineDeadError(str(self._error))
            if answers := await self._call_living(method, kind, *args):
                return [answer for _, answer in answers]
            await asyncio.sleep(0)  # for their deaths to be observed

    async def views(self, fresh: bool) -> list[EngineView]:
        """Returns the view of each living core (``ViewRecorder.view``)."""
        views = await self._call_living("view", EngineView, fresh)
        for number, view in views:
            view.replica = number
        return [view for _, view in views]

    async def _call_living(self, method: str, kind: type[T], *args: Any) -> list[tuple[int, T]]:
        """Calls the living cores; one that dies meanwhile is left out: its successor starts with the engine's state."""
        living = self.living
        calls = (self.all[number].core.call(method, kind, *args) for number in living)
        answers = []
        for number, answer in zip(living, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if not isinstance(answer, BaseException):
                answers.append((number, answer))
            elif not isinstance(answer, EngineDeadError):
                raise answer
        return answers

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self.start_task(work)

    def start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task that only the end of the engine cancels."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start(self, number: int, after: CoreClient) -> CoreClient:
        core = self._starter.take_reserve() or await self._starter.start(number, after)
        self._starter.fill_reserve(REFILL_DELAY)
        return core

    # --- drained and restarted on purpose, without breaking a stream ---

    def _replica(self, number: int) -> Replica[CoreClient]:
        if not 0 <= number < len(self.all):
            raise ConfigError(f"there is no replica {number}; there are 0 to {len(self.all) - 1}")
        return self.all[number]

    async def drain(self, number: int) -> int:
        """Stops new requests for a replica and moves its open ones; returns their number.

        Requests that no other core can continue, as the model's files have changed, finish there. ``ConfigError`` if
        there is no such replica, ``EngineStateError`` if no other one takes requests.
        """
        replica = self._replica(number)
        if not any(other.status == "ready" for other in self.all if other is not replica):
            raise EngineStateError(f"no replica takes requests except {number}, so it cannot be drained")
        replica.drained = True
        if replica.status == "ready":
            replica.status = "drained"
        return await self._move(replica)

    def undrain(self, number: int) -> None:
        replica = self._replica(number)
        replica.drained = False
        if replica.status == "drained" and not replica.is_restarting:
            self.open_replica(replica)

    async def _receive(self, replica: Replica[CoreClient], step: StepDone) -> None:
        if step.outputs.stored and (moving := self.requests.note_stored(replica, step.outputs.stored)):
            self.start_task(self._send_on(replica, moving))
        await super()._receive(replica, step)

    async def _send_on(self, replica: Replica[CoreClient], group_ids: list[int]) -> None:
        """Moves requests to other cores, which decode them."""
        try:
            await replica.core.hand_over(group_ids)
        except EngineDeadError:  # ``lose`` has moved its requests
            return
        self.requests.send_on([entry for i in group_ids if (entry := replica.open.get(i)) is not None])

    async def _move(self, replica: Replica[CoreClient], next_digest: str | None = None) -> int:
        """Moves the requests of a replica to others that can continue them; returns their number.

        ``next_digest``: of the checkpoint that the replica's next core will load, for which requests may wait. Requests
        that no other core can continue stay.
        """
        movable = self.requests.movable(replica, next_digest)
        try:
            if movable:
                await replica.core.hand_over(movable)
        except EngineDeadError:  # ``lose`` has moved its requests
            return 0
        taken = [entry for group_id in movable if (entry := replica.open.get(group_id)) is not None]
        # The core may have begun some before it handed them over: only the same model can continue these.
        movable = self.requests.movable(replica, next_digest)
        moved = [entry for entry in taken if entry.group_id in movable]
        self.requests.send_on(moved)
        for entry in taken:
            if entry.replica is replica and entry.group_id not in movable:
                self.requests.send_back(entry)
        return len(moved)

    async def restart(self) -> None:
        """Restarts the cores one after the other, with the model's present files.

        The requests of a replica continue at the others, or, if it is alone, wait for its new core. If the files have
        changed and no other replica has the old ones, the old core first finishes its answers. Reserve cores are
        restarted first, to take over at once.
        """
        if self._restarting:
            raise EngineStateError("the replicas are being started again already")
        self._restarting = True
        # Goes on if the caller is cancelled.
        await asyncio.shield(self.start_task(self._restart_all()))

    async def _restart_all(self) -> None:
        try:
            await self._starter.check_files()
            began = time.monotonic()
            for replica in self.all:
                await self._starter.renew_reserve(began)
                replica.is_restarting = True
                try:
                    await self._restart(replica)
                finally:
                    replica.is_restarting = False
                    self.requests.send_waiting()  # what no core can continue any more fails now
        finally:
            self._restarting = False

    async def _restart(self, replica: Replica[CoreClient]) -> None:
        while replica.status == "starting":
            await asyncio.sleep(_POLL)
        old = replica.core
        if replica.lives:
            replica.status = "drained"
            next_digest = await self._starter.digest_now()
            while replica.open and old.error is None:
                await self._move(replica, next_digest)
                await asyncio.sleep(_POLL)
        if replica.core is old and (old.error is None or replica.status == "dead"):
            replica.status = "starting"
            if not self.is_available:
                self._available.clear()
            await old.close()
            self.requests.router.restart(replica.number)
            await self._replace(replica, old)
        while replica.status == "starting":  # the new core died and is being replaced
            await asyncio.sleep(_POLL)
        if not replica.lives:
            raise EngineDeadError(f"replica {replica.number} could not be started again")

    async def close(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(self._starter.close(), *(replica.core.close() for replica in self.all))

    def end(self) -> None:
        """Kills all cores without waiting, where no event loop runs."""
        self._closing = True
        self._starter.end()
        for replica in self.all:
            replica.core.end()


async def _ignore(_: object) -> None: ...


class RestartLimit:
    """Limits the starts of one replica to ``most`` within ``RESTART_WINDOW`` seconds."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._times: deque[float] = deque()
        self.count = 0

    def take(self) -> bool:
        """Counts a start; False if the limit is reached."""
        now = time.monotonic()
        while self._times and now - self._times[0] > RESTART_WINDOW:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        self.count += 1
        return True

    def forgive(self, count: int) -> None:
        """Uncounts the last starts: one request was to blame, and it has ended."""
        for _ in range(min(count, len(self._times))):
            self._times.pop()

    @property
    def num_recent(self) -> int:
        return len(self._times)


@dataclass(frozen=True)
class ReplicaState:
    number: int
    status: ReplicaStatus
    pid: int | None
    num_open: int
    num_restarts: int


@dataclass(slots=True, eq=False)
class OpenRequest:
    request: RequestState
    #: Its tokens in the router.
    work: int
    #: None: it waits for a core.
    replica: Replica[Any] | None = None
    #: The digest of the checkpoint that has begun it; None: it has not begun.
    digest: str | None = None
    was_sent: bool = False
    is_fixed: bool = False
    #: Its prompt is in the KV stores; and it is on its way from the replica that computed it to one that decodes.
    is_stored: bool = False
    is_moving: bool = False

    @property
    def group_id(self) -> int:
        return self.request.group_id


@dataclass(slots=True, eq=False)
class Replica(Generic[C]):
    """One replica: a number, and the core that now serves it.

    ``open`` has its requests, which survive the loss of its core.
    """

    number: int
    core: C
    restarts: RestartLimit
    status: ReplicaStatus = "ready"
    open: dict[int, OpenRequest] = field(default_factory=dict)
    #: Steps of all of its cores: only the first core compiles kernels in its first step.
    num_steps: int = 0
    drained: bool = False
    #: Whether its core is being restarted on purpose.
    is_restarting: bool = False
    #: ``num_steps`` at the watchdog's last check, and seconds without a step since, though it could have run.
    seen_steps: int = -1
    quiet: float = 0.0
    waits: ProcessorWaits = field(default_factory=ProcessorWaits)

    @property
    def lives(self) -> bool:
        return self.status in ("ready", "drained")

    def state(self) -> ReplicaState:
        pid = self.core.pid if self.lives else None
        return ReplicaState(self.number, self.status, pid, len(self.open), self.restarts.count)

    def is_hung(self, elapsed: float, patience: float) -> bool:
        """Whether its core has done no step for ``patience`` seconds; must be called every ``elapsed`` seconds.

        Time in which a thread of the core or of its workers was runnable but had no processor does not count: on a busy
        machine steps take long, and killing the core would not help.
        """
        held_up = self.waits.since_last([self.core.pid]) if self.open else 0.0
        if not self.open or self.seen_steps != self.num_steps:
            self.seen_steps, self.quiet = self.num_steps if self.open else -1, 0.0
            return False
        self.quiet += max(0.0, elapsed - held_up)
        return self.quiet > patience


class Placement:
    """Owns the open requests: each is at one replica, or waits for one. For one event loop."""

    def __init__(
        self, replicas: Sequence[Replica[Any]], router: Router, roles: Sequence[ReplicaRole] | None = None
    ) -> None:
        self.router = router
        self._replicas = replicas
        self._roles = roles
        self._open: dict[int, OpenRequest] = {}
        self._waiting: dict[int, OpenRequest] = {}
        self._blame = Blame()
        #: Called with a request that has failed, and why.
        self.on_failed: Callable[[RequestState, SequenceFailure], None] = lambda request, failure: None
        #: Requests that continued at another core; without those that were moved there to decode.
        self.num_resumed = 0
        #: Those.
        self.num_moved = 0

    def add(self, request: RequestState, number: int | None = None) -> None:
        """Sends a request to replica ``number``, or to the one that the router chooses (``CoreClient.send``)."""
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
        """Sends a request to a core, queues it for one, or fails it if no core will be able to continue it."""
        usable = [replica.number for replica in self._replicas if _may_take(replica, entry)]
        if number is None and not usable:
            later = any(replica.status == "starting" or replica.is_restarting for replica in self._replicas)
            if not later and entry.digest is not None and any(replica.lives for replica in self._replicas):
                self._fail(entry, SequenceFailure(_MODEL_CHANGED))
            else:
                self._waiting[entry.group_id] = entry
            return
        self._waiting.pop(entry.group_id, None)
        group = entry.request.group
        hints = group.options.cache_hints
        key = (group.options.client, hints.key) if hints is not None and hints.key else None
        among = self._by_role(entry, usable) if number is None else [number]
        chosen = self.router.choose(group.prompt_token_ids, entry.work, group.cache_context, among, key)
        entry.replica = replica = self._replicas[chosen]
        replica.open[entry.group_id] = entry
        if entry.is_moving:
            self.num_moved += 1
        else:
            self.num_resumed += entry.was_sent
        entry.was_sent, entry.is_moving = True, False
        replica.core.send(Add(entry.request.resume(self._blame.alone(entry.request))))

    def _by_role(self, entry: OpenRequest, usable: list[int]) -> list[int]:
        """Of the usable replicas those whose role suits the request; all if there is none.

        A prompt that takes no more than ``_SHORT_PROMPT`` tokens to compute is computed where its answer is decoded.
        """
        if self._roles is None:
            return usable
        decoding = [i for i in usable if self._roles[i] != "prefill"]
        computing = [i for i in usable if self._roles[i] != "decode"]
        group = entry.request.group
        if entry.is_stored or not decoding:
            return decoding or usable
        missing = self.router.num_uncached(group.prompt_token_ids, group.cache_context, decoding)
        return decoding if missing <= _SHORT_PROMPT else computing or usable

    def note_stored(self, replica: Replica[Any], group_ids: list[int]) -> list[int]:
        """Notes that the prompts of these groups are in the KV stores; those that should move to another replica."""
        entries = [entry for group_id in group_ids if (entry := replica.open.get(group_id)) is not None]
        for entry in entries:
            entry.is_stored = True
        if self._roles is None or self._roles[replica.number] != "prefill":
            return []
        moving = [entry for entry in entries if not entry.is_fixed and self._can_decode(entry)]
        for entry in moving:
            entry.is_moving = True
        return [entry.group_id for entry in moving]

    def _can_decode(self, entry: OpenRequest) -> bool:
        assert self._roles is not None
        return any(role != "prefill" and _may_take(self._replicas[i], entry) for i, role in enumerate(self._roles))

    def _fail(self, entry: OpenRequest, failure: SequenceFailure) -> None:
        self.forget(entry.group_id)
        self.on_failed(entry.request, failure)

    def send(self, group_id: int, message: ToCore) -> None:
        entry = self._open.get(group_id)
        if entry is not None and entry.replica is not None:
            entry.replica.core.send(message)

    def forget(self, group_id: int) -> None:
        entry = self._open.pop(group_id, None)
        if entry is not None:
            self._take_back(entry)
            self._waiting.pop(group_id, None)
            self._blame.forget(group_id)

    def observe_admissions(self, replica: Replica[Any], admissions: Iterable[AdmissionStats]) -> None:
        """Notes that a replica has begun these requests: only the same model can continue them."""
        for admission in admissions:
            entry = self._open.get(admission.group_id)
            if entry is not None:
                entry.digest = replica.core.digest

    def _take_back(self, entry: OpenRequest) -> None:
        if entry.replica is not None:
            entry.replica.open.pop(entry.group_id, None)
            self.router.release(entry.replica.number, entry.work)
            entry.replica = None

    def take_all(self, replica: Replica[Any], error: EngineDeadError, computed: set[int] | None) -> list[OpenRequest]:
        """Takes the requests of a dead core; fails the culprit, if one is found, and returns the others.

        ``computed``: the groups of the core's last steps; None: it was killed from outside.
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
            self._fail(self._open[verdict.group_id], SequenceFailure(GUILTY.format(error)))
            for number in verdict.replicas:  # one request must not use up the restarts
                self._replicas[number].restarts.forgive(1)
        return lost

    def movable(self, replica: Replica[Any], next_digest: str | None) -> list[int]:
        """The groups of a replica that others can continue, or its next core with the checkpoint ``next_digest``."""
        others = [other for other in self._replicas if other is not replica]
        return [
            group_id
            for group_id, entry in replica.open.items()
            if not entry.is_fixed
            and (
                any(_may_take(other, entry) for other in others)
                or (next_digest is not None and entry.digest in (None, next_digest))
            )
        ]

    def send_on(self, entries: list[OpenRequest]) -> None:
        """Gives requests without a core to other cores, by arrival."""
        entries.sort(key=lambda entry: entry.group_id)
        for entry in entries:
            self._take_back(entry)
        for entry in entries:
            if entry.is_fixed:
                self._fail(entry, CORE_ENDED)
            else:
                self._place(entry)

    def send_back(self, entry: OpenRequest) -> None:
        """Gives a request that a core has handed over to the same core again."""
        assert entry.replica is not None
        entry.replica.core.send(Add(entry.request.resume(self._blame.alone(entry.request))))

    def send_waiting(self) -> None:
        """Places the waiting requests again, after a replica became ready or was lost."""
        self.send_on(list(self._waiting.values()))


def _may_take(replica: Replica[Any], entry: OpenRequest) -> bool:
    return replica.status == "ready" and entry.digest in (None, replica.core.digest)


class Router:
    """Chooses the replica for a request, by its outstanding tokens and by the prefixes that it probably has cached.

    "prefix": the replica with the fewest tokens to compute if it got the request, not counting cached prefixes. With KV
    stores, a prefix that another replica was given is probably in a store: it counts by the share of its computation
    that fetching it takes, as the replicas observe it (``StoreStats.fetch_share``), and until then like any other.
    "least_loaded": the one with the fewest outstanding tokens. "round_robin": the next one.
    """

    def __init__(
        self, replicas: int, block_size: int, routing: Routing = "prefix", max_blocks: int = MAX_BLOCKS
    ) -> None:
        """``block_size``: of the replicas' prefix caches, in tokens; ``max_blocks``: remembered per replica."""
        self._replicas = [RoutedReplica() for _ in range(replicas)]
        self._block_size = block_size
        self._routing = routing
        self._max_blocks = max_blocks
        self._next = 0
        #: By the key of a conversation: the replica of its last request; least recently used first.
        self._homes: OrderedDict[tuple[str, str], int] = OrderedDict()

    def choose(
        self,
        prompt: list[int],
        work: int,
        context: str | bytes = "",
        among: Sequence[int] | None = None,
        key: tuple[str, str] | None = None,
    ) -> int:
        """Chooses a replica and counts the request as given to it.

        Args:
            work: tokens to compute, prompt and expected output.
            context: what its blocks depend on besides their tokens, such as a salt or an adapter.
            among: the replicas that can serve it, at least one; None: all.
            key: of its conversation, with its client: half of the prompt counts as cached where the last one went.
        """
        usable = range(len(self._replicas)) if among is None else among
        if self._routing == "prefix":
            digests = self._digests(prompt, context)
            cached = {i: self._replicas[i].cached(digests) for i in usable}
            stored = max(cached.values())
            saved = {i: n + (stored - n) * (1 - self._replicas[i].fetch_share) for i, n in cached.items()}
            cost = {i: self._replicas[i].outstanding - saved[i] * self._block_size for i in usable}
            if key is not None and (home := self._homes.get(key)) in cost:
                cost[home] = min(cost[home], self._replicas[home].outstanding - len(prompt) // 2)
            chosen = min(usable, key=lambda i: (cost[i], (i - self._next) % len(self._replicas)))
            self._replicas[chosen].remember(digests, self._max_blocks)
        elif self._routing == "least_loaded":
            turns = {i: (i - self._next) % len(self._replicas) for i in usable}
            chosen = min(usable, key=lambda i: (self._replicas[i].outstanding, turns[i]))
        else:
            chosen = next((i for i in usable if i >= self._next), usable[0])
        if key is not None and len(self._replicas) > 1:
            self._homes[key] = chosen
            self._homes.move_to_end(key)
            if len(self._homes) > _MAX_KEYS:
                self._homes.popitem(last=False)
        self._next = (chosen + 1) % len(self._replicas)
        self._replicas[chosen].outstanding += work
        return chosen

    def num_uncached(self, prompt: list[int], context: str | bytes, among: Sequence[int]) -> int:
        """Tokens of a prompt that the replica with the longest cached prefix of it would compute, at least one."""
        cached = 0
        if self._routing == "prefix":
            digests = self._digests(prompt, context)
            cached = self._block_size * max(self._replicas[i].cached(digests) for i in among)
        return max(1, len(prompt) - cached)

    def _digests(self, prompt: list[int], context: str | bytes) -> list[bytes]:
        chain = PrefixChain(context, self._block_size)
        chain.extend(prompt, min(len(prompt) // self._block_size, _LONGEST_PREFIX))
        return chain.digests[1:]

    def release(self, replica: int, work: int) -> None:
        self._replicas[replica].outstanding -= work

    def observe_fetches(self, replica: int, share: float) -> None:
        """Notes what fetching a token from the KV stores takes of the time to compute it."""
        self._replicas[replica].fetch_share = share

    def forget_prefixes(self) -> None:
        self._homes.clear()
        for replica in self._replicas:
            replica.blocks.clear()

    def restart(self, replica: int) -> None:
        self._replicas[replica] = RoutedReplica()
        self._homes = OrderedDict((key, home) for key, home in self._homes.items() if home != replica)


def router_of(config: EngineConfig) -> Router:
    """Makes the router of an engine. Prefixes matter only with several replicas that have prefix caches."""
    routing, size = config.data_parallel_routing, config.data_parallel_size
    if routing == "prefix" and (size == 1 or not config.enable_prefix_caching):
        routing = "least_loaded"
    return Router(size, config.block_size, routing)


@dataclass
class RoutedReplica:
    outstanding: int = 0
    #: 1: it has no KV stores, or has not fetched yet.
    fetch_share: float = 1.0
    #: Digests of prompt blocks that it was given, least recently used first.
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def cached(self, digests: Sequence[bytes]) -> int:
        return next((i for i, digest in enumerate(digests) if digest not in self.blocks), len(digests))

    def remember(self, digests: Sequence[bytes], most: int) -> None:
        # Last block first, so that the ends of prompts are evicted before their beginnings.
        for digest in reversed(digests):
            self.blocks[digest] = None
            self.blocks.move_to_end(digest)
        while len(self.blocks) > most:
            self.blocks.popitem(last=False)
