"""How long streams stood still after faults, from the times at which their chunks arrived.

A gap between two chunks of a stream belongs to the first fault in it, or else to the last fault before it. Of each
fault and each stream the longest counts.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

from octavo.lab.bench.chaos_client import Exchange
from octavo.lab.bench.chaos_faults import Fault

#: What was on its way when a core was killed arrives within so many seconds.
_ON_ITS_WAY = 0.1
#: A gap belongs to the last fault before it if it begins within so many seconds after the fault's end.
_AFTERMATH = 30.0
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
    """What the streams saw of faults of one name, each alone; or of all faults, also where several came together."""

    #: Of each fault and each stream: its longest gap.
    pauses: Times | None
    #: Of each kill: seconds until the first token of a stream that stood.
    first_tokens: Times | None


def gaps_of(faults: Sequence[Fault], chunks: Sequence[float]) -> dict[int, tuple[float, bool]]:
    """By the number of the fault to which it belongs: a stream's longest gap, and whether it has one fault at most."""
    times = [fault.at for fault in faults]
    gaps: dict[int, tuple[float, bool]] = {}
    for begin, end in pairwise(chunks):
        first, last = bisect.bisect_left(times, begin), bisect.bisect_left(times, end)
        number = first if first < last else first - 1
        if number < 0 or begin > faults[number].until + _AFTERMATH:
            continue
        gaps[number] = max(gaps.get(number, (0.0, True)), (end - begin, last - first <= 1))
    return gaps


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
    for exchange in exchanges:
        for number, (gap, alone) in gaps_of(faults, exchange.chunks).items():
            pauses["all"].append(gap)
            if alone:
                pauses[faults[number].name].append(gap)
    following = [*(fault.at for fault in faults), float("inf")][1:]
    for fault, next_at in zip(faults, following, strict=False):
        streams = [exchange.chunks for exchange in exchanges if exchange.sent < fault.at < exchange.ended]
        then = seconds_to_first_token(streams, fault.at, replicas) if fault.kind == "kill" else None
        if then is not None and fault.at + then <= next_at:
            first[fault.name].append(then)
            first["all"].append(then)
    names = sorted({fault.name for fault in faults} | ({"all"} if faults else set()))
    return {name: Pauses(Times.of(pauses[name]), Times.of(first[name])) for name in names}
