"""The engine core in a process of its own: receives requests, steps while there is work, sends outputs of each step.

Started by ``core_start.CoreProcess`` as ``python -m octavo.engine.core_process FOLDER LIFE RECORDER``, or forked with
these arguments from ``python -m octavo.engine.core_process forks SOCKET`` (``octavo.process.fork_server``).

On a CPU the next step is not planned while one computes: all processors are busy, and there is little to gain. With 64
sequences of the demo model, scheduling and processing results cost 0.4 ms of processor time a step, and sending 0.1 ms;
the step itself takes more than 50 ms. On a GPU both are done while it computes (``core.StepLoop``). The front end's
work for a step (1.2 ms) is done in its own process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from octavo.core.errors import ConfigError, OctavoError, memory_errors
from octavo.core.garbage import IdleCollector, settle_collector
from octavo.core.plan import EngineCoreOutputs
from octavo.core.stats import EngineView
from octavo.engine import messages
from octavo.engine.blame import FlightRecorder
from octavo.engine.core import ViewRecorder
from octavo.engine.messages import (
    FROM_CORE,
    MAX_BYTES_FROM_CORE,
    MAX_BYTES_TO_CORE,
    MAX_WAITING_STEPS,
    TO_CORE,
    FromCore,
    Reply,
    ToCore,
)
from octavo.engine.step_dumps import dump_failed_steps
from octavo.process.children import Failure, end_with, send_logs
from octavo.process.fork_server import FORKS, serve_forks
from octavo.process.startup import ProcessProfile, phase, profile

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore


#: Seconds between two health checks of workers in other processes while the core is idle.
HEALTH_INTERVAL = 1.0
#: Seconds between two steps without requests, which pass blocks to the KV stores.
_WRITE_INTERVAL = 0.02
#: Milliseconds that the process waits, when it ends, for its messages to be received.
LINGER = 500

logger = logging.getLogger("octavo")


class FrontEndLink:
    def __init__(self, context: zmq.Context[Any], folder: Path) -> None:
        self._in, self._out = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._in.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES_TO_CORE)
        self._in.bind(f"ipc://{folder / TO_CORE}")
        self._out.setsockopt(zmq.SNDHWM, MAX_WAITING_STEPS)
        self._out.connect(f"ipc://{folder / FROM_CORE}")
        self._decoder, self._encoder = msgspec.msgpack.Decoder(ToCore), msgspec.msgpack.Encoder()
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for a message, at most ``timeout`` seconds; returns whether there is one."""
        return bool(self._in.poll(None if timeout is None else timeout * 1e3))

    def receive(self) -> ToCore | None:
        try:
            data = self._in.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return self._decoder.decode(data)

    def send(self, message: FromCore) -> None:
        """Sends a message; waits if the front end is far behind."""
        with self._lock:  # any thread may log
            self._out.send(self._encoder.encode(message))


class CoreLoop:
    """The busy loop of a core (vLLM: run_busy_loop): handles messages before each step and sends its outputs."""

    def __init__(self, core: EngineCore, front_end: FrontEndLink) -> None:
        self._core, self._front_end = core, front_end
        self._collector, self._recorder = IdleCollector(), ViewRecorder(core.scheduler)
        if (dumper := dump_failed_steps(core)) is not None:
            dumper.steps = self._recorder.steps
        self._paused = False
        self._health_interval = None if core.executor.in_process else HEALTH_INTERVAL

    def run(self) -> None:
        while self._receive_messages():
            if self._has_step:
                outputs, stats = self._core.measured_step()
                self._front_end.send(messages.StepDone(outputs, stats))
                self._recorder.note(stats)
                if self._core.observers and not self._recorder.watches:
                    self._core.observers.clear()
            elif self._core.has_writes:
                self._core.write_step()

    def _view(self, fresh: bool) -> EngineView:
        """The state now; changes are recorded from here on, until nobody has asked for a while."""
        self._core.observers[:] = [self._recorder]
        return self._recorder.view(fresh)

    @property
    def _has_step(self) -> bool:
        return self._core.has_work and not self._paused

    def _pause(self, paused: bool) -> None:
        self._paused = paused

    def _receive_messages(self) -> bool:
        """Handles the messages that have arrived; waits for one if idle. False: shut down."""
        busy = self._has_step
        if self._core.has_writes:
            self._front_end.wait(_WRITE_INTERVAL)
        elif not busy:
            if not self._front_end.wait(0):
                self._collector.collect()
            while not self._front_end.wait(self._health_interval):
                self._core.executor.check_health()
        while (message := self._front_end.receive()) is not None:
            match message:
                case messages.HandOver(call_id, group_ids):  # outputs were sent before the reply, and none follows it
                    for group_id in group_ids:
                        self._core.abort(group_id)
                    self._front_end.send(Reply(call_id, msgspec.Raw(msgspec.msgpack.encode(None))))
                case messages.Call(call_id, method, args):
                    self._front_end.send(self._reply(call_id, method, args))
                case messages.Shutdown():
                    return False
                case _:
                    self._core.handle(message)
        if busy and not self._core.has_work:  # aborts ended all requests, and no step will report it
            self._front_end.send(messages.StepDone(EngineCoreOutputs(), self._core.measure_emptied()))
        return True

    def _reply(self, call_id: int, method: str, args: list[Any]) -> Reply:
        encoded, failure = msgspec.msgpack.encode(None), None
        try:
            call = {"view": self._view, "pause": self._pause}.get(method)
            encoded = msgspec.msgpack.encode(self._core.call(method, args) if call is None else call(*args))
        except Exception as e:  # raised again in the caller
            failure = Failure.of(e)
        return Reply(call_id, msgspec.Raw(encoded), failure)


def serve(folder: Path, recorder: int) -> None:
    """Loads the model that the first message names and serves until ``Shutdown``; ``recorder``: a memory descriptor."""
    context = zmq.Context()
    try:
        front_end = FrontEndLink(context, folder)
        core = _load(front_end)
        settle_collector()
        if core is not None:
            try:
                core.record_to(FlightRecorder(recorder, core.max_in_flight))
                CoreLoop(core, front_end).run()
            finally:
                core.shutdown()
    finally:
        context.destroy(linger=LINGER)


def _load(front_end: FrontEndLink) -> EngineCore | None:
    with phase("imports"):
        importlib.import_module("octavo.runner.model_runner")
        from octavo.config.engine_config import make_config
        from octavo.engine.core import EngineCore
        from octavo.loader.resolve import checkpoint_digest

    with phase("waiting for the model's folder"):
        front_end.wait()
    start = front_end.receive()
    if not isinstance(start, messages.Start):
        return None
    send_logs(start.log_level, front_end.send)
    try:
        # Before the files are read: if they change meanwhile, the digest is not theirs.
        digest = checkpoint_digest(start.options["model"], Path(start.folder), start.options.get("revision"))
        with memory_errors(), phase("model"):
            core = EngineCore(make_config(**start.options), Path(start.folder), start.replica)
        _check_messages(core)
        profiles = [profile("engine core" if core.replica == 0 else f"engine core of replica {core.replica}")]
        if not core.executor.in_process:
            workers = core.executor.collective_rpc("startup_profile")
            profiles += msgspec.convert(workers, list[ProcessProfile])
        front_end.send(messages.Ready(core.model_config, core.max_model_len, digest, profiles))
    except OctavoError:
        raise
    except Exception:
        logger.exception("the model could not be loaded")
        raise
    return core


def _check_messages(core: EngineCore) -> None:
    limit, vocab_size = core.options.max_logprobs or 0, core.model_config.vocab_size
    logprobs = core.options.token_budget * (vocab_size if limit == -1 else min(limit, vocab_size))
    size = logprobs * messages.BYTES_OF_LOGPROB
    if size > MAX_BYTES_FROM_CORE:
        raise ConfigError(
            f"max_logprobs ({limit}) with max_num_batched_tokens ({core.options.token_budget}) allows steps whose "
            f"logprobs take {size / (1 << 30):.1f} GiB; at most {MAX_BYTES_FROM_CORE >> 30} can be sent: lower either"
        )


#: What a fork server imports: what a core imports before and while it loads most models.
MODULES = (
    *("octavo.engine.core", "octavo.runner.model_runner", "octavo.runner.loaded_model", "octavo.kernels.cpu.backend"),
    *("octavo.loader.projector", "octavo.loader.mtp", "octavo.models.dense", "octavo.models.gemma"),
    *("octavo.models.encoder", "safetensors.numpy", "psutil"),
)


def main(arguments: list[str]) -> int:
    """``arguments``: the private folder, and descriptors of the parent's socket and of the shared memory.

    Or ``FORKS`` and the descriptor of a socket, for a server that forks processes which call this with such arguments.
    """
    # Ctrl-C and a supervisor's signals reach every process of a group; the front end handles them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.disable()  # collecting while modules are imported would take a fifth of the start
    if arguments[0] == FORKS:
        for module in MODULES:
            with contextlib.suppress(ImportError):  # the kernels of a machine with GPUs may not be compiled
                importlib.import_module(module)
        serve_forks(int(arguments[1]), main)
        return 0
    folder, life, recorder = Path(arguments[0]), socket.socket(fileno=int(arguments[1])), int(arguments[2])
    life.set_inheritable(False)
    os.set_inheritable(recorder, False)
    end_with(life, lambda: shutil.rmtree(folder, ignore_errors=True))
    try:
        serve(folder, recorder)
    except Exception as e:
        failure = Failure.of(e)
        failure.message = failure.message[: messages.MAX_EXIT_REPORT]
        life.sendall(msgspec.msgpack.encode(failure))
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # all messages have been sent; freeing the weights would only take time
