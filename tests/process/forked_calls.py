"""The module of a fork server, for tests: children do what their first argument says."""

from __future__ import annotations

import os
import signal
import sys
import time

from octavo.process.fork_server import FORKS, serve_forks


def main(arguments: list[str]) -> int:
    if arguments[0] == FORKS:
        serve_forks(int(arguments[1]), main)
        return 0
    what, descriptor = arguments[0], int(arguments[-1])
    if what == "tell":
        open_now = len(os.listdir("/proc/self/fd")) - 1  # without the folder's own
        os.write(descriptor, f"{os.getpid()} {os.getppid()} {os.getpgid(0)} {open_now} {arguments[1]}".encode())
    elif what == "raise":
        raise RuntimeError("on purpose")
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGSEGV)
    else:
        time.sleep(60)
    return 7


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
