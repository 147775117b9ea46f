"""Limits on the queue of requests, and the Retry-After of a full one."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, Protocol

from octavo.core.outputs import RequestMetrics
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.request_stream import QueuedTokens
from octavo.server.api_errors import ApiError

#: Largest ``Retry-After``, in seconds.
MAX_RETRY_AFTER = 60
#: Weight of the newest request in the moving average of the time in the queue.
_NEWEST_WEIGHT = 0.1


class Measured(Protocol):
    """An output with its times."""

    metrics: RequestMetrics


class QueueLimit:
    """Refuses requests while too many prompts, or prompt tokens, wait for their first token.

    A prompt counts from the check on: here while its form is compiled or its adapter is read, then in the engine.
    """

    def __init__(self, llm: AsyncLLM, max_requests: int, max_tokens: int) -> None:
        """Bounds on the number of waiting prompts and on their tokens."""
        self._llm = llm
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        #: Prompts that the engine does not count yet, by name.
        self._entering = QueuedTokens()
        self._mean_wait = 0.0

    def enter(self, lengths: Mapping[Any, int]) -> None:
        """Counts the prompts of a request, given as names and lengths; ``leave`` ends it.

        A request that finds the queue empty is accepted whatever its size: later it would not fit better.

        Raises:
            ApiError: 429, with ``Retry-After``; none is counted.
        """
        requests = self._llm.num_queued + len(self._entering.lengths)
        tokens = self._llm.queued_tokens + self._entering.tokens
        if requests and requests + len(lengths) > self.max_requests:
            full = f"{requests} of at most {self.max_requests} requests"
        elif requests and tokens + sum(lengths.values()) > self.max_tokens:
            full = f"{tokens} of at most {self.max_tokens} prompt tokens"
        else:
            for name, length in lengths.items():
                self._entering.add(name, length)
            return
        raise ApiError(
            429,
            f"the server is busy: {full} wait; try again later",
            kind="rate_limit_error",
            code="queue_full",
            headers={"Retry-After": str(self.retry_after)},
        )

    def leave(self, *names: Hashable) -> None:
        """These prompts are counted by the engine, or have failed; those that have left already stay so."""
        for name in names:
            self._entering.remove(name)

    @property
    def retry_after(self) -> int:
        """Mean time in the queue, in whole seconds."""
        return min(max(math.ceil(self._mean_wait), 1), MAX_RETRY_AFTER)

    def observe(self, output: Measured) -> None:
        """Adds the time in the queue of a request that has ended."""
        waited = output.metrics.time_in_queue
        if waited is not None:
            self._mean_wait += _NEWEST_WEIGHT * (waited - self._mean_wait)
