"""Which request killed an engine core: ``Blame`` finds it, from the notes of its ``FlightRecorder``."""

from __future__ import annotations

import mmap
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from octavo.process.start_process import shared_memory

if TYPE_CHECKING:
    from octavo.engine.output_processor import RequestState

#: The error of the culprit, with that of its core.
GUILTY = "the engine failed again and again at this request, at last when nothing else was computed: {}"
#: A core may sample a few tokens that it cannot report before it dies, so positions less than this many tokens later
#: count as the same.
_UNREPORTED = 8
#: Most requests in a recorder, 8 bytes each; untouched pages take no memory.
_MOST = 1 << 17
_WORD = 8
#: Words before the requests: their number, and the group being added or admitted plus one, or 0.
_HEADER = 2


class Verdict(NamedTuple):
    group_id: int
    #: The replicas whose cores died with it.
    replicas: list[int]


@dataclass(slots=True)
class Strike:
    #: The number of tokens that the request had.
    position: int
    #: The replicas whose cores died there.
    replicas: list[int] = field(default_factory=list)
    #: Deaths while nothing else was computed.
    deaths_alone: int = 0
    #: ``ResumePoint.alone`` of the request.
    alone: int = 0


class Blame:
    """Finds the request that kills its engine core.

    A request is deterministic, so a request that kills its core does so at the same token again. A request that two
    cores had when they died, with the same number of tokens, is then computed alone; if that core dies too, the request
    is the culprit. A request that gets past the token is acquitted. So one request costs at most three cores. A core
    that was killed from outside is not reported here.
    """

    def __init__(self) -> None:
        self._strikes: dict[int, Strike] = {}

    def observe_death(self, computed: set[int], requests: Iterable[RequestState], replica: int = 0) -> Verdict | None:
        """Returns the culprit if a core's death proves it.

        ``computed``: the groups of the core's last steps, and the group that it was adding. ``requests``: all requests
        of the core. Those not yet begun are suspects too: a request may kill a core before its first step.
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
        return position < strike.position + _UNREPORTED

    def alone(self, request: RequestState) -> int:
        """Returns how many tokens a request must compute alone before it may share a step."""
        strike = self._strikes.get(request.group_id)
        return strike.alone if strike is not None and self._is_there(strike, request.num_generated) else 0

    def forget(self, group_id: int) -> None:
        self._strikes.pop(group_id, None)


class LastSteps:
    """The groups of the last steps, and the group being added or admitted."""

    def __init__(self, steps: int) -> None:
        """``steps``: how many may be in flight."""
        self._steps: deque[frozenset[int]] = deque(maxlen=steps)
        self._seq_ids: list[int] = []
        self._at_hand: int | None = None

    def note(self, seq_ids: list[int], group_of: Callable[[int], int]) -> None:
        """``seq_ids`` is kept and must not be changed."""
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
        """Records that a group is being added or admitted, which may end the process before its first step."""
        if group_id != self._at_hand:
            self._set_at_hand(group_id)

    def begin_trial(self, group_id: int) -> None:
        """Forgets earlier steps: from now on this group is computed alone."""
        self._steps.clear()
        self._seq_ids = []
        self._publish()
        self._set_at_hand(group_id)

    def blame(self, groups: Iterable[int]) -> None:
        """Names the groups of a step after which the process cannot go on, in the place of the last steps."""
        self._steps.clear()
        self._steps.append(frozenset(groups))
        self._seq_ids = []
        self._publish()
        self._set_at_hand(None)

    @property
    def groups(self) -> set[int]:
        return set().union(*self._steps, () if self._at_hand is None else (self._at_hand,))

    def _set_at_hand(self, group_id: int | None) -> None:
        self._at_hand = group_id

    def _publish(self) -> None:
        """Called when the recorded groups may have changed."""


class FlightRecorder(LastSteps):
    """``LastSteps`` in shared memory, which survives the core's process."""

    def __init__(self, descriptor: int, steps: int) -> None:
        """Maps and closes ``descriptor``, which ``recorder_memory`` made."""
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
    return shared_memory(_WORD * (_MOST + _HEADER))


def read_recorder(descriptor: int) -> set[int]:
    """Returns the groups of the core's last steps, and the group that it was adding; some may have ended."""
    words = array("q", os.pread(descriptor, _WORD * _HEADER, 0))
    if len(words) < _HEADER:
        return set()
    count, at_hand = words
    groups = set() if at_hand <= 0 else {at_hand - 1}
    if 0 < count <= _MOST:
        groups.update(array("q", os.pread(descriptor, _WORD * count, _WORD * _HEADER)))
    return groups
