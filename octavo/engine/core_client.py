"""The front end's side of a core's process: ``CoreClient`` exchanges messages with it, ``ProcessStarter`` starts it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from octavo.config.options import FIRST_STEP_TIMEOUT
from octavo.core.errors import ConfigError, EngineDeadError, EngineKilledError, InvalidRequestError, OctavoError
from octavo.engine.core_handle import CoreHandle
from octavo.engine.core_start import CoreProcess
from octavo.engine.messages import (
    FROM_CORE,
    MAX_BYTES_FROM_CORE,
    MAX_BYTES_TO_CORE,
    MAX_WAITING_STEPS,
    TO_CORE,
    Call,
    FromCore,
    HandOver,
    Ready,
    Reply,
    Shutdown,
    Start,
    StepDone,
    ToCore,
)
from octavo.loader.resolve import checkpoint_digest, description_digest, find_projector, gguf_folder
from octavo.process.children import Failure, LogMessage

if TYPE_CHECKING:
    from octavo.engine.replicas import ProcessReplicas, RestartLimit
    from octavo.process.fork_server import ForkServer


logger = logging.getLogger("octavo")
T = TypeVar("T")

_END_TIMEOUT = 5.0
#: A restart fails after 10 x the time of the first start, and never before 60 s.
_PATIENCE, _LEAST_PATIENCE = 10.0, 60.0


class CoreClient(CoreHandle):
    """The front end's connection to a core in another process. For one event loop.

    When the core dies, all calls fail at once and ``on_death`` is called, but never after ``close``. No message
    is processed after that: tokens that the core computed and did not report are computed again elsewhere.
    """

    def __init__(self, process: CoreProcess) -> None:
        import zmq
        import zmq.asyncio

        self.process = process
        #: On the clock of ``time.monotonic``.
        self.began = time.monotonic()
        #: Awaited before the next message is processed.
        self._on_step: Callable[[StepDone], Awaitable[None]] = _ignore
        self._on_death: Callable[[OctavoError], None] = lambda error: None
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain_number)
        self._context: Any = zmq.asyncio.Context(io_threads=1)
        # Messages to a dead core must not delay the end of this process.
        self._context.setsockopt(zmq.LINGER, 0)
        # Sending never waits, so a task can send while it is cancelled. The open requests bound the queued messages.
        self._out = zmq.Socket(self._context, zmq.PUSH)
        self._out.setsockopt(zmq.LINGER, 0)
        self._out.setsockopt(zmq.SNDHWM, 0)
        self._out.setsockopt(zmq.RECONNECT_IVL, 10)
        self._out.connect(f"ipc://{process.folder / TO_CORE}")
        self._in = self._context.socket(zmq.PULL)
        self._in.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES_FROM_CORE)
        self._in.setsockopt(zmq.RCVHWM, MAX_WAITING_STEPS)
        self._in.bind(f"ipc://{process.folder / FROM_CORE}")
        # In case nobody closes the client: the context's end waits for its sockets.
        weakref.finalize(self, self._out.close)
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._call_ids = itertools.count()
        self._exit_report = b""
        self._ended = asyncio.Event()
        self._closing = False
        self._receiver = self._loop.create_task(self._receive())
        process.life.setblocking(False)
        self._loop.add_reader(process.life, self._read_exit_report)

    @property
    def pid(self) -> int:
        return self.process.pid

    def connect(self, on_step: Callable[[StepDone], Awaitable[None]], on_death: Callable[[OctavoError], None]) -> None:
        self._on_step, self._on_death = on_step, on_death

    def last_groups(self) -> set[int]:
        return self.process.read_recorder()

    def send(self, message: ToCore) -> None:
        if self.error is not None or self._closing:
            return
        try:
            data = self._encoder.encode(message)
        except (TypeError, ValueError, OverflowError) as e:
            raise InvalidRequestError(f"the request cannot be sent to the engine's process: {e}") from None
        if len(data) > MAX_BYTES_TO_CORE:
            raise InvalidRequestError(f"the request takes {len(data)} bytes; at most {MAX_BYTES_TO_CORE} can be sent")
        self._out.send(data)

    async def call(self, method: str, kind: type[T], *args: Any) -> T:
        return msgspec.msgpack.decode(await self._ask(lambda call_id: Call(call_id, method, list(args))), type=kind)

    async def hand_over(self, group_ids: list[int]) -> None:
        """Takes requests from the core; all of their outputs were processed when this returns."""
        await self._ask(lambda call_id: HandOver(call_id, group_ids))

    async def _ask(self, message: Callable[[int], Call | HandOver]) -> msgspec.Raw:
        if self.error is not None or self._closing:
            raise self.error or EngineDeadError("the engine has been shut down")
        call_id = next(self._call_ids)
        future: asyncio.Future[msgspec.Raw] = self._loop.create_future()
        self._calls[call_id] = future
        try:
            self.send(message(call_id))
            return await future
        finally:
            del self._calls[call_id]

    async def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromCore)
        try:
            while True:
                await self._process_message(decoder.decode(await self._in.recv()))
                # Receiving an available message does not yield to other tasks.
                await asyncio.sleep(0)
        except Exception as e:
            logger.exception("the front end failed at a message of the engine's process")
            self._die(EngineDeadError(f"the front end failed: {type(e).__name__}: {e}"))
        finally:
            self._in.close()

    async def _process_message(self, message: FromCore) -> None:
        match message:
            case StepDone():
                await self._on_step(message)
            case Reply(call_id, value, error):
                future = self._calls.get(call_id)
                if future is None or future.done():  # its caller was cancelled
                    return
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error.error())
            case LogMessage(level, text):
                logger.log(level, "%s", text)
            case Ready():
                if not self.ready.done():
                    self.digest = message.digest
                    self.ready.set_result(message)

    def _read_exit_report(self) -> None:
        """Reads ``life``: the core writes its exit report there, and closes it when it ends."""
        with contextlib.suppress(ConnectionError):  # as at its end
            data = self.process.life.recv(1 << 16)
            if data:
                self._exit_report += data
                return
        self._loop.remove_reader(self.process.life)
        self._ended.set()
        self.process.remove_folder()
        if self._closing:
            return
        if not self._exit_report:
            self._die(self.process.exit_error())
            return
        failure = msgspec.msgpack.decode(self._exit_report, type=Failure)
        error = failure.error()
        if self.ready.done() or not failure.is_known:  # errors of the loading are raised as they are
            kind = EngineKilledError if isinstance(error, EngineKilledError) else EngineDeadError
            error = kind(f"the engine's process failed: {error}")
        self._die(error)

    def give_up(self, reason: str) -> None:
        """Kills a core that hangs, and reports its death."""
        kind = EngineKilledError if self.process.is_stopped else EngineDeadError
        self._die(kind(reason))
        self.process.end()

    def _die(self, error: OctavoError) -> None:
        if self.error is None:
            self._fail_calls(error)
            self._receiver.cancel()  # each part of a step is processed as a whole, or not at all
            self._receiver.add_done_callback(lambda _: None if self._closing else self._on_death(error))

    def _fail_calls(self, error: OctavoError) -> None:
        self.error = error
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # marks it as retrieved: asyncio warns of an error that is never awaited
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    async def close(self) -> None:
        if self.error is None and not self._closing:
            self.send(Shutdown())
            self._closing = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_TIMEOUT):
                    await self._ended.wait()
        await self.kill()

    def end(self) -> None:
        self._closing = True
        self.process.end()
        self.process.remove_folder()

    async def kill(self) -> None:
        self._closing = True
        if self.error is None:
            self._fail_calls(EngineDeadError("the engine has been shut down"))
        self._receiver.cancel()
        if self.process.life.fileno() >= 0:
            self._loop.remove_reader(self.process.life)
        self._out.close()
        self._context.destroy()
        await self.process.end_and_wait()


async def _ignore(step: StepDone) -> None: ...


def _plain_number(value: object) -> Any:
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} cannot cross to another process")


class ProcessStarter:
    """Starts the processes of cores and owns those in reserve. For one event loop; ``begin`` comes first."""

    #: The message that starts the core of replica 0.
    _start: Start

    def __init__(self, num_standby: int, limit: RestartLimit, forks: ForkServer | None = None) -> None:
        """``num_standby``: cores to keep in reserve. ``limit``: for starts after a core died in reserve."""
        self._num_standby, self._limit, self._forks = num_standby, limit, forks
        self.created = time.monotonic()
        #: The time that the first cores took to load.
        self.start_seconds = 0.0
        self._reserve: list[CoreClient] = []
        self._filling: asyncio.Task[None] | None = None
        self._starting: set[CoreClient] = set()
        #: Clean-ups of cores that have died in reserve.
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False
        #: ``description_digest`` of the files that the front end has read.
        self.description = ""

    def begin(self, clients: list[CoreClient], options: dict[str, Any], log_level: int, folder: Path) -> None:
        """Tells the first cores to load the model; later ones get the same options."""
        self._start = Start(options, str(folder), log_level)
        for number, client in enumerate(clients):
            client.send(msgspec.structs.replace(self._start, replica=number))

    async def start(self, number: int, after: CoreClient | None = None) -> CoreClient:
        """Starts a core for replica ``number``, once ``after`` has ended and freed its memory.

        Raises:
            OctavoError: it could not load the model.
            ConfigError: the model's configuration or tokenizer has changed.
            EngineDeadError: it ended meanwhile, or takes far longer than the first one.
        """
        await self.check_files()
        patience = max(_LEAST_PATIENCE, _PATIENCE * self.start_seconds)
        client = CoreClient(CoreProcess(self._forks))  # it imports its modules meanwhile
        self._starting.add(client)
        try:
            if after is not None:
                await after.kill()
            client.send(msgspec.structs.replace(self._start, replica=number))
            async with asyncio.timeout(patience):
                await client.ready
            return client
        except TimeoutError:
            await client.kill()
            raise EngineDeadError(f"the engine's process was not ready after {patience:.0f} s") from None
        except BaseException:
            await client.kill()
            raise
        finally:
            self._starting.discard(client)

    async def check_files(self) -> None:
        """Raises ``ConfigError`` if the configuration or the tokenizer has changed since the front end read it."""
        if await asyncio.to_thread(lambda: description_digest(self._folder())) != self.description:
            raise ConfigError(
                "the model's configuration or tokenizer was changed since it was loaded: the whole engine must be "
                "started again"
            )

    async def digest_now(self) -> str:
        """The digest of the checkpoint that a new core would load."""
        options = self._start.options
        return await asyncio.to_thread(checkpoint_digest, options["model"], self._folder(), options.get("revision"))

    def _folder(self) -> Path:
        """The folder of the model's configuration; for a GGUF file, the one extracted from its present content."""
        model, mmproj = (self._start.options.get(name, "auto") for name in ("model", "mmproj"))
        model = Path(os.path.expanduser(model))
        if os.path.isfile(model):
            return gguf_folder(model, projector=find_projector(model, mmproj))
        return Path(self._start.folder)

    async def renew_reserve(self, since: float) -> None:
        """Replaces the reserve cores begun before ``since``, and waits for the new ones."""
        if not self._num_standby:
            return
        if self._filling is not None:
            await asyncio.wait([self._filling])
        old = [core for core in self._reserve if core.began < since]
        self._reserve = [core for core in self._reserve if core.began >= since]
        await asyncio.gather(*(core.kill() for core in old))
        self.fill_reserve()
        if self._filling is not None:
            await asyncio.wait([self._filling])
        if len(self._reserve) < self._num_standby:
            raise EngineDeadError("no engine's process could be started in reserve; the log says why")

    def fill_reserve(self, after: float = 0.0) -> None:
        """Starts the missing reserve cores after ``after`` seconds."""
        if self._filling is None and len(self._reserve) < self._num_standby and not self._closed:
            self._filling = asyncio.create_task(self._fill(after))

    async def _fill(self, after: float) -> None:
        try:
            await asyncio.sleep(after)
            while len(self._reserve) < self._num_standby:
                number = len(self._reserve)
                core = await self.start(number)
                core.connect(_ignore, partial(self._lose, core))
                self._reserve.append(core)
                logger.info("an engine's process is ready in reserve")
        except OctavoError as e:
            logger.error("no engine's process is in reserve: %s", e)
        finally:
            self._filling = None

    def _lose(self, core: CoreClient, error: OctavoError) -> None:
        self._reserve.remove(core)
        logger.error("an engine's process in reserve has ended: %s", error)
        ending = asyncio.create_task(core.kill())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        if self._limit.take():
            self.fill_reserve()

    def take_reserve(self) -> CoreClient | None:
        return next((self._reserve.pop(i) for i, core in enumerate(self._reserve) if core.error is None), None)

    @property
    def num_reserve(self) -> int:
        return len(self._reserve)

    async def close(self) -> None:
        self._closed = True
        if self._filling is not None:
            self._filling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._filling
        clients = [*self._starting, *self._reserve]
        await asyncio.gather(*self._ending, *(client.kill() for client in clients))

    def end(self) -> None:
        self._closed = True
        for client in [*self._starting, *self._reserve]:
            client.end()


async def watch(replicas: ProcessReplicas, step_timeout: float) -> None:
    """Kills each core that does no step for ``step_timeout`` seconds while it has requests; never returns.

    It checks ten times in that period and counts its checks, so that neither a pause of this process nor a time in
    which the core had no processor counts (``Replica.is_hung``).
    """
    while True:
        await asyncio.sleep(step_timeout / 10)
        for replica in replicas.all:
            patience = step_timeout if replica.num_steps else max(step_timeout, FIRST_STEP_TIMEOUT)
            if replicas.paused or not replica.lives:
                replica.seen_steps = -1
            elif replica.is_hung(step_timeout / 10, patience):
                replica.core.give_up(f"the engine's process hangs: no step for {patience:g} s")
