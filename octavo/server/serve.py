"""Runs a server: starts the engine, binds the socket, handles signals, shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import resource
import signal
import socket
import ssl
import stat
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from octavo.config.engine_config import EngineConfig
from octavo.config.server_options import API_KEYS_VARIABLE, ServerOptions, names
from octavo.core.errors import ConfigError
from octavo.core.garbage import IDLE_INTERVAL, IdleCollector, return_freed_memory, settle_collector
from octavo.process.start_process import SECRET_VARIABLES
from octavo.process.startup import phase, profile, table

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.core_start import CoreProcess
    from octavo.server.http.connection import Server
    from octavo.server.logging import LineWriter, Tracer
    from octavo.server.metrics import Metrics
    from octavo.server.state import ServerState


logger = logging.getLogger("octavo.server")

#: Exit code after the engine's death (EX_SOFTWARE of sysexits.h): a supervisor should start the server again.
EXIT_ENGINE_DIED = 70
#: Exit code after Ctrl-C during the start or the shutdown.
EXIT_INTERRUPTED = 130

#: Seconds for which a server answers, with errors, after its engine's death.
DEATH_GRACE = 2.0
#: Seconds until a busy thread gives the event loop a turn; Python's default of 5 ms adds up to a pause.
SWITCH_INTERVAL = 0.001
#: Connections waiting to be accepted.
BACKLOG = 2048


def serve(
    config: EngineConfig, options: ServerOptions, process: CoreProcess | None = None, *, profiles: bool = False
) -> int:
    """Serves until a signal or the death of the engine; returns the exit code.

    ``process`` is the core's, if it was started ahead; ``profiles`` logs how long each phase of the start took.
    """
    from octavo.engine.core_start import CoreProcess
    from octavo.server.logging import Tracer, start_logging

    options.check_engine(config)
    keys = read_api_keys(options, os.environ)
    # The processes started from here on do not need them.
    for name in SECRET_VARIABLES:
        os.environ.pop(name, None)
    endpoint = options.otlp_traces_endpoint
    tracer = Tracer(options.model_names(config.model)[0], endpoint) if endpoint else None
    with contextlib.suppress(OSError, ValueError):  # each connection is an open file, of which often 1024 are allowed
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(SWITCH_INTERVAL)
    with listening_socket(options) as sock:
        process = process or CoreProcess()
        try:
            check_plug_ins(options)
            writer = start_logging(options.log_format, options.log_level, options.log_file)
        except BaseException:
            process.kill()
            raise
        if not keys and not options.is_local:
            advice = f"set api_key_file or {API_KEYS_VARIABLE}, or listen on 127.0.0.1"
            logger.warning("listening on %s without API keys: anyone may use the server; %s", options.host, advice)
        try:
            return asyncio.run(_serve(config, options, keys, sock, process, writer, tracer, profiles=profiles))
        except KeyboardInterrupt:  # before the signal handlers were installed
            return EXIT_INTERRUPTED
        finally:
            writer.stop()


def read_api_keys(options: ServerOptions, environ: Mapping[str, str]) -> list[str]:
    """API keys from the environment, the options and the key file; without any, requests need no key."""
    keys = names(environ.get(API_KEYS_VARIABLE)) + names(options.api_key)
    path = options.api_key_file
    if path is not None:
        try:
            mode = path.stat().st_mode
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"cannot read api_key_file {path}: {getattr(e, 'strerror', None) or e}") from None
        if stat.S_ISREG(mode) and mode & stat.S_IROTH:
            # Not an error: secrets mounted into containers have such permissions.
            logger.warning("api_key_file %s can be read by every user of this machine", path)
        from_file = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not from_file:
            raise ConfigError(f"api_key_file {path} holds no key; write one a line")
        keys += from_file
    for key in keys:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError("an API key must be made of visible ASCII characters")
    return keys


def check_plug_ins(options: ServerOptions) -> None:
    """Checks the classes and adapters that the options name, before a model is loaded; imports nothing if none are."""
    if options.lora_modules or options.lora_resolver:
        from octavo.engine.adapters import check_paths, make_resolver

        check_paths((options.lora_modules or {}).values())
        make_resolver(options.lora_resolver, options.lora_folder)
    if {options.tool_call_parser, options.reasoning_parser} - {"auto", "none"}:
        from octavo.server.answer_format import ChatFormats

        ChatFormats(options.tool_call_parser, options.reasoning_parser)


@contextlib.contextmanager
def listening_socket(options: ServerOptions) -> Iterator[socket.socket]:
    """A socket that listens at the address, opened before a model is loaded."""
    if options.tls_cert is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(options.tls_cert, options.tls_key)
        except OSError as e:  # includes SSLError
            raise ConfigError(f"cannot use tls_cert {options.tls_cert} with tls_key {options.tls_key}: {e}") from None
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Accepted connections inherit it: one whose client acknowledges nothing for this time closes (RFC 5482).
            milliseconds = int(options.stall_timeout * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        # Inherited too, and sends an event at once: otherwise the second one waits until the client acknowledges the
        # first, up to 40 ms. asyncio sets it only for sockets that were made with a protocol number.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.bind((options.host, options.port))
            # Two sockets may be bound to one address, but only one listens: this finds another server.
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
    with phase("imports of the connections"):
        from octavo.server.http.connection import Server, StartingApp

    names = options.model_names(config.model)
    app = StartingApp()
    server = Server(app, options)
    # If the start fails, asyncio.run cancels both tasks.
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    with phase("imports of the engine"):
        engine = await asyncio.to_thread(importlib.import_module, "octavo.engine.async_llm")
    starting = asyncio.ensure_future(engine.AsyncLLM.start(config, process))
    routes, metrics = await asyncio.to_thread(_make_routes, options, names, keys, writer)
    llm = await starting
    try:
        with phase("service"):
            service = routes.state.service = await _make_service(llm, options, metrics, names, tracer)
            if "generate" not in service.tasks:
                from octavo.server.app import load_routes

                load_routes(routes, service.tasks)
            settle_collector()
        lifecycle = _ServerLifecycle(service, server)
        app.open(routes)
        host, port = sock.getsockname()[:2]
        scheme, host = "https" if options.tls_cert else "http", f"[{host}]" if ":" in host else host
        logger.info("serving %s on %s://%s:%s", ", ".join(names), scheme, host, port)
        if profiles:
            for line in table([profile("server"), *llm.startup_profiles]):
                logger.info("%s", line)
        return await lifecycle.run(serving)
    finally:
        await llm.shutdown(0)
        if tracer is not None:
            await asyncio.to_thread(tracer.shutdown)


def _make_routes(
    options: ServerOptions, names: list[str], keys: list[str], writer: LineWriter
) -> tuple[Starlette, Metrics]:
    """Imports the routes that are most likely asked first and makes the application, while the engine loads."""
    with phase("imports of the routes"):
        from octavo.server.app import make_routes
        from octavo.server.metrics import Metrics
        from octavo.server.openai.completions import ChatCompletionRequest
    with phase("routes"):
        metrics = Metrics(names[0], lambda: writer.dropped)
        app = make_routes(options, metrics, keys)
        ChatCompletionRequest.model_rebuild()
        return app, metrics


async def _make_service(
    llm: AsyncLLM, options: ServerOptions, metrics: Metrics, names: list[str], tracer: Tracer | None
) -> ServerState:
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


class _ServerLifecycle:
    """Serves until a signal (graceful shutdown, at once on a second Ctrl-C) or the death of the engine."""

    def __init__(self, service: ServerState, server: Server) -> None:
        self._service = service
        self._server = server
        self._stop = asyncio.Event()
        self._shutdown: asyncio.Future[None] | None = None
        self._code = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    async def run(self, serving: asyncio.Future[None]) -> int:
        """Waits for the end of the server that is ``serving``; returns the exit code."""
        shutdown = self._shutdown = asyncio.ensure_future(self._shut_down_on_signal())
        others = (self._stop_after_engine_death(), self._collect_when_idle())
        watchers = [shutdown, *map(asyncio.ensure_future, others)]
        try:
            await serving
            if self._stop.is_set() and not self._server.force_exit:
                await asyncio.wait({shutdown})  # background responses have no connection that uvicorn waits for
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
            if self._shutdown is not None:
                self._shutdown.cancel()
        self._stop.set()

    async def _shut_down_on_signal(self) -> None:
        """Refuses new requests, gives open ones ``shutdown_timeout``, and ends the engine."""
        await self._stop.wait()
        service = self._service
        service.closing = True
        logger.info("shutting down; %d open requests have %g s", service.llm.num_open, service.options.shutdown_timeout)
        await service.events.close()
        self._server.should_exit = True
        await service.llm.shutdown(service.options.shutdown_timeout)

    async def _collect_when_idle(self) -> None:
        collector = IdleCollector()
        await asyncio.to_thread(return_freed_memory)  # some 15 MB, freed by the start
        while True:
            await asyncio.sleep(IDLE_INTERVAL)
            if not self._service.llm.num_open:
                collector.collect()

    async def _stop_after_engine_death(self) -> None:
        await self._service.llm.died.wait()
        self._code = EXIT_ENGINE_DIED
        await asyncio.sleep(DEATH_GRACE)
        self._server.should_exit = True
