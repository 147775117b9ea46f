"""The engine cores behind one front end: each request goes to one of them, and the loss of one is not that of all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from octavo.core.errors import EngineDeadError, InvalidRequestError, OctavoError
from octavo.core.messages import Add, Ready, Start, StepDone, ToCore
from octavo.core.option_parts import FIRST_STEP_TIMEOUT
from octavo.core.request import EngineCoreRequest
from octavo.engine.core_client import CoreClient
from octavo.engine.core_start import CoreProcess
from octavo.engine.router import Router

#: Output tokens that a request without a limit is expected to take.
_EXPECTED_TOKENS = 256

logger = logging.getLogger("octavo")
T = TypeVar("T")


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    replica: int
    #: Tokens that it counts for in the router.
    work: int
    request: EngineCoreRequest
    #: Whether something of it was computed.
    has_begun: bool = False


@dataclass(slots=True)
class _Core:
    client: CoreClient
    open: set[int] = field(default_factory=set)
    num_steps: int = 0


class Replicas:
    """Owns the clients of the cores, and which of them each open request was given to.

    When a core dies, requests of which it had computed nothing go to others; the rest fails (``on_lost``). When the
    last one has died, ``on_death`` is called, once. For one event loop.
    """

    def __init__(self, processes: list[CoreProcess], router: Router) -> None:
        """Connects to the processes, which have no model yet."""
        self.router = router
        self._cores = [_Core(CoreClient(process)) for process in processes]
        self._open: dict[int, _Open] = {}
        self._watchdog: asyncio.Task[None] | None = None
        #: No core does a step although it has requests.
        self.paused = False
        #: Called with each step of a core, and awaited before its next message is looked at.
        self.on_step: Callable[[StepDone], Awaitable[None]] = _ignore
        #: Called with requests that were lost with a core.
        self.on_lost: Callable[[list[EngineCoreRequest], EngineDeadError], None] = lambda requests, error: None
        self.on_death: Callable[[OctavoError], None] = lambda error: None
        for number, core in enumerate(self._cores):
            core.client.on_step = partial(self._receive, number)
            core.client.on_death = partial(self._lose, number)

    def start(self, options: dict[str, Any], log_level: int, folder: Path) -> None:
        """Tells every core to load its model; ``ready`` waits for them."""
        for number, core in enumerate(self._cores):
            core.client.send(Start(options, str(folder), log_level, number))

    async def ready(self) -> Ready:
        """Waits until all have loaded; the longest sequence is that of the core with the smallest KV cache.

        Raises:
            OctavoError: one could not load.
        """
        ready = await asyncio.gather(*(core.client.ready for core in self._cores))
        for core in self._cores:
            if core.client.error is not None:
                raise core.client.error
        profiles = [profile for r in ready for profile in r.profiles]
        return msgspec.structs.replace(ready[0], max_model_len=min(r.max_model_len for r in ready), profiles=profiles)

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: EngineCoreRequest, replica: int | None = None) -> None:
        """Gives a request to the core ``replica``, or to the one that the router chooses.

        Raises:
            InvalidRequestError: as ``CoreClient.send``.
            EngineDeadError: all cores have died.
        """
        limit = request.task.max_tokens
        work = len(request.prompt_token_ids) + (_EXPECTED_TOKENS if limit is None else limit)
        try:
            chosen = self.router.choose(request.prompt_token_ids, work, request.cache_context, replica)
        except LookupError:
            raise EngineDeadError("all replicas of the engine have ended") from None
        self._open[request.group_id] = _Open(chosen, work, request)
        self._cores[chosen].open.add(request.group_id)
        try:
            self._cores[chosen].client.send(Add(request))
        except InvalidRequestError:
            self.forget(request.group_id)
            raise

    def send(self, group_id: int, message: ToCore) -> None:
        """Sends a message about a request to the core that has it; nothing happens if it has ended."""
        entry = self._open.get(group_id)
        if entry is not None:
            self._cores[entry.replica].client.send(message)

    def forget(self, group_id: int) -> None:
        """The request has ended."""
        entry = self._open.pop(group_id, None)
        if entry is not None:
            self._cores[entry.replica].open.discard(group_id)
            self.router.release(entry.replica, entry.work)

    def send_all(self, message: ToCore) -> None:
        """Sends a message to all cores."""
        for core in self._cores:
            core.client.send(message)

    async def call(self, method: str, kind: type[T], *args: Any) -> list[T]:
        """The answers of all cores that live to ``CoreClient.call``, by number.

        Raises:
            EngineDeadError: all have died.
            OctavoError: the call has failed on one.
        """
        alive = [self._cores[i].client for i in self.router.alive]
        if not alive:
            raise EngineDeadError("all replicas of the engine have ended")
        return list(await asyncio.gather(*(client.call(method, kind, *args) for client in alive)))

    # --- the cores --------------------------------------------------------------------------------------------------

    async def _receive(self, number: int, step: StepDone) -> None:
        self._cores[number].num_steps += 1
        for admission in step.outputs.admissions:
            entry = self._open.get(admission.group_id)
            if entry is not None:
                entry.has_begun = True
        await self.on_step(step)

    def _lose(self, number: int, error: OctavoError) -> None:
        """A core has died: its requests go to others or fail."""
        self.router.remove(number)
        alive = self.router.alive
        dead = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        if not alive:
            self.on_death(dead)
            return
        lost: list[EngineCoreRequest] = []
        moved = 0
        for group_id in sorted(self._cores[number].open):  # in order of arrival
            entry = self._open.pop(group_id)
            if entry.has_begun:
                lost.append(entry.request)
            else:
                self.add(entry.request)
                moved += 1
        self._cores[number].open.clear()
        logger.error(
            "replica %d of %d has ended (%s); %d of its requests go to others, %d fail",
            number, len(self._cores), dead, moved, len(lost),
        )  # fmt: skip
        self.on_lost(lost, EngineDeadError(f"replica {number} of the engine has ended: {dead}"))

    def watch(self, step_timeout: float) -> None:
        """From now on ends a core that does no step for ``step_timeout`` seconds while it has requests."""
        self._watchdog = asyncio.create_task(self._watch(step_timeout))

    async def _watch(self, step_timeout: float) -> None:
        """Checks ten times in that period and counts its own checks, so that a pause of this process does not count."""
        seen, quiet = [-1] * len(self._cores), [0.0] * len(self._cores)
        while True:
            await asyncio.sleep(step_timeout / 10)
            for number, core in enumerate(self._cores):
                if not core.open or self.paused or seen[number] != core.num_steps:
                    seen[number], quiet[number] = core.num_steps if core.open else -1, 0.0
                    continue
                quiet[number] += step_timeout / 10
                patience = step_timeout if core.num_steps else max(step_timeout, FIRST_STEP_TIMEOUT)
                if quiet[number] > patience:
                    core.client.give_up(EngineDeadError(f"the engine's process hangs: no step for {patience:g} s"))

    async def close(self) -> None:
        """Ends all cores, if possible after their current steps."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        await asyncio.gather(*(core.client.close() for core in self._cores))

    def end(self) -> None:
        """Ends all cores at once, without waiting for their end, where there is no event loop."""
        for core in self._cores:
            core.client.end()

    async def kill(self) -> None:
        """Ends all cores at once."""
        await asyncio.gather(*(core.client.kill() for core in self._cores))


async def _ignore(step: StepDone) -> None:
    """The default of ``on_step``."""
