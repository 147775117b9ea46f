"""The front end's side of the core's process: exchanges messages with it, and detects its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from octavo.core.child_processes import Failure, LogMessage
from octavo.core.errors import EngineDeadError, EngineKilledError, InvalidRequestError, OctavoError
from octavo.core.messages import (
    MAX_BYTES_FROM_CORE,
    MAX_BYTES_TO_CORE,
    Call,
    FromCore,
    HandOver,
    Ready,
    Reply,
    Shutdown,
    StepDone,
    ToCore,
)
from octavo.engine.core_start import CoreProcess

#: Seconds that a core may take to end.
_END_TIMEOUT = 5.0

logger = logging.getLogger("octavo")
T = TypeVar("T")


class CoreClient:
    """Sends messages to a core and passes on those that it sends. For one event loop.

    When the core dies all calls fail at once, and ``on_death`` is called, once, and never after ``close``. From then on
    no message of the core is looked at: what it has computed and not said is lost, and can be computed again.
    """

    def __init__(self, process: CoreProcess) -> None:
        import zmq
        import zmq.asyncio

        from octavo.engine.core_process import FROM_CORE, MAX_WAITING_STEPS, TO_CORE

        self._process = process
        #: Awaited before the next message is looked at.
        self.on_step: Callable[[StepDone], Awaitable[None]] = _ignore
        self.on_death: Callable[[OctavoError], None] = lambda error: None
        #: Why the core has ended, if it has.
        self.error: OctavoError | None = None
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain_number)
        self._context: Any = zmq.asyncio.Context(io_threads=1)
        # Messages that a dead core did not receive must not delay the end of this process.
        self._context.setsockopt(zmq.LINGER, 0)
        # Sending never waits, so it is possible while a task is being cancelled, where nothing can be awaited.
        # The number of open requests bounds the messages that wait.
        self._out = zmq.Socket(self._context, zmq.PUSH)
        self._out.setsockopt(zmq.LINGER, 0)
        self._out.setsockopt(zmq.SNDHWM, 0)
        self._out.setsockopt(zmq.RECONNECT_IVL, 10)
        self._out.connect(f"ipc://{process.folder / TO_CORE}")
        self._in = self._context.socket(zmq.PULL)
        self._in.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES_FROM_CORE)
        self._in.setsockopt(zmq.RCVHWM, MAX_WAITING_STEPS)
        self._in.bind(f"ipc://{process.folder / FROM_CORE}")
        # Where nobody closes the client: the context's end waits for that of its sockets.
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

    # --- to the core ------------------------------------------------------------------------------------------------

    def send(self, message: ToCore) -> None:
        """Sends a message without waiting; nothing happens if the core has ended.

        What the core could not read was refused before (``InputProcessor``).

        Raises:
            InvalidRequestError: it holds something that cannot be sent, or is too long.
        """
        if self.error is not None or self._closing:
            return
        try:
            data = self._encoder.encode(message)
        except (TypeError, ValueError, OverflowError) as e:
            raise InvalidRequestError(f"the request cannot be sent to the engine's process: {e}") from None
        if len(data) > MAX_BYTES_TO_CORE:
            raise InvalidRequestError(f"the request takes {len(data)} bytes; at most {MAX_BYTES_TO_CORE} can be sent")
        self._out.send(data)

    async def call(self, method: Any, kind: type[T], *args: Any) -> T:
        """The core's answer to a ``Call``.

        Raises:
            EngineDeadError: it ended before it answered.
            OctavoError: the method failed.
        """
        return msgspec.msgpack.decode(await self._ask(lambda call_id: Call(call_id, method, list(args))), type=kind)

    async def hand_over(self, group_ids: list[int]) -> None:
        """Takes requests from the core: all that it has said of them was looked at when this returns.

        Raises:
            EngineDeadError: it ended before it answered.
        """
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

    # --- from the core ----------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromCore)
        try:
            while True:
                await self._process_message(decoder.decode(await self._in.recv()))
                # Receiving a message that has already arrived does not yield to other tasks.
                await asyncio.sleep(0)
        except Exception as e:
            logger.exception("the front end failed at a message of the engine's process")
            self._die(EngineDeadError(f"the front end failed: {type(e).__name__}: {e}"))
        finally:
            self._in.close()

    async def _process_message(self, message: FromCore) -> None:
        match message:
            case StepDone():
                await self.on_step(message)
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
                    self.ready.set_result(message)

    def _read_exit_report(self) -> None:
        """Called when ``life`` is readable: the core sends its exit report there, and its end closes the socket."""
        with contextlib.suppress(ConnectionError):  # like its end
            data = self._process.life.recv(1 << 16)
            if data:
                self._exit_report += data
                return
        self._loop.remove_reader(self._process.life)
        self._ended.set()
        self._process.remove_folder()
        if not self._closing:
            self._die(_exit_error(self._exit_report, self._process, loading=not self.ready.done()))

    def give_up(self, reason: str) -> None:
        """Kills a core that cannot go on, as if it had died."""
        kind = EngineKilledError if self._process.is_stopped else EngineDeadError
        self._die(kind(reason))
        self._process.end()

    def read_recorder(self) -> set[int]:
        """The requests of the steps that the core has last begun."""
        return self._process.read_recorder()

    @property
    def pid(self) -> int:
        """The core's process id."""
        return self._process.pid

    def _die(self, error: OctavoError) -> None:
        if self.error is None:
            self._fail_calls(error)
            self._receiver.cancel()  # perhaps within a step: each part of one is looked at as a whole, or not at all
            self._receiver.add_done_callback(lambda _: None if self._closing else self.on_death(error))

    def _fail_calls(self, error: OctavoError) -> None:
        self.error = error
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # marks it as retrieved: asyncio warns of an error that is never awaited
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    # --- the end ----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Ends the core, if possible after its current step, and removes its sockets."""
        if self.error is None and not self._closing:
            self.send(Shutdown())
            self._closing = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_TIMEOUT):
                    await self._ended.wait()
        await self.kill()

    def end(self) -> None:
        """Kills the core, without waiting for its end, and removes its sockets."""
        self._closing = True
        self._process.end()
        self._process.remove_folder()

    async def kill(self) -> None:
        """Ends the core at once and removes its sockets."""
        self._closing = True
        if self.error is None:
            self._fail_calls(EngineDeadError("the engine has been shut down"))
        self._receiver.cancel()
        if self._process.life.fileno() >= 0:
            self._loop.remove_reader(self._process.life)
        self._out.close()
        self._context.destroy()
        await self._process.end_and_wait()


async def _ignore(step: StepDone) -> None:
    """The default of ``on_step``."""


def _plain_number(value: object) -> Any:
    """Converts numpy's numbers, which are subclasses of Python's, to Python's own."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} cannot cross to another process")


def _exit_error(report: bytes, process: CoreProcess, *, loading: bool) -> OctavoError:
    """The error of a core that has ended: the ``OctavoError`` reported while loading, else ``EngineDeadError``."""
    if not report:
        return process.exit_error()
    failure = msgspec.msgpack.decode(report, type=Failure)
    error = failure.error()
    if loading and failure.is_known:
        return error
    kind = EngineKilledError if isinstance(error, EngineKilledError) else EngineDeadError
    return kind(f"the engine's process failed: {error}")
