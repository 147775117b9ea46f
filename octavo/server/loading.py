"""Answers while the model loads: 503 with how far the start is, so that no client takes the server for a dead one."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from socket import socket

from octavo.core.server_options import ServerOptions
from octavo.core.startup import LOADING

#: Bytes of a request's head that are waited for, and seconds that all of a connection may take.
_MAX_HEAD = 64 << 10
_TIMEOUT = 5.0


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
                await reader.readuntil(b"\r\n\r\n")
                writer.write(progress.response())
                await writer.drain()
                if writer.can_write_eof():
                    writer.write_eof()
                # A connection that is closed before its body has been read is reset, and the answer lost.
                while await reader.read(_MAX_HEAD):
                    pass
        writer.close()

    # The server closes its socket at its end: its own descriptor.
    server = await asyncio.start_server(answer, sock=sock.dup(), ssl=tls, limit=_MAX_HEAD)
    try:
        yield
    finally:
        server.close()
        logging.getLogger("octavo").removeHandler(progress)


class _LastLine(logging.Handler):
    """Remembers the last thing that the start said of the weights; other lines hold what keys are to protect."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._begin = time.monotonic()
        self._line = "starting"

    def emit(self, record: logging.LogRecord) -> None:
        if (message := record.getMessage()).startswith(LOADING):
            self._line = message

    def response(self) -> bytes:
        """The response to any request."""
        message = f"the model is loading, for {time.monotonic() - self._begin:.0f} s: {self._line}"
        error = {"message": message, "type": "server_error", "param": None, "code": "loading"}
        body = json.dumps({"error": error}).encode()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body
