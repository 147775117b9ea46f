"""Text for a terminal, and what kind of one there is."""

from __future__ import annotations

import os
import sys

#: Characters that a terminal obeys or hides instead of showing them: C0 (but line feed and tab), DEL, C1, and those
#: that change the direction of text or have no width, with which a line can be made to look like another. What has a
#: picture in Unicode is shown as it; carriage returns are left out, as line feeds follow them.
_SHOWN: dict[int, int | str | None] = {
    **{code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)},
    0x0D: None,
    0x7F: 0x2421,
    **{code: f"<U+{code:04X}>" for code in range(0x80, 0xA0)},
    **{code: f"<U+{code:04X}>" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029)},
}


def printable(text: str) -> str:
    """A text without characters that a terminal would obey: they are shown, as in ``␛[2J``, or left out."""
    return text.translate(_SHOWN)


def for_output(text: str) -> str:
    """What is written of a text to standard output: to a file or a pipe exactly it, to a terminal what is printable."""
    return printable(text) if sys.stdout.isatty() else text


def notice(text: str) -> None:
    """Says something that is no answer, on standard error."""
    print(printable(text), file=sys.stderr)


def is_smart_terminal() -> bool:
    """Whether standard output is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
