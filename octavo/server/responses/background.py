"""Responses that are made in the background: no client has to wait for them, and any number can follow their events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from octavo.server.api_errors import ApiError, as_api_error, invalid
from octavo.server.pending_response import Event, encode_event
from octavo.server.renamed_chat import renamed_outputs
from octavo.server.responses.pending_answer import PendingAnswer, encoded
from octavo.server.responses.store import ResponseStore, Run

#: Most events that are sent at once to a client that resumes a stream.
_BATCH = 256

logger = logging.getLogger("octavo.server")


class BackgroundResponse(Run):
    """A response that is made by a task of its own, within the bounds of the store: it ends if it is forgotten."""

    def __init__(self, pending: PendingAnswer, store: ResponseStore, deadline: float, *, keeps_events: bool) -> None:
        """``deadline`` on the loop's clock, after which the response fails."""
        self.id = pending.growing.response.id
        self.keeps_events = keeps_events
        #: Of its events, if they are kept; else of those that tell of its output, as long as that grows.
        self.num_bytes = 0
        self._pending: PendingAnswer | None = pending
        self._store = store
        self._deadline = deadline
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self._refusal: ApiError | None = None
        self._task: asyncio.Task[None] | None = None
        self._add(pending.growing.enqueue())

    @property
    def has_ended(self) -> bool:
        """Whether the response is as it stays."""
        return self._pending is None

    async def start(self) -> bytes:
        """Begins to make the response; as it is at first, as JSON.

        Raises:
            ApiError: it is not taken: the queue is full, or the store has no room for it.
        """
        pending = self._pending
        assert pending is not None
        first = pending.encode()
        self._task = asyncio.create_task(self._run(pending))
        await asyncio.sleep(0)  # the task enters the queue, or fails
        if self._refusal is not None:
            raise self._refusal
        self._store.put(self.id, pending.stored(self))
        if self.id not in self._store:
            message = "the response has no room in this server's memory of responses (max_stored_response_bytes)"
            raise invalid("background", message, "too_large")
        return first

    def encode(self) -> bytes:
        """The response as it is, with the items that are whole, as JSON; of one that has not ended."""
        assert self._pending is not None
        response = self._pending.growing.response
        return encoded(
            response.model_copy(update={"output": [item for item in response.output if item.status != "in_progress"]})
        )

    def cancel(self) -> None:
        """Ends the response soon, unless it has ended."""
        if self._task is not None and not self.has_ended and not self._task.cancelling():
            self._task.cancel()

    async def stop(self) -> None:
        """Ends the response, unless it has ended, and waits until it has let go of its blocks."""
        self.cancel()
        if self._task is not None and not self.has_ended:
            await asyncio.wait({self._task})

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events that come after the one with this number, as they were and will be sent, until the last.

        The first increment is empty, so that the client knows that it is heard.
        """
        yield b""
        position = after + 1
        while True:
            changed = self._changed
            if position < len(self._events):
                batch = self._events[position : position + _BATCH]
                position += len(batch)
                yield b"".join(batch)
            elif self.has_ended:
                return
            else:
                await changed.wait()

    async def _run(self, pending: PendingAnswer) -> None:
        growing, outputs = pending.growing, renamed_outputs(pending.chat, pending.names)
        try:
            async with asyncio.timeout_at(self._deadline), aclosing(outputs):
                async for choice in outputs:
                    self._add(pending.grow(choice))
                    if growing.has_ended:
                        self._end(pending)
                    else:
                        self._store.grow(self.id, self.num_bytes)
        except asyncio.CancelledError:
            if not self.has_ended:
                self._add(growing.cancel())
                self._end(pending)
        except Exception as e:
            error = as_api_error(e)
            if not self.has_ended:
                self._refusal = None if self.id in self._store else error
                self._add(growing.fail(error))
                self._end(pending)

    def _end(self, pending: PendingAnswer) -> None:
        """The response stays as it is."""
        self._pending = None
        if not self.keeps_events:
            self.num_bytes = 0
        self._store.replace(self.id, pending.stored(self))
        self._notify()
        logger.info("background response %s: %s", self.id, pending.growing.response.status)

    def _add(self, events: list[Event]) -> None:
        data = [encode_event(event) for event in events if self.keeps_events or "response" not in event]
        self.num_bytes += sum(map(len, data))
        if self.keeps_events:
            self._events += data
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
