"""Which of the requests that an engine core had when it died is to blame: one with which it dies again, alone."""

from __future__ import annotations

import mmap
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from octavo.process.children import shared_memory

#: Why a request ends that is to blame, with the end of its core.
GUILTY = "the engine failed again and again at this request, at last when nothing else was computed: {}"
#: A core may have sampled a few tokens more than it could report before it died: with fewer new tokens than these a
#: request is at the same place as before.
_UNREPORTED = 8


class Progressing(Protocol):
    """A request that goes on elsewhere when its engine core has died."""

    @property
    def group_id(self) -> int:
        """As the engine core knows it."""

    @property
    def num_generated(self) -> int:
        """Tokens that it has so far."""

    @property
    def is_begun(self) -> bool:
        """Whether a core has computed anything of it."""


class Verdict(NamedTuple):
    """A request that is to blame."""

    group_id: int
    #: The numbers of the replicas whose cores have died with it.
    replicas: list[int]


@dataclass(slots=True)
class Strike:
    """Cores have died while they had a request."""

    #: The tokens that the request had.
    position: int
    #: The numbers of the replicas whose cores have died there.
    replicas: list[int] = field(default_factory=list)
    #: Deaths there while nothing else was computed.
    deaths_alone: int = 0
    #: Tokens that the request must compute by itself, see ``ResumePoint.alone``.
    alone: int = 0


class Blame:
    """Owns what is held against open requests.

    A core that was killed from outside is nobody's fault, and is not reported here. The computation of a request is
    the same each time, so one that ends its core does it at the same place again: a request that a core had twice in
    vain, with the same tokens before it, is computed alone; if that ends a core, too, it is to blame. What passes the
    place is acquitted. So a request costs at most three cores, whatever else they compute.
    """

    def __init__(self) -> None:
        self._strikes: dict[int, Strike] = {}

    def observe_death(self, computed: set[int], requests: Iterable[Progressing], replica: int = 0) -> Verdict | None:
        """A core has died that had these requests: which of them is to blame, if that is known.

        ``computed``: the groups of its last steps, and that which it was adding. Suspects are also those that it had
        not begun: it may have died of one of them before any step.
        """
        requests = list(requests)
        computed &= {request.group_id for request in requests}  # others have ended meanwhile
        for request in requests:
            group_id, position = request.group_id, request.num_generated
            if group_id not in computed and request.is_begun:
                continue
            strike = self._strikes.get(group_id)
            if strike is None or not self._is_there(strike, position):
                strike = self._strikes[group_id] = Strike(position)
            strike.replicas.append(replica)
            if computed == {group_id}:
                strike.deaths_alone += 1
                if strike.alone or strike.deaths_alone > 1:
                    return Verdict(group_id, strike.replicas)
            if len(strike.replicas) > 1:
                strike.alone = 2 * strike.alone or 2 * _UNREPORTED
        return None

    def _is_there(self, strike: Strike, position: int) -> bool:
        """Whether a request with so many tokens is where its core died."""
        return position < strike.position + _UNREPORTED

    def alone(self, request: Progressing) -> int:
        """Tokens that a request must compute by itself before it may share a step."""
        strike = self._strikes.get(request.group_id)
        return strike.alone if strike is not None and self._is_there(strike, request.num_generated) else 0

    def forget(self, group_id: int) -> None:
        """The request has ended."""
        self._strikes.pop(group_id, None)


# Which requests an engine core computes, in memory that outlives it: so it is known with which of them it died.

#: Most requests that are noted; each takes 8 bytes, and pages that are not used take no memory.
_MOST = 1 << 17
_WORD = 8
#: Words before the requests of the last steps: their number, and the request at hand plus one, or 0.
_HEADER = 2


class LastSteps:
    """The groups of the last steps, and the one that is being added or admitted, for the process that computes them."""

    def __init__(self, steps: int) -> None:
        """``steps``: that may be in flight."""
        self._steps: deque[frozenset[int]] = deque(maxlen=steps)
        self._seq_ids: list[int] = []
        #: The group that is added or admitted while the next step is planned.
        self._at_hand: int | None = None

    def note(self, seq_ids: list[int], group_of: Callable[[int], int]) -> None:
        """A step of these sequences begins, beside those that may be in flight; ``group_of`` names a sequence's group.

        The list is kept, and not to be changed: most steps are of the sequences of the one before.
        """
        repeated = bool(self._steps) and seq_ids == self._seq_ids
        groups = self._steps[-1] if repeated else frozenset(map(group_of, seq_ids))
        changed = not self._steps or any(step is not groups for step in self._steps)
        self._seq_ids = seq_ids
        self._steps.append(groups)
        if changed:
            self._publish()
        if self._at_hand is not None:
            self._set_at_hand(None)

    def attempt(self, group_id: int) -> None:
        """A group is being added to the scheduler, or admitted: it may end the process before it is in any step."""
        if group_id != self._at_hand:
            self._set_at_hand(group_id)

    def begin_trial(self, group_id: int) -> None:
        """From now on this group is computed alone: those of earlier steps are not to blame for what follows."""
        self._steps.clear()
        self._seq_ids = []
        self._publish()
        self._set_at_hand(group_id)

    @property
    def groups(self) -> set[int]:
        """Those of the last steps; some may have ended since."""
        return set().union(*self._steps, () if self._at_hand is None else (self._at_hand,))

    def _set_at_hand(self, group_id: int | None) -> None:
        self._at_hand = group_id

    def _publish(self) -> None:
        """Called when the groups of the last steps may have changed."""


class FlightRecorder(LastSteps):
    """The core's side."""

    def __init__(self, descriptor: int, steps: int) -> None:
        """``descriptor``: of memory made by ``recorder_memory``, which is closed. ``steps``: that may be in flight."""
        super().__init__(steps)
        self._memory = mmap.mmap(descriptor, 0)
        os.close(descriptor)

    def _publish(self) -> None:
        noted = list(set().union(*self._steps))[:_MOST]
        at_hand = 0 if self._at_hand is None else self._at_hand + 1
        self._memory[: _WORD * (len(noted) + _HEADER)] = array("q", [len(noted), at_hand, *noted]).tobytes()

    def _set_at_hand(self, group_id: int | None) -> None:
        super()._set_at_hand(group_id)
        word = array("q", [0 if group_id is None else group_id + 1])
        self._memory[_WORD : 2 * _WORD] = word.tobytes()


def recorder_memory() -> int:
    """The descriptor of memory for a recorder, in which nothing is noted yet."""
    return shared_memory(_WORD * (_MOST + _HEADER))


def read_recorder(descriptor: int) -> set[int]:
    """The groups of the last steps that a core has begun, and that which it was adding. Some may have ended since."""
    words = array("q", os.pread(descriptor, _WORD * _HEADER, 0))
    if len(words) < _HEADER:
        return set()
    count, at_hand = words
    groups = set() if at_hand <= 0 else {at_hand - 1}
    if 0 < count <= _MOST:
        groups.update(array("q", os.pread(descriptor, _WORD * count, _WORD * _HEADER)))
    return groups
