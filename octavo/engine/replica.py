"""One of the places behind a front end in which an engine core serves requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from octavo.core.processor_waits import ProcessorWaits
from octavo.engine.core_client import CoreClient
from octavo.engine.core_starter import RestartLimit
from octavo.engine.request_state import RequestState

#: "drained": it lives, and gets no requests. "dead": it is not started again.
ReplicaStatus = Literal["starting", "ready", "drained", "dead"]


@dataclass(frozen=True)
class ReplicaState:
    """What an operator may know of a replica."""

    number: int
    status: ReplicaStatus
    #: The process of its engine core, if it has one.
    pid: int | None
    num_open: int
    num_restarts: int


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended."""

    request: RequestState
    #: Tokens that it counts for in the router.
    work: int
    #: None: it waits for a core.
    replica: Replica | None = None
    #: The digest of the model that has begun it; None: nothing of it was computed.
    digest: str | None = None
    #: Whether a core was ever given it.
    was_sent: bool = False
    #: Whether it is about this replica, and of no use elsewhere.
    is_fixed: bool = False

    @property
    def group_id(self) -> int:
        """As the engine cores know it; later requests have higher ones."""
        return self.request.group_id


@dataclass(slots=True, eq=False)
class Replica:
    """A place, and the core that has it now.

    Its requests are those in ``open``; a core that is lost loses none of them.
    """

    number: int
    client: CoreClient
    restarts: RestartLimit
    status: ReplicaStatus = "starting"
    open: dict[int, OpenRequest] = field(default_factory=dict)
    #: Of all of its cores: the first step of a later one is as fast as any, as what was compiled for it is kept.
    num_steps: int = 0
    #: Of the model that its core has loaded.
    digest: str = ""
    #: Whether an operator wants it to take no requests.
    drained: bool = False
    #: Whether its core is being started again on purpose.
    is_restarting: bool = False
    #: Steps when the watchdog last looked, and seconds for which there was none since although it could have run.
    seen_steps: int = -1
    quiet: float = 0.0
    #: Of its core and the core's workers.
    waits: ProcessorWaits = field(default_factory=ProcessorWaits)

    @property
    def lives(self) -> bool:
        """Whether a core can answer."""
        return self.status in ("ready", "drained")

    def state(self) -> ReplicaState:
        """As it is now."""
        pid = self.client.pid if self.lives else None
        return ReplicaState(self.number, self.status, pid, len(self.open), self.restarts.count)

    def is_hung(self, elapsed: float, patience: float) -> bool:
        """Whether its core has done no step for ``patience`` seconds of its own; to be asked every ``elapsed`` seconds.

        Seconds in which a thread of the core or of its workers was ready to run while others had the processors do not
        count: on a busy machine a step takes long, and the core would be ended again and again with the same requests,
        which would be blamed for it.
        """
        held_up = self.waits.since_last([self.client.pid]) if self.open else 0.0
        if not self.open or self.seen_steps != self.num_steps:
            self.seen_steps, self.quiet = self.num_steps if self.open else -1, 0.0
            return False
        self.quiet += max(0.0, elapsed - held_up)
        return self.quiet > patience
