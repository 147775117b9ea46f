"""What is typed or piped to ``octavo chat``, a message at a time."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from octavo.cli.chat_history import HistoryFile
from octavo.cli.chat_lines import Completions, Typed, read_message, read_messages
from octavo.cli.terminal_text import is_smart_terminal


def typed_messages(history: HistoryFile | None, completions: Completions) -> Iterator[Typed]:
    """Messages and commands, stripped, without empty ones. Ctrl-C while one is typed drops it.

    Args:
        history: what was typed in earlier conversations; None: nothing is remembered.
        completions: what Tab offers.
    """
    if not sys.stdin.isatty():
        yield from read_messages(_piped_line)
        return
    read = _keyboard(history, completions)
    # A shell that starts the program in the background makes it ignore SIGINT; a terminal needs Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        try:
            typed = read()
        except KeyboardInterrupt:
            print("(Ctrl-D or /exit leaves)", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return
        else:
            yield typed


@contextmanager
def keys_unseen() -> Iterator[None]:
    """What is typed within it does not appear between the lines of an answer, but where the next message is typed."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    silent = list(before)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _keyboard(history: HistoryFile | None, completions: Completions) -> Callable[[], Typed]:
    """Reads a message of a person."""
    if is_smart_terminal():
        from octavo.cli.chat_keyboard import Keyboard

        return Keyboard(history, completions).read
    with suppress(ImportError):
        import readline  # noqa: F401  gives input() line editing, where Python has it
    return lambda: read_message(_typed_line)


def _typed_line(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)  # what goes into a file is the answers
    return input()


def _piped_line(prompt: str) -> str:
    raw = sys.stdin.buffer.readline()
    if not raw:
        raise EOFError
    return raw.decode("utf-8", errors="replace")
