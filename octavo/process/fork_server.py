"""A process that has done its imports and forks others from itself, as multiprocessing's forkserver does.

Unlike that one it runs no resource tracker, unpickles nothing, does not import the main program into each child, and
its end leaves the children alone. Only for Linux (pidfds).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

from octavo.core.errors import EngineKilledError
from octavo.core.garbage import return_freed_memory
from octavo.process.start_process import end_process, start_process

#: Maximum bytes of the arguments of a child, and descriptors that it inherits.
_MAX_BYTES, _MAX_DESCRIPTORS = 1 << 16, 16
#: Seconds that a server which is ready may take to fork; 10 ms are usual.
_PATIENCE = 5.0
#: Seconds between the end of a child and the report of its exit code.
_REPORT_PATIENCE = 1.0
#: First word of the arguments of a fork server's module.
FORKS = "forks"


class ForkServer:
    """The parent's side: ``fork`` makes a process of ``module`` within milliseconds."""

    def __init__(self, module: str) -> None:
        """``module`` calls ``serve_forks`` if its arguments are ``FORKS`` and a descriptor."""
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket
        self._is_ready = False

    def start(self) -> None:
        """Starts the process, unless it runs. It does its imports meanwhile, and ends with this process."""
        if sys.platform != "linux" or (self._process is not None and self._process.poll() is None):
            return
        self.close()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start_process(
                self._module, FORKS, theirs.fileno(), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )

    @property
    def is_ready(self) -> bool:
        """Whether its imports are done."""
        if self._process is None or self._process.poll() is not None:
            return False
        if not self._is_ready and _is_readable(self._connection.fileno(), 0.0):
            self._is_ready = bool(self._connection.recv(1))
        return self._is_ready

    def fork(self, arguments: Sequence[object], descriptors: Sequence[int]) -> ForkedProcess | None:
        """A process that inherits the descriptors, whose numbers there follow the arguments; None: not ready.

        Raises:
            EngineKilledError: the process is killed meanwhile, or hangs and is killed.
        """
        if not self.is_ready:
            return None
        report, theirs = os.pipe()
        try:
            self._connection.settimeout(_PATIENCE)
            data = json.dumps([str(argument) for argument in arguments]).encode()
            socket.send_fds(self._connection, [data], [theirs, *descriptors])
            answer, received, _, _ = socket.recv_fds(self._connection, _MAX_BYTES, 1)
            if not received:
                raise OSError("it has ended")
        except OSError as e:
            os.close(report)
            self.close()
            raise EngineKilledError(f"the process from which engines are forked was lost: {e}") from None
        finally:
            os.close(theirs)
        return ForkedProcess(int(answer), received[0], report)

    def close(self) -> None:
        """Ends the process; those that it has forked go on."""
        if self._process is not None:
            self._connection.close()
            end_process(self._process)
            self._process, self._is_ready = None, False


class ForkedProcess:
    """A child of a fork server, with those methods of ``subprocess.Popen`` that are used for engines."""

    def __init__(self, pid: int, pidfd: int, report: int) -> None:
        """``report``: the read end of the pipe to which the fork server writes the exit code."""
        self.pid, self._pidfd, self._report = pid, pidfd, report
        self.returncode: int | None = None
        #: Held while the exit code is read, and while a signal is sent.
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def _wait(self, timeout: float | None) -> int | None:
        """The exit code, as ``Popen`` has it; -SIGKILL if the fork server was killed before it could report it."""
        if self.returncode is None and _is_readable(self._pidfd, timeout):
            with self._lock:
                if self.returncode is None:
                    data = os.read(self._report, 16) if _is_readable(self._report, _REPORT_PATIENCE) else b""
                    self.returncode = int(data) if data else -signal.SIGKILL
                    os.close(self._pidfd)
                    os.close(self._report)
        return self.returncode

    def kill(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def _is_readable(descriptor: int, timeout: float | None) -> bool:
    poll = select.poll()  # select takes descriptors below 1024 only
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1e3))


def serve_forks(descriptor: int, run: Callable[[list[str]], int]) -> None:
    """The fork server: forks children that ``run`` with their arguments, until its parent ends or closes the socket.

    To be called in the main thread, after the imports, and before anything starts a thread that a child would lack.
    """
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    gc.collect()
    gc.freeze()  # collections in children would write to the pages that they share
    return_freed_memory()
    connection.send(b"r")
    #: Process ids, and pipes for exit codes, by pidfd.
    children: dict[int, tuple[int, int]] = {}
    while True:
        ready, _, _ = select.select([descriptor, *children], [], [])
        for pidfd in (each for each in ready if each in children):
            pid, report = children.pop(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):  # nobody waits for it
                os.write(report, str(code).encode())
            os.close(pidfd)
            os.close(report)
        if descriptor in ready:
            data, received, _, _ = socket.recv_fds(connection, _MAX_BYTES, _MAX_DESCRIPTORS)
            if not data:
                return
            report, *descriptors = received
            pid = os.fork()
            if not pid:
                os.setpgid(0, 0)
                connection.close()
                for other in (report, *children, *(pipe for _, pipe in children.values())):
                    os.close(other)
                code = 1
                try:
                    code = run([*json.loads(data), *map(str, descriptors)])
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            for each in descriptors:
                os.close(each)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, report
            with contextlib.suppress(OSError):  # the parent has ended
                socket.send_fds(connection, [str(pid).encode()], [pidfd])
