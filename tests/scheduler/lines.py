"""A measure of work that no machine's speed changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def lines_run_by(call: Callable[[], object]) -> int:
    """Lines of Python that a call executes."""
    count = 0

    def trace(frame: object, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count
