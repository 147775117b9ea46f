"""How long streams stood still after faults, from the times at which their chunks arrived."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from octavo.lab.bench.chaos_client import Exchange
from octavo.lab.bench.chaos_faults import Fault

#: What was on its way when a core was killed arrives within so many seconds.
_ON_ITS_WAY = 0.1
#: A pause counts for a fault if it overlaps with so many seconds after its end.
_AFTERMATH = 60.0
#: Of several replicas, those streams stood whose pause is at least this share of the longest.
_STOOD = 0.5


class Times(msgspec.Struct, frozen=True):
    """Distribution of times in seconds; percentiles are interpolated linearly."""

    count: int
    median: float
    p99: float
    worst: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times | None:
        """None of none."""
        if not seconds:
            return None
        median, p99 = np.percentile(np.asarray(seconds), (50, 99))
        return cls(len(seconds), *(round(float(value), 3) for value in (median, p99, max(seconds))))


@dataclass(frozen=True)
class Pauses:
    """What the streams saw of faults of one name."""

    #: Of each fault and each stream that was open: its longest gap between chunks.
    pauses: Times | None
    #: Of each fault: seconds until the first token of a stream that stood.
    first_tokens: Times | None


def longest_gap(chunks: Sequence[float], begin: float, end: float) -> float | None:
    """The longest gap between two chunks that overlaps with a time; None if the stream had no such gap."""
    first = max(1, bisect.bisect_right(chunks, begin))
    gaps = []
    for i in range(first, len(chunks)):
        if chunks[i - 1] >= end:
            break
        gaps.append(chunks[i] - chunks[i - 1])
    return max(gaps, default=None)


def seconds_to_first_token(streams: Sequence[Sequence[float]], at: float, replicas: int) -> float | None:
    """From ``at`` to the first chunk of a stream that stood then; None if none stood.

    Args:
        streams: the arrivals of the chunks of each.
        at: when a process was killed.
        replicas: of one, every stream stood that had begun; of several, those with the longest pauses.
    """
    stood = []
    for chunks in streams:
        i = bisect.bisect_right(chunks, at + _ON_ITS_WAY)
        if 0 < i < len(chunks):
            stood.append((chunks[i] - chunks[i - 1], chunks[i] - at))
    if not stood:
        return None
    longest = max(gap for gap, _ in stood)
    return min(then for gap, then in stood if replicas == 1 or gap >= _STOOD * longest)


def measure(faults: Sequence[Fault], exchanges: Sequence[Exchange], replicas: int) -> dict[str, Pauses]:
    """By the names of faults, and ``all``."""
    pauses: dict[str, list[float]] = defaultdict(list)
    first: dict[str, list[float]] = defaultdict(list)
    for number, fault in enumerate(faults):
        following = faults[number + 1].at if number + 1 < len(faults) else float("inf")
        end = min(following, fault.until + _AFTERMATH)
        streams = [e.chunks for e in exchanges if e.sent < fault.at < e.ended]
        gaps = [gap for chunks in streams if (gap := longest_gap(chunks, fault.at, end)) is not None]
        then = seconds_to_first_token(streams, fault.at, replicas) if fault.kind == "kill" else None
        for name in (fault.name, "all"):
            pauses[name] += gaps
            first[name] += [then] if then is not None else []
    return {name: Pauses(Times.of(pauses[name]), Times.of(first[name])) for name in sorted(pauses)}
