"""Which of the requests that an engine core had when it died is to blame: one with which it dies again, alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

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
    #: Tokens that the request must compute by itself, see ``Progress.alone``.
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
