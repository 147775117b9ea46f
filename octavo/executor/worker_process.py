"""A worker in a process of its own, started by ``MultiprocExecutor`` as ``python -m octavo.executor.worker_process``.

Arguments are the descriptors of the socket to the executor and of the memory of its messages, and the rank. It ends
when the executor does, for any reason, even while it computes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys

from octavo.executor.broadcast import Receiver, end_with
from octavo.executor.worker_loop import WorkerLoop


def main(arguments: list[str]) -> None:
    """The process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the executor's process handles them
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    descriptor, memory, rank = map(int, arguments)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    end_with(connection)
    gc.freeze()
    with contextlib.suppress(ConnectionError):  # the executor has ended
        WorkerLoop(Receiver(connection, memory), rank).run()


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # destroying torch and the weights would only take time
