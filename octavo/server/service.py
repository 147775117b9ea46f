"""State shared by all routes: the engine, the options, metrics, limits."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from starlette.requests import Request

from octavo.core.server_options import CHARS_PER_TOKEN, ServerOptions
from octavo.engine.async_llm import AsyncLLM
from octavo.server.errors import ApiError
from octavo.server.metrics import Metrics
from octavo.server.queue_limit import QueueLimit
from octavo.server.tracing import Tracer

#: Most unknown fields that are logged, as clients can send any number.
MAX_UNKNOWN_FIELDS = 100

logger = logging.getLogger("octavo.server")


@dataclass(slots=True)
class Service:
    """One engine behind one HTTP server."""

    llm: AsyncLLM
    options: ServerOptions
    metrics: Metrics
    #: Names that requests may give the model; responses carry the name that was requested, or the first.
    model_names: list[str]
    queue: QueueLimit
    tracer: Tracer | None = None
    #: Seconds since 1970.
    created: int = field(default_factory=lambda: int(time.time()))
    #: Unknown fields of requests that were logged.
    unknown_fields: set[str] = field(default_factory=set)
    #: Set during shutdown: open requests may finish, new ones are refused.
    closing: bool = False

    @property
    def max_prompt_chars(self) -> int:
        """Longest prompt in characters; a longer one is refused without being tokenized."""
        return self.options.max_prompt_chars or CHARS_PER_TOKEN * self.llm.max_model_len

    def model_name(self, wanted: str | None) -> str:
        """The model name for the response to a request.

        Raises:
            ApiError: 404, the name is not served; 503, the server shuts down.
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

    def default_max_tokens(self, otherwise: int | None) -> int | None:
        """``max_tokens`` of a request that names none: the model's own default, or ``otherwise``."""
        limit: int | None = self.llm.inputs.default_sampling.get("max_tokens", otherwise)
        return limit

    def note_unknown(self, name: str) -> None:
        """Logs a field that is ignored, each name once."""
        if name not in self.unknown_fields and len(self.unknown_fields) < MAX_UNKNOWN_FIELDS:
            self.unknown_fields.add(name)
            logger.info("requests bring a field that is unknown here and ignored: %.100r", name)


def service_of(request: Request) -> Service:
    """The ``Service`` of the application that received the request."""
    service: Service = request.app.state.service
    return service
