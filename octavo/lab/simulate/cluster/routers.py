"""Routers: which replica of a cluster gets a request.

A router is a class with one method. Write one in a module of your own and name it ``module:Class``:

    class First(Router):
        def route(self, item, replicas):
            return replicas[0]
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from octavo.core.plugins import load_class
from octavo.engine import replicas as engine_router
from octavo.lab.simulate.cluster.replica import Replica
from octavo.lab.simulate.prompt_ids import prompt_of
from octavo.lab.workloads.work_items import WorkItem

#: Points of each replica on the ring of ``SessionSticky``: shares of the replicas differ by about a tenth.
_POINTS = 128


@dataclass(frozen=True)
class RouterSettings:
    """What routers are made with."""

    seed: int
    #: Tokens of a block of the prefix caches, and blocks of the KV cache of the largest replica.
    block_size: int
    kv_blocks: int
    #: Tokens that a request is expected to take: prompt and output.
    work: Callable[[WorkItem], int]


class SimulatedRouter(ABC):
    """Chooses among the replicas that take requests; owns what it has to know for that."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings

    @abstractmethod
    def route(self, item: WorkItem, replicas: Sequence[Replica]) -> Replica:
        """The replica for a request; ``replicas``: at least one, in the order of their numbers."""

    def ended(self, item: WorkItem, replica: Replica) -> None:  # noqa: B027
        """A request has ended on the replica that it was given to."""

    def joined(self, replica: Replica) -> None:  # noqa: B027
        """A replica takes requests from now on; its cache is empty."""

    def left(self, replica: Replica) -> None:  # noqa: B027
        """A replica takes no more requests; if it failed, those that it had are routed again."""


class _GrowingRouter(engine_router.Router):
    """Replicas join while it runs; there is none at first."""

    def add(self, replica: int) -> None:
        """A replica takes requests, new or again: nothing is outstanding on it, and its cache is empty."""
        missing = replica + 1 - len(self._replicas)
        self._replicas += [engine_router.RoutedReplica() for _ in range(missing)]
        self._replicas[replica] = engine_router.RoutedReplica()


class EngineRouter(SimulatedRouter):
    """The choice of the data-parallel front end, by its own code (``octavo/engine/replicas.py``)."""

    routing: ClassVar[engine_router.Routing]

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self._router = _GrowingRouter(0, settings.block_size, self.routing, settings.kv_blocks)
        self._replicas: dict[int, Replica] = {}
        self._count = itertools.count()

    def route(self, item: WorkItem, replicas: Sequence[Replica]) -> Replica:
        """See ``SimulatedRouter``."""
        prompt = prompt_of(next(self._count), item) if self.routing == "prefix" else []
        numbers = [replica.number for replica in replicas]
        return self._replicas[self._router.choose(prompt, self.settings.work(item), among=numbers)]

    def ended(self, item: WorkItem, replica: Replica) -> None:
        """See ``SimulatedRouter``."""
        self._router.release(replica.number, self.settings.work(item))

    def joined(self, replica: Replica) -> None:
        """See ``SimulatedRouter``."""
        self._replicas[replica.number] = replica
        self._router.add(replica.number)

    def left(self, replica: Replica) -> None:
        """See ``SimulatedRouter``."""
        self._router.restart(replica.number)


class RoundRobin(EngineRouter):
    """The next one."""

    routing = "round_robin"


class LeastLoaded(EngineRouter):
    """The replica with the fewest outstanding tokens; among equals, the next."""

    routing = "least_loaded"


class PrefixAware(EngineRouter):
    """The fewest tokens to compute if it got the request, less those of the longest prefix that it was given before.

    As many blocks of each replica are remembered as its KV cache has.
    """

    routing = "prefix"


class PowerOfTwo(SimulatedRouter):
    """Of two replicas drawn at random, the one with fewer outstanding tokens (Mitzenmacher 2001)."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self._random = random.Random(f"{settings.seed} router")

    def route(self, item: WorkItem, replicas: Sequence[Replica]) -> Replica:
        """See ``SimulatedRouter``."""
        count = len(replicas)
        if count == 1:
            return replicas[0]
        first = int(self._random.random() * count)
        second = int(self._random.random() * (count - 1))
        one, other = replicas[first], replicas[second + (second >= first)]
        return other if other.outstanding < one.outstanding else one


class SessionSticky(SimulatedRouter):
    """All requests of a session, or of a user without sessions, on one replica (Karger et al. 1997, section 4).

    Each replica has points on a ring, and a session goes to the first point after its own. While a replica is away, its
    sessions go to the next points; the others stay where they are. A request with neither counts as a session.
    """

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self._ring: list[tuple[int, int]] = []
        self._replicas: dict[int, Replica] = {}

    def route(self, item: WorkItem, replicas: Sequence[Replica]) -> Replica:
        """See ``SimulatedRouter``."""
        return self._replicas[home(self._ring, item)]

    def joined(self, replica: Replica) -> None:
        """See ``SimulatedRouter``."""
        self._replicas[replica.number] = replica
        self._ring = ring(self._replicas)

    def left(self, replica: Replica) -> None:
        """See ``SimulatedRouter``."""
        del self._replicas[replica.number]
        self._ring = ring(self._replicas)


def ring(numbers: Sequence[int] | dict[int, Replica]) -> list[tuple[int, int]]:
    """The points of these replicas, in order, each with the replica's number."""
    return sorted((_hash(f"{number}/{i}"), number) for number in numbers for i in range(_POINTS))


def home(points: list[tuple[int, int]], item: WorkItem) -> int:
    """The number of the replica that follows a request's session on the ring."""
    key = _hash(item.session or item.user or item.stream)
    return points[bisect.bisect_right(points, (key, -1)) % len(points)][1]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


ROUTERS: dict[str, type[SimulatedRouter]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "prefix": PrefixAware,
    "session": SessionSticky,
}


def router_class(name: str) -> type[SimulatedRouter]:
    """The class of this name, or of ``module:Class``.

    Raises:
        ConfigError: there is no such router.
    """
    return load_class(name, ROUTERS, SimulatedRouter, "router", "octavo.lab.simulate.cluster.routers.Router")
