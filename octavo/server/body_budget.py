"""The memory that the bodies of all requests take together: bounded, for one client and in all."""

from __future__ import annotations

import threading
from collections import Counter

from octavo.core.server_options import ServerOptions
from octavo.server.api_errors import ApiError, server_error

#: The largest bodies that a server without an option for the sum has room for, and bytes that it has room for at least.
_LARGEST_BODIES = 4
_LEAST_TOTAL = 512 << 20

#: Such a body may not be read to its end.
_REFUSED = {"Retry-After": "1", "Connection": "close"}


class BodyBudget:
    """Owns the count of bytes in bodies, by client; from any thread.

    Invariant: ``total`` and ``by_client`` are the sums of the sizes of the ``HeldBody`` that are not released.
    """

    def __init__(self, max_bytes: int, max_bytes_per_client: int) -> None:
        """Most bytes in all, and of one client."""
        self.max_bytes = max_bytes
        self.max_bytes_per_client = min(max_bytes, max_bytes_per_client)
        self.total = 0
        self.by_client: Counter[str] = Counter()
        self._lock = threading.Lock()

    def open(self, client: str) -> HeldBody:
        """The body of a request that begins; it is empty."""
        return HeldBody(self, client)

    def check(self, client: str, more: int) -> None:
        """Refuses ``more`` bytes of a client that do not fit now.

        Raises:
            ApiError: 429, the client has its share; 503, all clients together have taken what there is.
        """
        if self.by_client[client] + more > self.max_bytes_per_client:
            message = (
                f"the bodies of your requests take {self.by_client[client]} of {self.max_bytes_per_client} bytes "
                "(max_body_bytes_per_client); send this one when others are done"
            )
            raise ApiError(429, message, kind="rate_limit_error", code="too_many_body_bytes", headers=_REFUSED)
        if self.total + more > self.max_bytes:
            message = (
                f"the bodies of all requests take {self.total} of {self.max_bytes} bytes (max_body_bytes_total); try "
                "again later"
            )
            raise server_error(503, message, "too_many_body_bytes", headers=_REFUSED)

    def add(self, client: str, more: int) -> None:
        """Counts ``more`` bytes of a client, which may be negative.

        Raises:
            ApiError: as ``check``; none is counted.
        """
        with self._lock:
            if more > 0:
                self.check(client, more)
            self.total += more
            self.by_client[client] += more
            if not self.by_client[client]:
                del self.by_client[client]


class HeldBody:
    """What one body counts for in a budget, until it is released."""

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget, self._client = budget, client
        self.size = 0

    def check(self, size: int) -> None:
        """Refuses a body that is to become so large, without counting it.

        Raises:
            ApiError: see ``BodyBudget.check``.
        """
        self._budget.check(self._client, size - self.size)

    def grow_to(self, size: int) -> None:
        """The body has so many bytes now; it never shrinks: while it is unpacked both forms of it exist.

        Raises:
            ApiError: see ``BodyBudget.check``.
        """
        if size > self.size:
            self._budget.add(self._client, size - self.size)
            self.size = size

    def release(self) -> None:
        """The body is given up."""
        self._budget.add(self._client, -self.size)
        self.size = 0


def make_budget(options: ServerOptions, largest: int) -> BodyBudget:
    """The budget of a server whose largest body has ``largest`` bytes."""
    most = options.max_body_bytes_total or max(_LEAST_TOTAL, _LARGEST_BODIES * largest)
    return BodyBudget(most, options.max_body_bytes_per_client or most // 2)
