"""Which of the requests that an engine core was computing when it died is to blame: one that does it again, alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

#: Why a request ends that is to blame, with the end of its core.
GUILTY = "the engine failed again and again at this request, at last when nothing else was computed: {}"


class Progressing(Protocol):
    """A request that goes on elsewhere when its engine core has died."""

    @property
    def group_id(self) -> int:
        """As the engine core knows it."""

    @property
    def num_generated(self) -> int:
        """Tokens that it has so far."""


@dataclass(slots=True)
class Strike:
    """A core has died while it computed a request."""

    #: The tokens that the request had.
    position: int
    #: Whether more than one core has died there.
    repeated: bool = False
    #: Tokens that the request must compute by itself, see ``Progress.alone``.
    alone: int = 0


class Blame:
    """Owns what is held against open requests.

    A core that was killed from outside is nobody's fault, and is not reported here. The computation of a request is
    the same each time, so one that ends its core does it at the same place again: a request that was computed twice in
    vain, with the same tokens before it, is computed alone; if that ends a core, too, it is to blame. What passes the
    place is acquitted.
    """

    def __init__(self) -> None:
        self._strikes: dict[int, Strike] = {}

    def observe_death(self, computed: set[int], requests: Iterable[Progressing]) -> int | None:
        """A core has died that had these requests; ``computed``: the groups of its last steps. The guilty one's id."""
        suspects = [request for request in requests if request.group_id in computed]
        for request in suspects:
            strike, position = self._strikes.get(request.group_id), request.num_generated
            if strike is None:
                self._strikes[request.group_id] = Strike(position)
            elif strike.position != position:
                strike.position, strike.repeated = position, False
            elif strike.repeated and strike.alone and len(suspects) == 1:
                return request.group_id
            else:
                strike.repeated = True
                strike.alone = 2 * strike.alone or 1
        return None

    def alone(self, request: Progressing) -> int:
        """Tokens that a request must compute by itself before it may share a step."""
        strike = self._strikes.get(request.group_id)
        return strike.alone if strike is not None and strike.position == request.num_generated else 0

    def forget(self, group_id: int) -> None:
        """The request has ended."""
        self._strikes.pop(group_id, None)
