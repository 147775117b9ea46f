"""A minimal HTTP/1.1 client for load generation: POST, keep-alive, bodies as they arrive.

The client shares its cores with the server that it measures. With 64 streams httpx takes 0.23 ms of processor time an
event and delays new requests for seconds in its connection pool; here an event takes 25 microseconds, JSON included.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from urllib.parse import urlsplit

#: Longest head of a response, and longest line before a chunk, in bytes.
HEAD_BYTES = 64 << 10
CHUNK_LINE_BYTES = 1 << 10

#: Called with the status, a piece of the body and its arrival (``time.perf_counter()``); an exception ends the request.
OnBody = Callable[[int, bytes, float], None]


class CutOffError(Exception):
    """The connection was closed before the end of the response."""


class ProtocolError(Exception):
    """The response is not HTTP/1.1."""


class Poster:
    """Posts to one URL. Owns the connections and reuses those that the server keeps open."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        """``url`` begins with http:// or https://.

        Raises:
            ValueError: the URL has no host, or its port is invalid.
        """
        parts = urlsplit(url)
        if not parts.hostname:
            raise ValueError(f"there is no host in {url!r}")
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        lines = [f"POST {parts.path or '/'} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._head = "\r\n".join(lines).encode("latin-1")
        self._idle: list[_Connection] = []

    async def post(self, content: bytes, on_body: OnBody) -> int:
        """Sends ``content`` and passes the response's body to ``on_body`` as it arrives; returns the status.

        Raises:
            OSError: no connection could be made.
            CutOffError: the connection was closed before the end of the response.
            ProtocolError: the response is not HTTP/1.1.
        """
        request = b"%b\r\nContent-Length: %d\r\n\r\n%b" % (self._head, len(content), content)
        while self._idle:
            # The server may close an idle connection just as it is reused; then the next one is tried.
            connection = self._idle.pop()
            if not connection.closed:
                try:
                    return await self._exchange(connection, request, on_body)
                except CutOffError:
                    if connection.responded:
                        raise
        return await self._exchange(await self._new_connection(), request, on_body)

    async def connect(self) -> None:
        """Makes a connection, which the first request takes.

        Raises:
            OSError: it cannot be made.
        """
        self._idle.append(await self._new_connection())

    async def _new_connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls or None)
        return connection

    def close(self) -> None:
        """Closes idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _exchange(self, connection: _Connection, request: bytes, on_body: OnBody) -> int:
        try:
            response = await connection.send(request, on_body)
        except BaseException:
            connection.abort()
            raise
        if response.keep_alive:
            self._idle.append(connection)
        else:
            connection.abort()
        return response.status


class ResponseParser:
    """Parses a response as bytes arrive; ``complete`` is set with the last of them."""

    def __init__(self) -> None:
        self.status = 0
        self.complete = False
        self.keep_alive = True
        self._buffer = b""
        self._chunked = False
        #: Bytes left of the body, or of the chunk; None: the body ends with the connection.
        self._left: int | None = 0

    def feed(self, data: bytes) -> bytes:
        """Parses bytes; returns the part of the body in them.

        Raises:
            ProtocolError: they are not part of an HTTP/1.1 response.
        """
        data = self._buffer + data if self._buffer else data
        self._buffer = b""
        while not self.status:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._keep(data, HEAD_BYTES)
                return b""
            self._read_head(data[:end])
            data = data[end + 4 :]
        if self._chunked:
            return self._dechunk(data)
        if self._left is None:
            return data
        self._left -= len(data)
        self.complete = self._left <= 0
        if self._left < 0:
            raise ProtocolError("the body is longer than its head says")
        return data

    def end(self) -> bool:
        """The connection was closed; returns whether the response is complete."""
        self.complete = self.complete or (self.status > 0 and not self._chunked and self._left is None)
        return self.complete

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip().lower()
        try:
            version, status = first.split(b" ")[:2]
            number = int(status)
            length = int(headers[b"content-length"]) if b"content-length" in headers else None
        except ValueError:
            raise ProtocolError(f"not the head of a response: {first[:80]!r}") from None
        if not version.startswith(b"HTTP/1."):
            raise ProtocolError(f"not the head of a response: {first[:80]!r}")
        if 100 <= number < 200:
            return  # an interim response; the final one follows
        self.status = number
        self._chunked = b"chunked" in headers.get(b"transfer-encoding", b"")
        self._left = 0 if self._chunked or number in (204, 304) else length
        connection = headers.get(b"connection", b"")
        asked = b"close" not in connection and (version != b"HTTP/1.0" or b"keep-alive" in connection)
        self.keep_alive = asked and self._left is not None

    def _dechunk(self, data: bytes) -> bytes:
        """The contents of the chunks; ``_left`` includes the line end of a chunk."""
        body = []
        at = 0
        assert self._left is not None
        while at < len(data):
            if self._left:
                part = data[at : at + self._left]
                at += len(part)
                # Without the line end.
                body.append(part[: max(self._left - 2, 0)])
                self._left -= len(part)
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._keep(data[at:], CHUNK_LINE_BYTES)
                break
            try:
                size = int(data[at:end].split(b";")[0], 16)
            except ValueError:
                raise ProtocolError(f"not the size of a chunk: {data[at:end][:80]!r}") from None
            at = end + 2
            if size == 0:
                # Trailers may follow; a connection with trailers is not reused.
                self.complete = True
                self.keep_alive = self.keep_alive and data[at:] == b"\r\n"
                break
            self._left = size + 2
        return b"".join(body)

    def _keep(self, data: bytes, most: int) -> None:
        if len(data) > most:
            raise ProtocolError(f"more than {most} bytes without the end of a line or head")
        self._buffer = data


class _Connection(asyncio.Protocol):
    """One connection; at most one request at a time."""

    def __init__(self) -> None:
        self.closed = False
        self._transport: asyncio.Transport
        self._response = ResponseParser()
        self._on_body: OnBody
        self._done: asyncio.Future[ResponseParser] | None = None

    @property
    def responded(self) -> bool:
        """Whether a response to the last request has begun."""
        return self._response.status > 0

    def send(self, request: bytes, on_body: OnBody) -> asyncio.Future[ResponseParser]:
        """Sends a request; the future is done when the response is complete."""
        self._response = ResponseParser()
        self._on_body = on_body
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def abort(self) -> None:
        """Closes at once."""
        self.closed = True
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._done is None or self._done.done():
            self.abort()  # no request is open
            return
        response = self._response
        try:
            body = response.feed(data)
            if body:
                self._on_body(response.status, body, now)
        except Exception as e:
            self._done.set_exception(e)
            return
        if response.complete:
            self._done.set_result(response)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._done is not None and not self._done.done():
            if self._response.end():
                self._done.set_result(self._response)
            else:
                self._done.set_exception(CutOffError(str(exc or "the connection was closed")))
