"""A logits plug-in whose import makes worker processes fail at penalties, as if the engine had a fault there."""

from __future__ import annotations

import sys
from typing import Any

from octavo import LogitsProcessorPlugin, SamplingParams
from octavo.sampling.logits_processors import Penalties


class Faulty(LogitsProcessorPlugin):
    """Changes no logits."""

    arguments = ("faulty",)

    def make(self, params: SamplingParams) -> Any:
        """The processor of a request."""
        return lambda output_ids, logits: logits


def _fail(self: Any, *args: Any) -> Any:
    raise ZeroDivisionError("of the engine")


if "pytest" not in sys.modules:
    Penalties.apply = _fail  # type: ignore[assignment, method-assign]
