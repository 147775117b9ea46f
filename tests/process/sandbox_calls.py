"""What the tests of the sandbox call in its processes."""

from __future__ import annotations

import os
import signal
import time


def echo(content: bytes) -> bytes:
    return content


def process(content: bytes) -> bytes:
    return str(os.getpid()).encode()


def hold(path: bytes) -> bytes:
    """Waits until there is a file."""
    while not os.path.exists(path):
        time.sleep(0.01)
    return b""


def begin(path: bytes) -> bytes:
    """Says that it has begun, by a file with its process, and never ends."""
    with open(path + b".begun", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + b".begun", path)
    while True:
        time.sleep(1)


def loop(content: bytes) -> bytes:
    while True:
        pass


def fill(content: bytes) -> bytes:
    text = "a"
    while True:
        text += text


def join(content: bytes, data: bytes) -> bytes:
    return content + data


def number_then_hold(folder: bytes) -> bytes:
    """Leaves a file named after its process, and waits until the file ``go`` is beside it."""
    number = str(os.getpid()).encode()
    with open(os.path.join(folder, number), "w"):
        pass
    while not os.path.exists(os.path.join(folder, b"go")):
        time.sleep(0.01)
    return number


def break_process(content: bytes) -> bytes:
    """From now on ``crash_if_broken`` crashes in this process."""
    os.environ["BROKEN"] = "1"
    return b""


def crash_if_broken(content: bytes) -> bytes:
    return crash(content) if "BROKEN" in os.environ else b"fine"


def recurse(content: bytes) -> bytes:
    return recurse(content)


def crash(content: bytes) -> bytes:
    if int(content) != signal.SIGKILL:
        signal.signal(int(content), signal.SIG_DFL)  # a parent may have had it ignored, as nohup does
    os.kill(os.getpid(), int(content))
    return b""


def fail(content: bytes) -> bytes:
    raise ValueError(content.decode())
