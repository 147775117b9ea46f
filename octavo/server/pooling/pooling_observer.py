"""What the metrics show of requests for vectors and scores."""

from __future__ import annotations

import time

from octavo.core.pooling_outputs import Pooled
from octavo.server.metrics import COMPLETE, Metrics


class PoolingObserver:
    """Counts one input of a request for vectors or scores; at the end of a block as aborted, if it has no result."""

    def __init__(self, metrics: Metrics, task: str, adapter: str | None = None) -> None:
        """``adapter``: the name of the request's, if it has one."""
        self._metrics, self._task = metrics, task
        self._adapter = None if adapter is None else metrics.adapter_label(adapter)
        self._ended = False
        #: Tokens that were generated, and finish reasons, as ``RequestObserver`` has them.
        self.num_tokens = 0
        self.finish_reasons: dict[int, str] = {}

    def update(self, output: Pooled, reason: str) -> None:
        """Counts its output, and the reason of its end."""
        metrics, times, tokens = self._metrics, output.metrics, len(output.prompt_token_ids)
        metrics.prompt_tokens.inc(tokens)
        metrics.pooled_tokens(self._task).inc(tokens)
        if self._adapter is not None:
            metrics.adapter_prompt_tokens(self._adapter).inc(tokens)
        if times.time_in_queue is not None:
            metrics.queue.observe(times.time_in_queue)
        if reason in COMPLETE:
            reason = "stop"  # whatever a core calls the end of a prompt after which nothing is generated
            seconds = time.monotonic() - times.arrival_time
            metrics.duration.observe(seconds)
            metrics.pooled_duration(self._task).observe(seconds)
        self._end(reason)

    def _end(self, reason: str) -> None:
        self._ended = True
        self.finish_reasons[0] = reason
        self._metrics.finished(reason).inc()
        self._metrics.pooled_finished(self._task, reason).inc()
        if self._adapter is not None:
            self._metrics.adapter_finished(self._adapter).inc()

    def __enter__(self) -> PoolingObserver:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended:
            self._end("abort")
