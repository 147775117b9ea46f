"""The latest responses in memory, within bounds on their number and their bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Protocol

from octavo.server.api_errors import ApiError
from octavo.server.responses.response_parts import InputItem


class Run(Protocol):
    """What makes a response in the background, or has made it."""

    #: Whether its events can be followed.
    keeps_events: bool
    #: That it holds.
    num_bytes: int

    @property
    def has_ended(self) -> bool:
        """Whether the response is as it stays."""

    def encode(self) -> bytes:
        """The response as it is, as JSON; of one that has not ended."""

    def cancel(self) -> None:
        """Ends the response soon, unless it has ended."""

    async def stop(self) -> None:
        """Ends the response, unless it has ended, and waits until it has let go of its blocks."""

    def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events that come after the one with this number, to the last."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and all items that a later one continues."""

    #: As JSON.
    body: bytes
    #: Of the conversation up to its end: input and output of all responses that it continues, and its own.
    items: list[InputItem]
    #: Bytes of the items, as JSON.
    items_size: int
    #: The API key that it was made with, as ``owner_of`` names it; others cannot have it.
    owner: str
    #: How many of the items, the last ones, are its output.
    num_output: int = 0
    #: What makes it, or has made it, in the background; it ends if the response is forgotten.
    run: Run | None = None
    #: Bytes that the run holds.
    run_size: int = 0

    @property
    def input_items(self) -> list[InputItem]:
        """What the model read, but for the instructions."""
        return self.items[: len(self.items) - self.num_output]

    @property
    def size(self) -> int:
        """Bytes of the body, of the items and of what its run holds."""
        return len(self.body) + self.items_size + self.run_size


class ResponseStore:
    """The responses that were stored or continued last; the others are forgotten."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        """Bounds on the responses and on the sum of their sizes; 0 responses: none is kept."""
        self.max_responses = max_responses
        self._max_bytes = max_bytes
        self._bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def num_bytes(self) -> int:
        """Sum of the sizes of the responses."""
        return self._bytes

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._responses

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Keeps a response, and forgets the oldest beyond the bounds: perhaps itself, if it is too large."""
        self._responses[response_id] = response
        self._bytes += response.size
        self._forget_beyond_bounds()

    def replace(self, response_id: str, response: StoredResponse) -> None:
        """Keeps a response in the place of what is there of it, unless that is forgotten already; else as ``put``."""
        if response_id in self._responses:
            self._bytes += response.size - self._responses[response_id].size
            self._responses[response_id] = response
            self._forget_beyond_bounds()

    def grow(self, response_id: str, run_size: int) -> None:
        """The run of a response holds so many bytes now; as ``replace``."""
        if (stored := self._responses.get(response_id)) is not None:
            self.replace(response_id, replace(stored, run_size=run_size))

    def _forget_beyond_bounds(self) -> None:
        while len(self._responses) > self.max_responses or self._bytes > self._max_bytes:
            self._forget(next(iter(self._responses)))

    def _forget(self, response_id: str) -> None:
        response = self._responses.pop(response_id)
        self._bytes -= response.size
        if response.run is not None:
            response.run.cancel()

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """A response, which counts as the newest from now on.

        Raises:
            ApiError: 404, it is not there, or another's.
        """
        stored = self._responses.get(response_id)
        if stored is None or stored.owner != owner:
            raise self._unknown(response_id)
        self._responses.move_to_end(response_id)
        return stored

    def delete(self, response_id: str, owner: str) -> None:
        """Forgets a response, which ends if it is still made.

        Raises:
            ApiError: as ``get``.
        """
        self.get(response_id, owner)
        self._forget(response_id)

    def _unknown(self, response_id: str) -> ApiError:
        if not self.max_responses:
            kept = "this server keeps none (max_stored_responses)"
        else:
            kept = (
                f"this server keeps the latest {self.max_responses} in memory, at most {self._max_bytes} bytes "
                "(max_stored_responses, max_stored_response_bytes), and forgets older ones, those that were not to be "
                "stored, and all when it restarts; send the whole conversation as input"
            )
        message = f"the response {response_id[:100]!r} is not known here: {kept}"
        return ApiError(404, message, param="previous_response_id", code="response_not_found")
