"""HTTP on one connection: uvicorn's protocol with a limit on the time that the head of a request may take.

It is the one on h11 also where httptools is installed: h11 bounds the size of a head (16 KiB), httptools does not.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class HttpProtocol(H11Protocol):
    """Owns one connection.

    Invariant: while no request of it is being answered, its client has ``header_timeout`` seconds to bring a whole
    head, counted from the first byte (of a new connection: from its beginning), or the rest of a body whose request
    was refused before. Between requests uvicorn's ``timeout_keep_alive`` holds.
    """

    def __init__(self, *args: Any, header_timeout: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_timeout = header_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        #: Set when the connection has ended.
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See ``asyncio.Protocol``."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        super().connection_lost(exc)
        self._stop_timer()
        self.closed.set()

    def _watch_head(self) -> None:
        """To be called when bytes have come, which end the wait that ``timeout_keep_alive`` limits."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._head_timer is None:
            # uvicorn's own way to end a connection that waits in vain.
            self._head_timer = self.loop.call_later(self._header_timeout, self.timeout_keep_alive_handler)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
