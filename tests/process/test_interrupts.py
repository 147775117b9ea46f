"""Blocks that hold Ctrl-C back, by themselves."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from octavo.process.interrupts import HeldInterrupts, holding_interrupts
from tests.busy_machine import PATIENCE


@pytest.fixture(autouse=True)
def python_handler() -> Iterator[None]:
    """Python's own handler of SIGINT, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_comes_at_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), HeldInterrupts():
        signal.raise_signal(signal.SIGINT)
        done.append("the rest")
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_comes_once_and_where_it_may() -> None:
    with HeldInterrupts() as interrupts:
        interrupts.deliver()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.deliver()
        interrupts.deliver()


def test_the_outermost_of_nested_blocks_decides() -> None:
    @holding_interrupts
    def inner() -> str:
        signal.raise_signal(signal.SIGINT)
        return "done"

    with pytest.raises(KeyboardInterrupt), HeldInterrupts():
        assert inner() == "done"
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        inner()


def test_an_interrupt_goes_with_an_error_of_the_block() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, HeldInterrupts():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("wrong")
    assert isinstance(raised.value.__context__, ValueError)


def test_a_handler_of_the_program_is_called_at_once_and_stays() -> None:
    called: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    own = signal.getsignal(signal.SIGINT)
    with HeldInterrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert called == [signal.SIGINT]
        interrupts.deliver()
    assert signal.getsignal(signal.SIGINT) is own


def test_a_handler_that_is_installed_within_a_block_stays() -> None:
    with HeldInterrupts():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_block_in_another_thread_holds_nothing_back() -> None:
    entered, leave = threading.Event(), threading.Event()

    def block() -> None:
        with HeldInterrupts():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=block)
    thread.start()
    entered.wait()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    leave.set()
    thread.join()


@pytest.mark.parametrize(("impatience", "end"), [(1e9, (130, "")), (0.0, (0, "interrupted\n"))])
def test_a_second_interrupt_ends_the_process_if_it_comes_soon(impatience: float, end: tuple[int, str]) -> None:
    program = f"""
import signal
from octavo.process import interrupts
interrupts.IMPATIENCE = {impatience}
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with interrupts.HeldInterrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
    process = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False)
    assert (process.returncode, process.stdout) == end


def test_a_second_interrupt_ends_the_process_in_the_middle_of_a_long_kernel() -> None:
    program = """
import hashlib, os, signal, threading, time
from octavo.process import interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupts.IMPATIENCE = 1e9

def interrupt_twice():
    for _ in range(2):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

with interrupts.HeldInterrupts():
    threading.Thread(target=interrupt_twice).start()
    hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 2**31 - 1)  # some half an hour without a look at signals
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=PATIENCE, check=False).returncode == 130


def test_a_forked_process_is_watched_by_itself() -> None:
    program = """
import os, signal
from octavo.process import interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
with interrupts.HeldInterrupts():
    pass
ours = signal.set_wakeup_fd(-1)
signal.set_wakeup_fd(ours)
child = os.fork()
if child == 0:
    os._exit(int(signal.set_wakeup_fd(-1) != -1))
assert ours >= 0 and os.waitpid(child, 0)[1] == 0
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
