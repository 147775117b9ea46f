"""What the tests of the sandbox call in its processes."""

from __future__ import annotations

import os
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


def recurse(content: bytes) -> bytes:
    return recurse(content)


def crash(content: bytes) -> bytes:
    os.kill(os.getpid(), int(content))
    return b""


def fail(content: bytes) -> bytes:
    raise ValueError(content.decode())
