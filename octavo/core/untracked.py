"""Containers that the garbage collector does not visit, and freed memory that the C library keeps."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import TypeVar

C = TypeVar("C")

_untrack: Callable[[object], None] | None = None
if hasattr(ctypes, "pythonapi"):  # CPython's stable interface
    _untrack = ctypes.pythonapi.PyObject_GC_UnTrack
    _untrack.argtypes, _untrack.restype = [ctypes.py_object], None


def untracked(container: C) -> C:
    """The container itself, which the garbage collector no longer visits; for lists, tuples and sets.

    The collector looks at every element of every container for cycles of references: with requests of 100,000 tokens
    these are millions of integers in each full collection. Only for what can never be part of a cycle: a container of
    numbers, of bytes, of tuples of these. It is freed as any other when nothing refers to it.
    """
    if _untrack is not None:
        _untrack(container)
    return container


def return_freed_memory() -> None:
    """Gives memory back to the system that the C library keeps."""
    with contextlib.suppress(OSError, AttributeError):  # it is not glibc
        ctypes.CDLL(None).malloc_trim(0)
