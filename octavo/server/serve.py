"""Runs a server: starts the engine, binds the socket, handles signals, shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from octavo.config.engine_config import EngineConfig
from octavo.config.server_options import API_KEYS_VARIABLE, ServerOptions
from octavo.core.errors import ConfigError
from octavo.core.garbage import IDLE_INTERVAL, IdleCollector, return_freed_memory, settle_collector
from octavo.process.children import SECRET_VARIABLES
from octavo.process.startup import phase, profile, table
from octavo.server.http.connection import answers_while_loading
from octavo.server.http.middleware import read_api_keys

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.core_start import CoreProcess
    from octavo.server.logging import LineWriter, Tracer
    from octavo.server.metrics import Metrics
    from octavo.server.state import ServerState


logger = logging.getLogger("octavo.server")

#: Exit codes: after the engine has died (EX_SOFTWARE of sysexits.h; a supervisor should start the server again), and
#: after Ctrl-C during shutdown.
EXIT_ENGINE_DIED = 70
EXIT_INTERRUPTED = 130

#: Seconds for which a server whose engine has died still answers, with errors.
DEATH_GRACE = 2.0
#: Seconds for sending the last bytes after all requests have ended.
FLUSH = 5.0
#: Seconds after which a thread that works beside the event loop gives it a turn; Python's own 5 ms add up to a pause.
SWITCH_INTERVAL = 0.001
#: Connections waiting to be accepted.
BACKLOG = 2048


def serve(
    config: EngineConfig, options: ServerOptions, process: CoreProcess | None = None, *, profiles: bool = False
) -> int:
    """Serves until a signal or the death of the engine; returns the exit code.

    ``process``: the core's, if it was started ahead. ``profiles``: logs where the time of the start went.

    Raises:
        OctavoError: an option is wrong, the address is taken, or the model cannot be loaded.
    """
    from octavo.engine.core_start import CoreProcess
    from octavo.server.logging import Tracer

    options.check_engine(config)
    keys = read_api_keys(options, os.environ)
    # What is started from here on does not need them.
    for name in SECRET_VARIABLES:
        os.environ.pop(name, None)
    endpoint = options.otlp_traces_endpoint
    tracer = Tracer(options.model_names(config.model)[0], endpoint) if endpoint else None
    _allow_many_connections()
    sys.setswitchinterval(SWITCH_INTERVAL)
    open_to_all = not keys and not options.is_local
    with listening_socket(options) as sock:
        process = process or CoreProcess()
        try:
            from octavo.server.logging import start_logging

            check_plug_ins(options)
            writer = start_logging(options.log_format, options.log_level, options.log_file)
        except BaseException:
            process.kill()
            raise
        if open_to_all:
            logger.warning(
                "listening on %s without API keys: whoever reaches this address may use the server; "
                "set api_key_file or %s, or listen on 127.0.0.1",
                options.host,
                API_KEYS_VARIABLE,
            )
        try:
            return asyncio.run(_serve(config, options, keys, sock, process, writer, tracer, profiles=profiles))
        except KeyboardInterrupt:  # before the signal handlers were installed
            return EXIT_INTERRUPTED
        finally:
            writer.stop()


def check_plug_ins(options: ServerOptions) -> None:
    """Finds the classes and adapters that the options name, so that a wrong one is refused before a model is loaded.

    Raises:
        ConfigError: there is no such resolver or parser.
        AdapterError: there is no adapter at a path.
    """
    from octavo.engine.adapters import check_paths, make_resolver
    from octavo.server.answer_format import ChatFormats

    check_paths((options.lora_modules or {}).values())
    make_resolver(options.lora_resolver, options.lora_folder)
    ChatFormats(options.tool_call_parser, options.reasoning_parser)


def _allow_many_connections() -> None:
    """Raises the limit on open files, often 1024: each connection counts as one."""
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def listening_socket(options: ServerOptions) -> Iterator[socket.socket]:
    """A socket that listens at the address, so that a wrong or taken one fails before a model is loaded.

    Raises:
        ConfigError: the address cannot be bound, or the TLS files are invalid.
    """
    if options.tls_cert is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(options.tls_cert, options.tls_key)
        except OSError as e:  # includes SSLError
            raise ConfigError(f"cannot use tls_cert {options.tls_cert} with tls_key {options.tls_key}: {e}") from None
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Inherited by accepted connections: closes those whose client acknowledges nothing for so long (RFC 5482).
            milliseconds = int(options.stall_timeout * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        # Inherited too: an event is sent at once. Otherwise the second one waits until the client acknowledges the
        # first, up to 40 ms. asyncio sets it only for sockets that were made with a protocol number.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.bind((options.host, options.port))
            # Two sockets may be bound to one address, but only one listens: the other server is found before a model
            # is loaded.
            sock.listen(BACKLOG)
        except (OSError, OverflowError) as e:
            reason = getattr(e, "strerror", None) or e
            raise ConfigError(f"cannot listen on {options.host}:{options.port}: {reason}") from None
        yield sock


async def _serve(
    config: EngineConfig,
    options: ServerOptions,
    keys: list[str],
    sock: socket.socket,
    process: CoreProcess,
    writer: LineWriter,
    tracer: Tracer | None,
    *,
    profiles: bool,
) -> int:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.server.http.errors import make_deferred

    names = options.model_names(config.model)
    async with answers_while_loading(sock, options):
        started = asyncio.ensure_future(AsyncLLM.start(config, process))
        try:
            app, metrics = await asyncio.to_thread(_make_routes, options, names, keys, writer)
            llm = await started
        except BaseException:
            started.cancel()
            raise
        try:
            with phase("service"):
                service = await _make_service(llm, options, metrics, names, tracer)
                app.state.service = service
                if "generate" not in service.tasks:
                    make_deferred(app)
                settle_collector()
                lifecycle = _ServerLifecycle(service, _make_server(app, options, names))
        except BaseException:
            await llm.shutdown(0)
            raise
    if profiles:
        for line in table([profile("server"), *llm.startup_profiles]):
            logger.info("%s", line)
    try:
        return await lifecycle.run(sock)
    finally:
        await llm.shutdown(0)
        if tracer is not None:
            await asyncio.to_thread(tracer.shutdown)


def _make_routes(
    options: ServerOptions, names: list[str], keys: list[str], writer: LineWriter
) -> tuple[FastAPI, Metrics]:
    """The application, made while the engine loads, as are the imports of what serves it."""
    with phase("imports of the HTTP server"):
        _import_fastapi()
        for name in ("octavo.server.app", "uvicorn.lifespan.off", "octavo.server.http.connection"):
            importlib.import_module(name)
    from octavo.server.app import make_routes
    from octavo.server.metrics import Metrics
    from octavo.server.openai.protocol import ChatCompletionRequest

    with phase("routes"):
        metrics = Metrics(names[0], lambda: writer.dropped)
        app = make_routes(options, metrics, keys)
        ChatCompletionRequest.model_rebuild()  # most likely what the first request is
        return app, metrics


def _import_fastapi() -> None:
    """Imports FastAPI; its models of the OpenAPI page, half of its time, are built when somebody asks for the page."""
    from pydantic import BaseModel

    BaseModel.model_config["defer_build"] = True  # models inherit it
    try:
        importlib.import_module("fastapi")
    finally:
        del BaseModel.model_config["defer_build"]


async def _make_service(
    llm: AsyncLLM, options: ServerOptions, metrics: Metrics, names: list[str], tracer: Tracer | None
) -> ServerState:
    """The service of an engine that is ready, with what the options load at the start."""
    from octavo.engine.front_end import StatusLine
    from octavo.server.state import make_service

    service = make_service(llm, options, metrics, names, tracer)
    await service.load_modules()
    for replica, stats in enumerate(await llm.replica_stats()):
        metrics.on_state(stats, replica)
    llm.stat_loggers.append(metrics)
    if llm.config.log_stats_interval is None:
        llm.stat_loggers.append(StatusLine())
    return service


def _make_server(app: Any, options: ServerOptions, names: list[str]) -> uvicorn.Server:
    import uvicorn

    from octavo.server.http.connection import Acceptor, HttpProtocol, connection_limits

    class Server(uvicorn.Server):
        """uvicorn's server with an acceptor of our own, and without its signal handling, which ends by the signal and
        not with an exit code."""

        acceptor: Acceptor | None = None

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup([])
            [sock] = sockets or []
            limit, limit_by_address = connection_limits(options)
            self.acceptor = Acceptor(
                sock,
                lambda: HttpProtocol(
                    self.config, self.server_state, self.lifespan.state, header_timeout=options.header_timeout
                ),
                limit=limit,
                limit_by_address=limit_by_address,
                tls=self.config.ssl,
                handshake_timeout=options.header_timeout,
            )
            self.acceptor.start()
            logger.info("serving %s on %s", ", ".join(names), _url(sock, options))

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if self.acceptor is not None:
                self.acceptor.close()
            await super().shutdown(sockets)

    return Server(
        uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            http=HttpProtocol,
            timeout_keep_alive=options.keep_alive_timeout,
            timeout_graceful_shutdown=int(options.shutdown_timeout + FLUSH) + 1,
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
        )
    )


def _url(sock: socket.socket, options: ServerOptions) -> str:
    host, port = sock.getsockname()[:2]
    return f"{'https' if options.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


class _ServerLifecycle:
    """Serves until a signal (graceful shutdown, at once on a second Ctrl-C) or the death of the engine."""

    def __init__(self, service: ServerState, server: uvicorn.Server) -> None:
        self._service = service
        self._server = server
        self._stop = asyncio.Event()
        #: Refuses, waits and ends the engine, once it is told to.
        self._ends: asyncio.Future[None] | None = None
        self._code = 0

    async def run(self, sock: socket.socket) -> int:
        """Serves on the socket; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        ends = self._ends = asyncio.ensure_future(self._shut_down_on_signal())
        watchers = [
            ends,
            asyncio.ensure_future(self._stop_after_engine_death()),
            asyncio.ensure_future(self._collect_when_idle()),
        ]
        try:
            await self._server.serve(sockets=[sock])
            if self._stop.is_set() and not self._server.force_exit:
                await asyncio.wait({ends})  # responses of the background have no connection that is waited for
        finally:
            for watcher in watchers:
                watcher.cancel()
        logger.info("stopped")
        return self._code

    def _on_signal(self, number: int) -> None:
        # Supervisors may send SIGTERM both to a process group and to its members; only a second SIGINT is deliberate.
        if self._stop.is_set() and number == signal.SIGINT:
            self._code = EXIT_INTERRUPTED
            self._server.force_exit = True
            if self._ends is not None:
                self._ends.cancel()
        self._stop.set()

    async def _shut_down_on_signal(self) -> None:
        """Refuses new requests, gives open ones the shutdown timeout, and ends the engine."""
        await self._stop.wait()
        service = self._service
        service.closing = True
        logger.info("shutting down; %d open requests have %g s", service.llm.num_open, service.options.shutdown_timeout)
        await service.events.close()
        self._server.should_exit = True
        await service.llm.shutdown(service.options.shutdown_timeout)

    async def _collect_when_idle(self) -> None:
        collector = IdleCollector()
        await asyncio.to_thread(return_freed_memory)  # of what the start has freed: some 15 MB
        while True:
            await asyncio.sleep(IDLE_INTERVAL)
            if not self._service.llm.num_open:
                collector.collect()

    async def _stop_after_engine_death(self) -> None:
        """Stops serving when the engine has died; open requests have failed by then."""
        await self._service.llm.died.wait()
        self._code = EXIT_ENGINE_DIED
        await asyncio.sleep(DEATH_GRACE)
        self._server.should_exit = True
