"""Limits on the queue of requests, and the Retry-After of a full one."""

from __future__ import annotations

import math

from octavo.core.outputs import RequestOutput
from octavo.engine.async_llm import AsyncLLM
from octavo.server.errors import ApiError

#: Largest ``Retry-After``, in seconds.
MAX_RETRY_AFTER = 60
#: Weight of the newest request in the moving average of the time in the queue.
_NEWEST_WEIGHT = 0.1


class QueueLimit:
    """Refuses requests while too many prompts, or prompt tokens, wait for their first token."""

    def __init__(self, llm: AsyncLLM, max_requests: int, max_tokens: int) -> None:
        """Bounds on the number of waiting prompts and on their tokens."""
        self._llm = llm
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self._mean_wait = 0.0

    def check(self, prompt_lengths: list[int]) -> None:
        """Raises unless all prompts of a request may be queued.

        A request that finds the queue empty is accepted whatever its size: later it would not fit better.

        Raises:
            ApiError: 429, with ``Retry-After``.
        """
        requests, tokens = self._llm.num_queued, self._llm.queued_tokens
        if not requests:
            return
        if requests + len(prompt_lengths) > self.max_requests:
            full = f"{requests} of at most {self.max_requests} requests"
        elif tokens + sum(prompt_lengths) > self.max_tokens:
            full = f"{tokens} of at most {self.max_tokens} prompt tokens"
        else:
            return
        raise ApiError(
            429,
            f"the server is busy: {full} wait; try again later",
            kind="rate_limit_error",
            code="queue_full",
            headers={"Retry-After": str(self.retry_after)},
        )

    @property
    def retry_after(self) -> int:
        """Mean time in the queue, in whole seconds."""
        return min(max(math.ceil(self._mean_wait), 1), MAX_RETRY_AFTER)

    def observe(self, output: RequestOutput) -> None:
        """Adds the time in the queue of a request that has ended."""
        waited = output.metrics.time_in_queue
        if waited is not None:
            self._mean_wait += _NEWEST_WEIGHT * (waited - self._mean_wait)
