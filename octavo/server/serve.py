"""Runs a server: starts the engine, binds the socket, handles signals, shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import ipaddress
import logging
import os
import resource
import signal
import socket
import ssl
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from octavo.config.engine_config import EngineConfig
from octavo.config.model_list import ListedModel
from octavo.config.server_options import (
    API_KEYS_VARIABLE,
    OLLAMA_HOST_VARIABLE,
    ServerOptions,
    names,
    ollama_address,
)
from octavo.core.errors import ConfigError
from octavo.core.garbage import IDLE_INTERVAL, IdleCollector, return_freed_memory, settle_collector
from octavo.process.fork_server import ForkServer
from octavo.process.start_process import SECRET_VARIABLES
from octavo.process.startup import phase, profile, table

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.core_start import CoreProcess
    from octavo.server.http.connection import Server, StartingApp
    from octavo.server.logging import LineWriter, Tracer
    from octavo.server.metrics import Metrics
    from octavo.server.model_set import Slot
    from octavo.server.state import ResponseStore, ServerState


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
    served: EngineConfig | Sequence[ListedModel],
    options: ServerOptions,
    process: CoreProcess | None = None,
    *,
    profiles: bool = False,
    configure: Callable[[Mapping[str, Any]], EngineConfig] | None = None,
) -> int:
    """Serves a model, or several, until a signal or the death of the only engine; returns the exit code.

    ``configure`` makes the options of an engine that clients may add (``allow_pull``). ``process`` is the core's, if it
    was started ahead; ``profiles`` logs how long each phase of the start of one model took.
    """
    from octavo.engine.core_start import CoreProcess
    from octavo.server.logging import Tracer, start_logging

    if isinstance(served, EngineConfig):
        options.check_engine(served)
    keys = read_api_keys(options, os.environ)
    # The processes started from here on do not need them.
    for name in SECRET_VARIABLES:
        os.environ.pop(name, None)
    endpoint, tracer = options.otlp_traces_endpoint, None
    if endpoint:
        name = options.model_names(served.model)[0] if isinstance(served, EngineConfig) else "octavo"
        tracer = Tracer(name, endpoint)
    with contextlib.suppress(OSError, ValueError):  # each connection is an open file, of which often 1024 are allowed
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(SWITCH_INTERVAL)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(listening_socket(options))]
        if options.ollama:
            address = ollama_address(os.environ.get(OLLAMA_HOST_VARIABLE))
            socks.append(stack.enter_context(listening_socket(options, address)))
        process = process or CoreProcess()
        try:
            check_plug_ins(options)
            for model in () if isinstance(served, EngineConfig) else served:
                check_adapters(model.lora_modules)
            writer = start_logging(options.log_format, options.log_level, options.log_file)
        except BaseException:
            process.kill()
            raise
        for host in () if keys else (sock.getsockname()[0] for sock in socks):
            if not ipaddress.ip_address(host).is_loopback:
                advice = f"set api_key_file or {API_KEYS_VARIABLE}, or listen on 127.0.0.1"
                logger.warning("listening on %s without API keys: anyone may use the server; %s", host, advice)
        try:
            if isinstance(served, EngineConfig):
                work = _serve(served, options, keys, socks, process, writer, tracer, profiles=profiles)
            else:
                work = _serve_many(served, options, keys, socks, process, writer, tracer, configure)
            return asyncio.run(work)
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
    check_adapters(options.lora_modules or {})
    if options.lora_resolver:
        from octavo.engine.adapters import make_resolver

        make_resolver(options.lora_resolver, options.lora_folder)
    if {options.tool_call_parser, options.reasoning_parser} - {"auto", "none"}:
        from octavo.server.answer_format import ChatFormats

        ChatFormats(options.tool_call_parser, options.reasoning_parser)


def check_adapters(paths: Mapping[str, str]) -> None:
    if paths:
        from octavo.engine.adapters import check_paths

        check_paths(paths.values())


@contextlib.contextmanager
def listening_socket(options: ServerOptions, address: tuple[str, int] | None = None) -> Iterator[socket.socket]:
    """A socket that listens at the address (default: of the options), opened before a model is loaded."""
    host, port = address or (options.host, options.port)
    if options.tls_cert is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(options.tls_cert, options.tls_key)
        except OSError as e:  # includes SSLError
            raise ConfigError(f"cannot use tls_cert {options.tls_cert} with tls_key {options.tls_key}: {e}") from None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
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
            sock.bind((host, port))
            # Two sockets may be bound to one address, but only one listens: this finds another server.
            sock.listen(BACKLOG)
        except (OSError, OverflowError) as e:
            reason = getattr(e, "strerror", None) or e
            raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from None
        yield sock


async def _serve(
    config: EngineConfig,
    options: ServerOptions,
    keys: list[str],
    socks: list[socket.socket],
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
    serving = asyncio.ensure_future(server.serve(sockets=socks))
    with phase("imports of the engine"):
        engine = await asyncio.to_thread(importlib.import_module, "octavo.engine.async_llm")
    starting = asyncio.ensure_future(engine.AsyncLLM.start(config, process))
    routes, metrics = await asyncio.to_thread(_make_routes, options, names[0], keys, writer)
    llm = await starting
    try:
        with phase("service"):
            service = routes.state.service = await _make_service(llm, options, metrics, names, tracer)
            if "generate" not in service.tasks:
                from octavo.server.app import load_routes

                load_routes(routes, service.tasks)
            settle_collector()
        lifecycle = _ServerLifecycle(service, server)
        _open(app, routes, options, socks, names)
        if profiles:
            for line in table([profile("server"), *llm.startup_profiles]):
                logger.info("%s", line)
        return await lifecycle.run(serving)
    finally:
        await llm.shutdown(0)
        if tracer is not None:
            await asyncio.to_thread(tracer.shutdown)


def _open(
    app: StartingApp, routes: Starlette, options: ServerOptions, socks: list[socket.socket], names: list[str]
) -> None:
    """Answers requests from now on."""
    urls = [_url(sock, options) for sock in socks]
    if options.ollama:
        from octavo.server.ollama.listener import OllamaListener

        app.open(OllamaListener(routes, socks[1].getsockname()[1]))
        logger.info("Ollama's API is at %s", urls[1])
    else:
        app.open(routes)
    logger.info("serving %s on %s", ", ".join(names), urls[0])


async def _serve_many(
    listed: Sequence[ListedModel],
    options: ServerOptions,
    keys: list[str],
    socks: list[socket.socket],
    process: CoreProcess,
    writer: LineWriter,
    tracer: Tracer | None,
    configure: Callable[[Mapping[str, Any]], EngineConfig] | None,
) -> int:
    from octavo.engine.core_start import MODULE
    from octavo.server.http.connection import Server, StartingApp

    app = StartingApp()
    server = Server(app, options)
    serving = asyncio.ensure_future(server.serve(sockets=socks))
    # Engines after the first one are forked from a process with their imports, half a second of a core's start.
    first, forks = [process], ForkServer(MODULE)
    try:
        routes, metrics = await asyncio.to_thread(_make_routes, options, "", keys, writer)
        memory_needs, catalog, model_set, _ = await asyncio.to_thread(
            lambda: [*map(importlib.import_module, _MODULES_OF_MANY)]
        )
        memory: int | None = options.memory
        if memory is None:
            memory = int(await asyncio.to_thread(memory_needs.memory_of_models, listed[0].config))
        engine = importlib.import_module("octavo.engine.async_llm")

        async def start(slot: Slot, config: EngineConfig) -> ServerState:
            llm = await engine.AsyncLLM.start(config, first.pop() if first else None, forks=forks)
            try:
                own = options.model_copy(update={"lora_modules": dict(slot.model.lora_modules)})
                return await _make_service(llm, own, slot.metrics, [slot.name], tracer, models.responses)
            except BaseException:
                await llm.shutdown(0)
                raise
            finally:
                forks.start()  # not beside the first load, which needs the processors

        def may_be_added(name: str) -> ListedModel | None:
            if configure is None or not options.allow_pull or not catalog.is_known(name):
                return None
            return ListedModel(configure({"model": name}), (name,), options.model_keep_alive)

        models = model_set.ModelSet(
            listed, options, metrics, start, memory_needs.size_model, memory,
            listed=may_be_added, is_here=catalog.is_here,
        )  # fmt: skip
        routes.state.models = models
        routes.state.make_directory = lambda: importlib.import_module(_SET_DIRECTORY).SetDirectory(models)
        settle_collector()
        models.open()
        lifecycle = _ServerLifecycle(models, server)
        _open(app, routes, options, socks, [slot.name for slot in models.slots])
        logger.info("%.2f GiB are for all models together; each is loaded when a request names it", memory / (1 << 30))
        try:
            return await lifecycle.run(serving)
        finally:
            await models.shut_down(0)
    finally:
        forks.close()
        for unused in first:
            unused.kill()
        if tracer is not None:
            await asyncio.to_thread(tracer.shutdown)


_SET_DIRECTORY = "octavo.server.ollama.set_directory"
_MODULES_OF_MANY = (
    "octavo.engine.memory_needs",
    "octavo.engine.model_catalog",
    "octavo.server.model_set",
    "octavo.engine.async_llm",
)


def _url(sock: socket.socket, options: ServerOptions) -> str:
    host, port = sock.getsockname()[:2]
    return f"{'https' if options.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _make_routes(options: ServerOptions, name: str, keys: list[str], writer: LineWriter) -> tuple[Starlette, Metrics]:
    """Imports the routes that are most likely asked first and makes the application, while the engine loads."""
    with phase("imports of the routes"):
        from octavo.server.app import make_routes
        from octavo.server.metrics import Metrics
        from octavo.server.openai.completions import ChatCompletionRequest
    with phase("routes"):
        metrics = Metrics(name, lambda: writer.dropped)
        app = make_routes(options, metrics, keys)
        ChatCompletionRequest.model_rebuild()
        return app, metrics


async def _make_service(
    llm: AsyncLLM,
    options: ServerOptions,
    metrics: Metrics,
    names: list[str],
    tracer: Tracer | None,
    responses: ResponseStore | None = None,
) -> ServerState:
    from octavo.engine.front_end import StatusLine
    from octavo.server.state import make_service

    service = make_service(llm, options, metrics, names, tracer, responses)
    await service.load_modules()
    for replica, stats in enumerate(await llm.replica_stats()):
        metrics.on_state(stats, replica)
    llm.stat_loggers.append(metrics)
    if llm.config.log_stats_interval is None:
        llm.stat_loggers.append(StatusLine())
    return service


class Served(Protocol):
    """What a server serves: a ``ServerState`` or a ``ModelSet``."""

    @property
    def options(self) -> ServerOptions: ...
    @property
    def num_open(self) -> int:
        """Requests that have not ended."""

    @property
    def died(self) -> asyncio.Event:
        """Set when no request can be served any more."""

    async def refuse_requests(self) -> None:
        """Refuses new requests, and ends the streams of those who watch an engine."""

    async def shut_down(self, timeout: float) -> None:
        """Gives open requests ``timeout`` seconds, and ends the engines."""


class _ServerLifecycle:
    """Serves until a signal (graceful shutdown, at once on a second Ctrl-C) or the death of the engine."""

    def __init__(self, served: Served, server: Server) -> None:
        self._served = served
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
        served = self._served
        seconds = served.options.shutdown_timeout
        logger.info("shutting down; %d open requests have %g s", served.num_open, seconds)
        await served.refuse_requests()
        self._server.should_exit = True
        await served.shut_down(seconds)

    async def _collect_when_idle(self) -> None:
        collector = IdleCollector()
        await asyncio.to_thread(return_freed_memory)  # some 15 MB, freed by the start
        while True:
            await asyncio.sleep(IDLE_INTERVAL)
            if not self._served.num_open:
                collector.collect()

    async def _stop_after_engine_death(self) -> None:
        await self._served.died.wait()
        self._code = EXIT_ENGINE_DIED
        await asyncio.sleep(DEATH_GRACE)
        self._server.should_exit = True
