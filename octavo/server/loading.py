"""Answers while the model loads: 503 with how far the start is, so that no client takes the server for a dead one."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from html import escape
from socket import socket
from typing import Any

from octavo.core.server_options import ServerOptions
from octavo.core.startup import LOADING

#: Bytes of a request's head that are waited for, and seconds that all of a connection may take.
_MAX_HEAD = 64 << 10
_TIMEOUT = 5.0

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def answers_while_loading(sock: socket, options: ServerOptions) -> AsyncIterator[None]:
    """Answers every request at the socket, which listens, with status 503; the socket stays open."""
    progress = _LastLine()
    logging.getLogger("octavo").addHandler(progress)
    tls = None
    if options.tls_cert is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(options.tls_cert, options.tls_key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_TIMEOUT):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(progress.page() if b"text/html" in head.lower() else progress.response(head))
                await writer.drain()
                if writer.can_write_eof():
                    writer.write_eof()
                # A connection that is closed before its body has been read is reset, and the answer lost.
                while await reader.read(_MAX_HEAD):
                    pass
        writer.close()

    waiting = _Acceptor(sock, answer, tls)
    try:
        yield
    finally:
        waiting.close()
        logging.getLogger("octavo").removeHandler(progress)


class _Acceptor:
    """Accepts connections until it is closed; those that it has accepted are answered all the same.

    A server of asyncio leaves connections open, without an answer, whose transport is not made yet when it is closed.
    """

    def __init__(self, sock: socket, answer: Answer, tls: ssl.SSLContext | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock, self._answer, self._tls = sock, answer, tls
        self._blocking = sock.getblocking()
        self._tasks: set[asyncio.Task[object]] = set()
        sock.setblocking(False)
        self._loop.add_reader(sock, self._accept)

    def _accept(self) -> None:
        try:
            connection = self._sock.accept()[0]
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # descriptors have run out: clients wait for the server
            self._loop.remove_reader(self._sock)
            return
        connection.setblocking(False)
        reader = asyncio.StreamReader(_MAX_HEAD)
        protocol = asyncio.StreamReaderProtocol(reader, self._answer)
        task = asyncio.ensure_future(self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls))
        self._tasks.add(task)
        task.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # such as of a handshake of TLS that fails

    def close(self) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.setblocking(self._blocking)


class _LastLine(logging.Handler):
    """Remembers the last thing that the start said of the weights; other lines hold what keys are to protect."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._begin = time.monotonic()
        self._line = "starting"

    def emit(self, record: logging.LogRecord) -> None:
        if (message := record.getMessage()).startswith(LOADING):
            self._line = message

    @property
    def _message(self) -> str:
        return f"the model is loading, for {time.monotonic() - self._begin:.0f} s: {self._line}"

    def response(self, head: bytes) -> bytes:
        """The response to any request of a program, by the head of which its API is known."""
        # Not by api_errors, whose imports take longer than all of this.
        path = head.split(b"\r\n", 1)[0].split(b" ")[1:2]
        if path and path[0].startswith((b"/v1/messages", b"/messages")):
            body: dict[str, Any] = {"type": "error", "error": {"type": "overloaded_error", "message": self._message}}
        else:
            error = {"message": self._message, "type": "server_error", "param": None, "code": "loading"}
            body = {"error": error}
        return _response(json.dumps(body).encode(), "application/json")

    def page(self) -> bytes:
        """The response to a browser, which asks again after a second."""
        body = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="1">'
            '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
            f"<title>Octavo is starting</title><h1>Octavo is starting</h1><p>{escape(self._message)}</p></html>"
        )
        return _response(body.encode(), "text/html; charset=utf-8", "Content-Security-Policy: default-src 'none'\r\n")


def _response(body: bytes, media_type: str, headers: str = "") -> bytes:
    head = (
        f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: {media_type}\r\nRetry-After: 1\r\n{headers}"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
