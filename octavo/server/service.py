"""What the routes share: the engine, the options, and what counts for all requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.requests import Request

from octavo.engine.async_llm import AsyncLLM
from octavo.server.errors import ApiError
from octavo.server.limits import QueueLimit
from octavo.server.metrics import Metrics
from octavo.server.options import CHARS_PER_TOKEN, ServerOptions
from octavo.server.tracing import Tracer

#: Unknown fields that are named at most, as clients can make up any number.
MAX_UNKNOWN = 100

logger = logging.getLogger("octavo.server")


@dataclass(slots=True)
class Service:
    """One engine behind one HTTP server."""

    llm: AsyncLLM
    options: ServerOptions
    metrics: Metrics
    #: What clients may call the model; the first is the name in answers.
    model_names: list[str]
    queue: QueueLimit
    tracer: Tracer | None = None
    #: Seconds since 1970.
    created: int = field(default_factory=lambda: int(time.time()))
    #: Unknown fields of requests that were named in the log.
    unknown_fields: set[str] = field(default_factory=set)
    #: Set when the server shuts down: what is open may finish, nothing new begins.
    closing: bool = False

    @property
    def max_prompt_chars(self) -> int:
        """Longest text of a prompt; one that is longer has too many tokens, and need not be tokenized to know."""
        return self.options.max_prompt_chars or CHARS_PER_TOKEN * self.llm.max_model_len

    def model_name(self, wanted: str | None) -> str:
        """The name for the answer to a request.

        Raises:
            ApiError: 404, the name is not served; 503, no request is taken any more.
        """
        if self.closing:
            raise ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")
        self.llm.check_alive()
        if wanted is None or wanted in self.model_names:
            return wanted or self.model_names[0]
        names = ", ".join(self.model_names)
        raise ApiError(
            404, f"the model {wanted!r} does not exist here; served: {names}", param="model", code="model_not_found"
        )

    def note_unknown(self, fields: Iterable[str]) -> None:
        """Names fields that requests bring and no one reads in the log, each once."""
        for name in fields:
            if name not in self.unknown_fields and len(self.unknown_fields) < MAX_UNKNOWN:
                self.unknown_fields.add(name)
                logger.info("requests bring a field that is unknown here and ignored: %.100r", name)


def service_of(request: Request) -> Service:
    """The service that the application of this request was made for."""
    service: Service = request.app.state.service
    return service
