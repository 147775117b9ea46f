"""Large answers: made and encoded beside the event loop, in slices.

The logprobs of a long prompt are tens of megabytes of JSON. What makes and encodes them in one call holds the
interpreter for seconds; in slices of some milliseconds the event loop has a turn after each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json

from octavo.core.outputs import RequestOutput

T = TypeVar("T")

#: Logprobs from which on an answer is large; fewer take some milliseconds.
LARGE = 4096
#: Entries of a list that are encoded at once.
_SLICE = 64

#: A single thread: an answer waits rather than the event loop.
_writer = ThreadPoolExecutor(1, thread_name_prefix="octavo-answers")


class LazyList:
    """A list in an answer whose entries are made when they are encoded, so that they never exist all at once."""

    def __init__(self, items: Sequence[Any], convert: Callable[[Any], Any]) -> None:
        """``convert`` makes an entry of an item."""
        self._items, self._convert = items, convert

    def slices(self) -> Iterator[list[Any]]:
        """The entries in their order, a few at a time."""
        for start in range(0, len(self._items), _SLICE):
            yield [self._convert(item) for item in self._items[start : start + _SLICE]]


def encode_in_slices(value: Any) -> bytes:
    """A response as JSON, without fields that were not set, as ``ResponseModel.encode`` has it."""
    return b"".join(_pieces(value))


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, BaseModel):
        given = value.model_fields_set
        value = {name: getattr(value, name) for name in type(value).model_fields if name in given}
    if isinstance(value, LazyList):
        yield from _list(to_json(entries)[1:-1] for entries in value.slices())
    elif isinstance(value, dict):
        separator = b"{"
        for name, entry in value.items():
            yield separator + to_json(name) + b":"
            yield from _pieces(entry)
            separator = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel) and len(value) > _SLICE:
        # Of many each is small.
        yield from _list(entry.model_dump_json(exclude_unset=True).encode() for entry in value)
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        yield from _list(b"".join(_pieces(entry)) for entry in value)
    elif isinstance(value, list) and len(value) > _SLICE:
        starts = range(0, len(value), _SLICE)
        yield from _list(to_json(value[start : start + _SLICE])[1:-1] for start in starts)
    else:
        yield to_json(value)


def _list(entries: Iterator[bytes]) -> Iterator[bytes]:
    separator = b"["
    for entry in entries:
        yield separator
        yield entry
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


def num_logprobs(outputs: Sequence[RequestOutput]) -> int:
    """How many logprobs there are in outputs: of the tokens of prompts and completions, and of the likeliest ones."""
    lists = [output.prompt_logprobs for output in outputs]
    lists += [completion.logprobs for output in outputs for completion in output.outputs]  # type: ignore[misc]
    # Positions of one list have about as many.
    return sum(len(found) * len(found[-1] or ()) for found in lists if found)


async def run_if_large(size: int, call: Callable[..., T], *args: Any) -> T:
    """The result of a call that makes an answer with ``size`` logprobs; in another thread if that is large."""
    if size < LARGE:
        return call(*args)
    return await asyncio.get_running_loop().run_in_executor(_writer, copy_context().run, call, *args)
