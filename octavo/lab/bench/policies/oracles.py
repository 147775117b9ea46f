"""Policies that are told the true lengths, which no product knows: what others are measured against."""

from __future__ import annotations

import math

from octavo.scheduler.policies import LengthPredictor, ShortestRemaining


class _StatedLengths(LengthPredictor):
    """Predicts ``max_tokens``, which is the true length for an oracle."""

    def expected(self, log_length: float, generated: int = 0) -> tuple[float, float]:
        """Unbounded, so that ``max_tokens`` bounds it; valid to the end."""
        return math.inf, math.inf


class OracleSRPT(ShortestRemaining):
    """Shortest remaining processing time, with known lengths."""

    def __init__(self, token_budget: int) -> None:
        super().__init__(token_budget)
        self.predictor = _StatedLengths()


#: By name in the lab: the ``scheduling_policy``. ``sjf`` goes by ``max_tokens`` anyway.
ORACLES = {"sjf": "sjf", "srpt-oracle": f"{__name__}:{OracleSRPT.__name__}"}


def scheduling_policy(name: str) -> str:
    """The ``scheduling_policy`` of a policy's name in the lab."""
    return ORACLES.get(name, name)
