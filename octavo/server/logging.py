"""The server's log lines, plain or JSON, which never block it; and its OpenTelemetry spans."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo import __version__
from octavo.core.errors import ConfigError
from octavo.core.plugins import how_to_install

if TYPE_CHECKING:
    from octavo.core.outputs import Pooled, RequestMetrics, RequestOutput
    from octavo.server.metrics import RequestObserver


FORMATS = ("plain", "json")
QUEUE_LINES = 10_000
#: Most characters (or token ids) of a prompt in a log line.
PROMPT_CHARACTERS = 2_000

#: Id of the HTTP request that the current task handles, for its log lines.
request_id: ContextVar[str | None] = ContextVar("octavo_request_id", default=None)

logger = logging.getLogger("octavo.server")


def new_request_id() -> str:
    return f"req-{uuid.uuid4().hex}"


def start_logging(log_format: str = "plain", level: str = "info", path: Path | None = None) -> LineWriter:
    """Sends the lines of Octavo, uvicorn and asyncio to standard error, or appends them to the file.

    uvicorn must be run with ``log_config=None``; ``log_access`` replaces its access log.
    """
    if log_format not in FORMATS:
        raise ConfigError(f"log_format must be one of {', '.join(FORMATS)}, not {log_format!r}")
    descriptor = 2
    if path is not None:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as e:
            raise ConfigError(f"cannot write the log file {path}: {e.strerror}") from None
    writer = LineWriter(descriptor)
    writer.setFormatter(JsonFormatter() if log_format == "json" else PlainFormatter())
    for name in ("octavo", "uvicorn", "asyncio"):
        target = logging.getLogger(name)
        target.handlers = [writer]
        target.propagate = False
        target.setLevel(level.upper() if name == "octavo" else logging.WARNING)
    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers = []
    logging.getLogger("uvicorn.access").disabled = True
    return writer


def log_access(method: str, path: str, status: int, seconds: float, client: str | None = None, **fields: Any) -> None:
    """Logs an HTTP request that has ended; ``fields`` may hold token counts, never text of the user."""
    fields = {"status": status, "ms": round(seconds * 1000, 1), "client": client, **fields}
    logger.info("%s %s", method, path, extra={"fields": fields})


def log_fields(scope: MutableMapping[str, Any]) -> dict[str, Any]:
    """The fields of the access log's line of a request, by its ASGI scope; routes add to them."""
    fields: dict[str, Any] = scope.setdefault("state", {}).setdefault("log_fields", {})
    return fields


def log_prompt(prompt: str | list[int]) -> None:
    logger.info("prompt", extra={"fields": {"prompt": prompt[:PROMPT_CHARACTERS], "length": len(prompt)}})


class LineWriter(logging.Handler):
    """Writes lines to a file descriptor in a thread, by way of a bounded queue.

    Invariant: ``emit`` neither blocks nor raises. Every line is written, or counted in ``dropped``: when the disk is
    full, the reader of a pipe is stuck or gone, or lines come too fast.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.dropped = 0
        self._descriptor = descriptor
        self._lines: queue.Queue[bytes | None] = queue.Queue(QUEUE_LINES)
        # Whether an error cut the last line short: the next line then begins with a line end.
        self._torn = False
        self._thread = threading.Thread(target=self._write_all, name="octavo-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Formats the line in the calling task, where the request id is known."""
        try:
            line = self.format(record) + "\n"
            self._lines.put_nowait(line.encode("utf-8", "backslashreplace"))
        except Exception:
            self.dropped += 1

    def stop(self, timeout: float = 1.0) -> None:
        """Writes queued lines for up to ``timeout`` seconds. Later lines are lost."""
        try:
            self._lines.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            rest = b"\n" + line if self._torn else line
            try:
                while rest:
                    written = os.write(self._descriptor, rest)
                    self._torn = written > 0
                    rest = rest[written:]
                self._torn = False
            except OSError:
                self.dropped += 1


class PlainFormatter(logging.Formatter):
    """``TIME LEVEL MESSAGE key=value ...``: one line, plus tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        logged = datetime.fromtimestamp(record.created, UTC)
        words = [logged.isoformat(sep=" ", timespec="milliseconds"), record.levelname, _message(record)]
        words += [f"{name}={_plain(value)}" for name, value in _fields(record).items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (ISO 8601), level, logger, message, the fields, request_id, exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(_clean(line), enc_hook=str).decode()


def _message(record: logging.LogRecord) -> str:
    # A path or header sent by a client must not be able to forge a log line.
    return record.getMessage().replace("\r", "\\r").replace("\n", "\\n")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = dict(getattr(record, "fields", {}))
    fields["request_id"] = fields.pop("request_id", None) or request_id.get()
    return {name: value for name, value in fields.items() if value is not None}


def _plain(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)


def _clean(value: Any) -> Any:
    """Replaces lone surrogates, which JSON cannot hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {name: _clean(item) for name, item in value.items()}
    return value


# OpenTelemetry spans of requests.


class Tracer:
    """Exports spans in the background and drops spans rather than wait for a collector."""

    def __init__(self, model_name: str, endpoint: str | None = None, exporter: Any = None) -> None:
        """Sends spans (OTLP over HTTP) to ``endpoint`` (as ``http://127.0.0.1:4318/v1/traces``), or to ``exporter``."""
        if exporter is None and endpoint is None:
            raise ConfigError("tracing needs the endpoint of a collector, such as http://127.0.0.1:4318/v1/traces")
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=endpoint)
        except ImportError as e:
            raise ConfigError(f"tracing needs OpenTelemetry ({e}): {how_to_install('tracing')}") from None
        self._model = model_name
        resource = Resource.create({"service.name": "octavo", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo", __version__)

    def record(
        self,
        output: RequestOutput | Pooled,
        observer: RequestObserver,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Records the spans of a request that has ended; the header ``traceparent`` names the caller's span."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        times = output.metrics
        attributes = {
            "gen_ai.response.id": output.request_id,
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": output.num_prompt_tokens,
            "gen_ai.usage.output_tokens": observer.num_tokens,
            "gen_ai.response.finish_reasons": [reason for _, reason in sorted(observer.finish_reasons.items())],
            "octavo.cached_tokens": times.num_cached_tokens,
            "octavo.preemptions": times.num_preemptions,
            "octavo.queue_seconds": times.time_in_queue,
        }
        if times.first_token_time is not None:
            attributes["octavo.time_to_first_token_seconds"] = times.first_token_time - times.arrival_time
        end = times.finished_time or time.monotonic()
        # Request times are of time.monotonic(); OpenTelemetry counts nanoseconds since 1970.
        offset = time.time_ns() - time.monotonic_ns()

        def epoch(seconds: float) -> int:
            return int(seconds * 1e9) + offset

        span = self._tracer.start_span(
            "octavo.request",
            context=TraceContextTextMapPropagator().extract(dict(headers or {})),
            kind=SpanKind.SERVER,
            start_time=epoch(times.arrival_time),
            attributes={name: value for name, value in attributes.items() if value is not None},
        )
        within = set_span_in_context(span)
        for name, start, stop in _phases(times, end):
            child = self._tracer.start_span(f"octavo.{name}", context=within, start_time=epoch(start))
            child.end(end_time=epoch(stop))
        span.end(end_time=epoch(end))

    def shutdown(self) -> None:
        self._provider.shutdown()


def _phases(times: RequestMetrics, end: float) -> list[tuple[str, float, float]]:
    """(name, start, end) of each phase that a request has reached."""
    phases = [("queue", times.arrival_time, times.first_scheduled_time or end)]
    if times.first_scheduled_time is not None:
        phases.append(("prefill", times.first_scheduled_time, times.first_token_time or end))
    if times.first_token_time is not None:
        phases.append(("decode", times.first_token_time, end))
    return phases
