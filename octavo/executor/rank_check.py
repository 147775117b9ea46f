"""Whether tensor-parallel ranks sample the same tokens: each samples for itself, from sums that all of them have.

A rank with another library, a failing memory or a lost message would go on with tokens of its own, and what it adds to
the others' sums would spoil every answer. So ranks are compared by a digest of a few bytes, beside what they send
anyway.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from octavo.core.plan import StepResult

#: Bytes of a digest.
DIGEST_BYTES = 16


def digest(content: object) -> bytes:
    """The digest of plain data."""
    return hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=DIGEST_BYTES).digest()


class RankCheck:
    """The tokens that one rank has sampled since the ranks were last compared."""

    def __init__(self, interval: int) -> None:
        """Ranks are compared every ``interval`` steps; 0: never."""
        self._interval = interval
        self._steps: list[tuple[int, list[int], list[int], list[int]]] = []

    def add(self, result: StepResult) -> None:
        """Takes a step's result."""
        if self._interval:
            self._steps.append((result.step, result.seq_ids, result.num_tokens, result.token_ids))

    def take(self) -> tuple[int, int, bytes]:
        """The first and the last step to be compared now, and their digest; empty if it is not time yet."""
        if not self._steps or len(self._steps) < self._interval:
            return 0, 0, b""
        steps, self._steps = self._steps, []
        return steps[0][0], steps[-1][0], digest(steps)


def find_difference(digests: Mapping[int, bytes], first_step: int, last_step: int) -> str | None:
    """What is wrong if the digests of these steps differ, which are given by rank; None if nothing is.

    The lowest rank is the one whose tokens count.
    """
    first = min(digests)
    others = sorted(rank for rank, other in digests.items() if other != digests[first])
    if not others:
        return None
    steps = f"step {last_step}" if first_step == last_step else f"one of the steps {first_step} to {last_step}"
    return (
        f"in {steps} ranks {others} have sampled other tokens than rank {first}: their machines, libraries or weights "
        "differ, or memory fails"
    )
