"""OpenTelemetry spans of requests; OpenTelemetry is imported only if tracing is configured.

Spans are made when a request has ended, from its recorded times, so tracing costs nothing during generation:
``octavo.request`` with children ``octavo.queue``, ``octavo.prefill`` and ``octavo.decode``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo import __version__
from octavo.core.errors import ConfigError
from octavo.core.extras import how_to_install

if TYPE_CHECKING:
    from octavo.core.outputs import RequestMetrics, RequestOutput
    from octavo.core.pooling_outputs import Pooled
    from octavo.server.metrics import RequestObserver
    from octavo.server.pooling.pooling_observer import PoolingObserver


class Tracer:
    """Owns a tracer provider; exports in the background and drops spans rather than wait for a collector."""

    def __init__(self, model_name: str, endpoint: str | None = None, exporter: Any = None) -> None:
        """Sends spans by OTLP over HTTP to ``endpoint`` (as ``http://127.0.0.1:4318/v1/traces``), or to ``exporter``.

        Raises:
            ConfigError: OpenTelemetry is not installed, or neither endpoint nor exporter is given.
        """
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
        observer: RequestObserver | PoolingObserver,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Records the spans of a request that has ended.

        Args:
            output: its last output.
            observer: has counted all outputs of the request.
            headers: of the HTTP request, by lower-case name; ``traceparent`` names the caller's span.
        """
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        times = output.metrics
        end = times.finished_time or time.monotonic()
        # Times are of time.monotonic(); OpenTelemetry counts nanoseconds since 1970.
        offset = time.time_ns() - time.monotonic_ns()

        def epoch(seconds: float) -> int:
            return int(seconds * 1e9) + offset

        span = self._tracer.start_span(
            "octavo.request",
            context=TraceContextTextMapPropagator().extract(dict(headers or {})),
            kind=SpanKind.SERVER,
            start_time=epoch(times.arrival_time),
            attributes=self._attributes(output, observer),
        )
        within = set_span_in_context(span)
        for name, start, stop in _phases(times, end):
            child = self._tracer.start_span(f"octavo.{name}", context=within, start_time=epoch(start))
            child.end(end_time=epoch(stop))
        span.end(end_time=epoch(end))

    def shutdown(self) -> None:
        """Exports the remaining spans and stops."""
        self._provider.shutdown()

    def _attributes(
        self, output: RequestOutput | Pooled, observer: RequestObserver | PoolingObserver
    ) -> dict[str, Any]:
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
        return {name: value for name, value in attributes.items() if value is not None}


def _phases(times: RequestMetrics, end: float) -> list[tuple[str, float, float]]:
    """(name, start, end) of the phases that a request has reached."""
    phases = [("queue", times.arrival_time, times.first_scheduled_time or end)]
    if times.first_scheduled_time is not None:
        phases.append(("prefill", times.first_scheduled_time, times.first_token_time or end))
    if times.first_token_time is not None:
        phases.append(("decode", times.first_token_time, end))
    return phases
