"""Autoscaling: how many replicas there shall be, from what is outstanding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from octavo.lab.simulate.cluster.replica import ClusterJob, Replica
from octavo.lab.simulate.cluster.spec import Autoscale, Role


class Scaled(Protocol):
    """What it looks at, and what it does: the members of ``Cluster``."""

    @property
    def replicas(self) -> Mapping[int, Replica]:
        """By number, in whatever state."""

    @property
    def serving(self) -> Mapping[Role, list[Replica]]:
        """Those that take requests, by role; only clusters of one role are scaled."""

    @property
    def jobs_without_replica(self) -> Iterable[ClusterJob]:
        """They wait until one serves."""

    @property
    def has_more(self) -> bool:
        """Whether anything is still to come."""

    def at(self, time: float, event: Callable[[float], None]) -> None:
        """Has the event happen at this time."""

    def start_replica(self, now: float, seconds: float) -> None:
        """One more serves after so many seconds."""

    def drain(self, replica: Replica, now: float) -> None:
        """It takes no more requests, and stops after its last."""


class Autoscaler:
    """Looks at a cluster at regular times; starts replicas at once, drains one at a time after calm.

    Wanted are ``outstanding / target`` replicas, rounded up, within the bounds; as the horizontal autoscaler of
    Kubernetes counts, whose stabilisation window ``calm`` is.
    """

    def __init__(self, cluster: Scaled, scale: Autoscale) -> None:
        """The cluster begins with its own number of replicas, within the bounds."""
        self._cluster, self._scale = cluster, scale
        self._too_many_since = math.inf
        cluster.at(0.0, self._look)

    def _look(self, now: float) -> None:
        cluster, scale = self._cluster, self._scale
        states = [replica.state for replica in cluster.replicas.values()]
        count = states.count("serving") + states.count("starting")
        wanted = self._wanted()
        for _ in range(wanted - count):
            cluster.start_replica(now, scale.start)
        if wanted >= count:
            self._too_many_since = math.inf
        else:
            self._too_many_since = min(self._too_many_since, now)
            (serving,) = cluster.serving.values()
            if now - self._too_many_since >= scale.calm and len(serving) > scale.least:
                cluster.drain(min(serving, key=lambda replica: (replica.outstanding, -replica.number)), now)
        if cluster.has_more:
            cluster.at(now + scale.every, self._look)

    def _wanted(self) -> int:
        cluster, tokens = self._cluster, self._scale.metric == "tokens"
        replicas = (replica for replica in cluster.replicas.values() if replica.state != "draining")
        load = sum(replica.outstanding if tokens else replica.open for replica in replicas)
        load += sum(job.work if tokens else 1 for job in cluster.jobs_without_replica)
        return min(max(math.ceil(load / self._scale.target), self._scale.least), self._scale.most)
