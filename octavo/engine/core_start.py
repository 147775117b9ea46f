"""Starts and ends a core's process. It imports little, so that a command can start the core before anything else."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.core.errors import EngineDeadError, EngineKilledError
from octavo.engine.blame import read_recorder, recorder_memory
from octavo.process.start_process import (
    ChildProcess,
    end_process,
    how_it_ended,
    is_stopped,
    num_out_of_memory,
    start_process,
    was_killed,
)

if TYPE_CHECKING:
    from octavo.process.fork_server import ForkServer

MODULE = "octavo.engine.core_process"
#: The path of a Unix socket has at most 107 bytes.
_LONGEST_TEMP_PATH = 70


class CoreProcess:
    """The process of a core: imports its modules at once, and loads a model when ``AsyncLLM`` sends ``Start``.

    ``octavo serve`` starts it before its own imports, so that both processes import at the same time. It ends with this
    process, however that ends.
    """

    def __init__(self, forks: ForkServer | None = None) -> None:
        """``forks``: a server for ``MODULE``; if it is ready, the process has its modules at once.

        Raises:
            EngineKilledError: that server was lost just now.
        """
        temp = tempfile.gettempdir()
        #: Private folder of the sockets.
        self.folder = Path(tempfile.mkdtemp(prefix="octavo-", dir=temp if len(temp) <= _LONGEST_TEMP_PATH else "/tmp"))
        #: Readable when the core has ended or is about to.
        self.life, theirs = socket.socketpair()
        self._recorder: int | None = recorder_memory()
        self._out_of_memory = num_out_of_memory()
        with theirs:
            descriptors = [theirs.fileno(), self._recorder]
            try:
                forked = None if forks is None else forks.fork([self.folder], descriptors)
            except EngineKilledError:
                self._release()
                raise
            self._process: ChildProcess = forked or start_process(
                MODULE, self.folder, *descriptors, pass_fds=descriptors, stdin=subprocess.DEVNULL
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Kills it, even if it hangs, without waiting for its end."""
        self._process.kill()

    def kill(self) -> None:
        end_process(self._process)
        self._release()

    def _release(self) -> None:
        self.life.close()
        if self._recorder is not None:
            os.close(self._recorder)
            self._recorder = None
        self.remove_folder()

    async def end_and_wait(self) -> None:
        self.end()
        import asyncio

        await asyncio.to_thread(self.kill)

    def remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def read_recorder(self) -> set[int]:
        """Returns the groups of its last steps (``FlightRecorder``)."""
        return set() if self._recorder is None else read_recorder(self._recorder)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it, so that it does not hang by itself."""
        return is_stopped(self.pid)

    def exit_error(self) -> EngineDeadError:
        """Describes how the process ended; it may take some milliseconds more to end."""
        try:
            code = self._process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            return EngineDeadError("the engine's process is ending")
        kind = EngineKilledError if was_killed(code, self._out_of_memory) else EngineDeadError
        return kind(f"the engine's process {how_it_ended(code)}")
