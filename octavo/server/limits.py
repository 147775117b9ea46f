"""How much may wait: a bounded queue, and how long to stay away when it is full."""

from __future__ import annotations

import math

from octavo.core.outputs import RequestOutput
from octavo.engine.async_llm import AsyncLLM
from octavo.server.errors import ApiError

#: Seconds that ``Retry-After`` says at most.
LONGEST_WAIT = 60
#: Weight of the newest request in the mean time in the queue.
_NEWEST = 0.1


class QueueLimit:
    """Refuses what comes while too much waits for its first token."""

    def __init__(self, llm: AsyncLLM, max_requests: int, max_tokens: int) -> None:
        """Bounds on the prompts that wait, and on their tokens in all."""
        self._llm = llm
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self._mean_wait = 0.0

    def check(self, prompt_lengths: list[int]) -> None:
        """Whether a request with these prompts may enter: all of them or none.

        One that finds the queue empty is never refused, whatever its size: it could not come at a better time.

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
        """Seconds after which what waits now has probably begun."""
        return min(max(math.ceil(self._mean_wait), 1), LONGEST_WAIT)

    def observe(self, output: RequestOutput) -> None:
        """Takes in how long a request that has ended waited."""
        waited = output.metrics.time_in_queue
        if waited is not None:
            self._mean_wait += _NEWEST * (waited - self._mean_wait)
