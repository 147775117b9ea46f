"""The requests of ``AsyncLLM``: the output of each as an async iterator, and how many wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from octavo.core.errors import OctavoError
from octavo.core.outputs import RequestOutput
from octavo.engine.request_state import RequestState


class RequestStream:
    """The output of one request in increments; the last one is finished.

    Increments that are not read yet are merged into one: a slow reader gets fewer of them and misses nothing. The
    request runs to its end unless ``close`` is called.

    Raises (while iterating):
        EngineDeadError: the engine died before the request's end.
    """

    def __init__(self, request: RequestState, on_close: Callable[[RequestState], None]) -> None:
        """``on_close`` aborts the request unless it has ended."""
        self.request = request
        self._on_close = on_close
        self._unread = self._ended = False
        self._error: OctavoError | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        self._unread = False
        output = self.request.take()
        self._ended = output.finished
        return output

    def close(self) -> None:
        """Aborts the request if it has not ended; never waits."""
        self._ended = True
        self._unread = False
        self._on_close(self.request)

    def notify(self) -> None:
        """The request has new output."""
        self._unread = True
        self._changed.set()

    def fail(self, error: OctavoError) -> None:
        """Iteration raises ``error`` once unread output has been taken."""
        self._error = error
        self._changed.set()


@dataclass(slots=True)
class QueuedTokens:
    """Prompt tokens of the requests of which nothing has been computed yet, by group or another name."""

    lengths: dict[Hashable, int] = field(default_factory=dict)
    tokens: int = 0

    def add(self, group_id: Hashable, length: int) -> None:
        """A request with a prompt of this length waits."""
        self.lengths[group_id] = length
        self.tokens += length

    def remove(self, group_id: Hashable) -> None:
        """It waits no more; nothing happens if it did not."""
        self.tokens -= self.lengths.pop(group_id, 0)
