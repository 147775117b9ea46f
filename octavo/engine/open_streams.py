"""The requests of an ``AsyncLLM`` that have begun and not ended: streams, and those that are still being prepared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octavo.engine.request_state import RequestState
from octavo.engine.request_stream import QueuedTokens, RequestStream


class OpenStreams:
    """Owns the streams of open requests, and knows when nothing is open."""

    def __init__(self) -> None:
        self.queued = QueuedTokens()
        self._streams: dict[str, RequestStream] = {}
        self._num_preparing = 0
        #: Set while there is no stream; and while, besides, nothing is being prepared.
        self._no_stream, self._nothing = asyncio.Event(), asyncio.Event()
        self._tell()

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[RequestStream]:
        """Of the streams that there are now; they may end meanwhile."""
        return iter(list(self._streams.values()))

    def has(self, request: RequestState) -> bool:
        """Whether the request is open; another may have its id since it has ended."""
        stream = self._streams.get(request.request_id)
        return stream is not None and stream.request is request

    def of(self, request: RequestState) -> RequestStream:
        """The stream of an open request."""
        return self._streams[request.request_id]

    def add(self, request: RequestState, on_close: Callable[[RequestState], None]) -> RequestStream:
        """Opens a request's stream; ``on_close`` is called when its reader closes it."""
        stream = self._streams[request.request_id] = RequestStream(request, on_close)
        self.queued.add(request.group_id, len(request.prompt_token_ids))
        self._tell()
        return stream

    def remove(self, request: RequestState) -> RequestStream:
        """Its stream, which ends."""
        self.queued.remove(request.group_id)
        stream = self._streams.pop(request.request_id)
        self._tell()
        return stream

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A request is tokenized, its images are decoded, its grammar is compiled: before it has a stream."""
        self._num_preparing += 1
        self._tell()
        try:
            yield
        finally:
            self._num_preparing -= 1
            self._tell()

    async def no_stream(self) -> None:
        """Waits until no stream is open."""
        await self._no_stream.wait()

    async def nothing(self) -> None:
        """Waits until no stream is open, and none will be, as no request is being prepared."""
        await self._nothing.wait()

    def _tell(self) -> None:
        num_streams = len(self._streams)
        for event, count in ((self._no_stream, num_streams), (self._nothing, num_streams + self._num_preparing)):
            if count:
                event.clear()
            else:
                event.set()
