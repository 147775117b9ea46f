"""One replica of a simulated cluster: an engine with its open requests, its figures and its state."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from octavo.lab.simulate.cluster.spec import Role
from octavo.lab.simulate.engine import SimulatedEngine, SimulatedRequest
from octavo.lab.simulate.figures import Completions, Gaps, StoreFigures, add_stores
from octavo.lab.simulate.step_profile import StepProfile
from octavo.lab.workloads.work_items import WorkItem

#: "starting": takes no requests yet. "draining": takes none any more. "down": failed. "stopped": not in use.
State = Literal["starting", "serving", "draining", "down", "stopped"]


@dataclass(slots=True, eq=False)
class ClusterJob:
    """A request in a cluster, over all replicas that it is on."""

    number: int
    item: WorkItem
    #: Tokens that it counts for while it is open: prompt and expected output.
    work: int
    #: What was sent of it by replicas that it was on before; None: nothing.
    progress: SimulatedRequest | None = None
    replica: Replica | None = None


@dataclass(slots=True)
class Totals:
    """Counts of the engines that a replica has had."""

    steps: int = 0
    preemptions_by_recompute: int = 0
    preemptions_by_swap: int = 0
    recomputed_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_queried_tokens: int = 0
    busy: float = 0.0
    stores: dict[str, StoreFigures] = field(default_factory=dict)

    def add(self, engine: SimulatedEngine) -> None:
        """Those of an engine, which is not used any more."""
        stats = engine.scheduler.counts()
        self.busy += engine.busy
        self.stores = engine.store_figures(self.stores)
        for name in _COUNTED:
            setattr(self, name, getattr(self, name) + getattr(stats, name))

    def merge(self, other: Totals) -> None:
        """Adds all of another replica's."""
        self.stores = add_stores(self.stores, other.stores.items(), same=("shared",))
        for name in ("busy", *_COUNTED):
            setattr(self, name, getattr(self, name) + getattr(other, name))


_COUNTED = (
    "steps",
    "preemptions_by_recompute",
    "preemptions_by_swap",
    "recomputed_tokens",
    "prefix_hit_tokens",
    "prefix_queried_tokens",
)


@dataclass(eq=False)
class Replica:
    """Owns an engine, which may be several one after another, as it fails and returns.

    What a step gives is known when the clock of the cluster reaches its end (``deliver``); a failure before loses it.
    What was given stays: a request that is lost with a replica goes on at another with the tokens that it has.
    Invariant: ``outstanding`` is the sum of ``work`` over ``jobs``.
    """

    number: int
    role: Role
    profile: StepProfile
    make_engine: Callable[[StepProfile, Callable[[float, int], None]], SimulatedEngine]
    state: State = "stopped"
    #: Tokens of its open requests, prompt and expected output.
    outstanding: int = 0
    jobs: dict[int, ClusterJob] = field(default_factory=dict)
    #: Whether its next turn is among the events of the cluster; of another engine than ``epoch`` they are void.
    has_turn: bool = False
    epoch: int = 0
    #: From when on its link is free for the next transfer.
    link_free: float = 0.0
    #: Figures of the requests that ended here.
    done: Completions = field(default_factory=Completions)
    gaps: Gaps = field(default_factory=Gaps)
    totals: Totals = field(default_factory=Totals)
    good: int = 0
    #: Requests given to it, those of failed replicas included, and their tokens; times that it failed.
    given: int = 0
    given_tokens: int = 0
    failures: int = 0
    #: In use until it stopped last; and since when it is in use again, None: it is not.
    seconds: float = 0.0
    since: float | None = None

    def __post_init__(self) -> None:
        self._ended: list[SimulatedRequest] = []
        self._delivered = True
        self._new_gaps = array("d")
        self._new_counts: list[int] = []
        self.engine = self.make_engine(self.profile, self._on_gap)

    @property
    def open(self) -> int:
        """Requests that it has."""
        return len(self.jobs)

    @property
    def kv_blocks(self) -> int:
        """Blocks of its KV cache."""
        return self.engine.blocks.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens of one."""
        return self.engine.blocks.block_size

    # --- its life ---------------------------------------------------------------------------------------------------

    def start(self, now: float, state: State) -> None:
        """Begins to be in use, with nothing in its cache."""
        if self.epoch:
            self.totals.add(self.engine)
            self.engine = self.make_engine(self.profile, self._on_gap)
        self.engine.wait_until(now)
        self.since = self.link_free = now
        self.state = state

    def stop(self, now: float, state: State) -> list[ClusterJob]:
        """Ends to be in use; returns the requests that it had, in the order of their arrival, with their progress."""
        self.state = state
        assert self.since is not None
        self.seconds += now - self.since
        self.since = None
        self.epoch += 1
        self.has_turn = False
        for request in self._sent_so_far():
            self.jobs[request.number].progress = request if request.tokens else None
        lost = sorted(self.jobs.values(), key=lambda job: job.number)
        self.jobs.clear()
        self.outstanding = 0
        self._ended, self._delivered = [], True
        self._forget_gaps()
        return lost

    def _sent_so_far(self) -> list[SimulatedRequest]:
        """Its requests, without what a step gives that has not ended yet."""
        return self.engine.open_requests() if self._delivered else self.engine.set_back(self._ended)

    def lost_tokens(self) -> int:
        """Tokens that it has computed of the requests that it has; the KV cache of one on its way here counts, too."""
        groups = self.engine.scheduler.queues.groups
        open_ = sum(groups[n].num_computed if n in groups else job.item.input_len for n, job in self.jobs.items())
        return open_ + sum(request.tokens for request in self._ended)

    # --- requests ---------------------------------------------------------------------------------------------------

    def take(self, job: ClusterJob) -> None:
        """A request is given to it."""
        job.replica = self
        self.jobs[job.number] = job
        self.outstanding += job.work
        self.given += 1
        self.given_tokens += job.work

    def release(self, job: ClusterJob) -> None:
        """A request has ended here."""
        del self.jobs[job.number]
        self.outstanding -= job.work

    def step(self) -> None:
        """Runs a step; see ``deliver``."""
        self._ended, self._delivered = self.engine.step(), False

    def deliver(self) -> list[SimulatedRequest]:
        """The requests that ended with the last step, whose end is now."""
        for seconds, count in zip(self._new_gaps, self._new_counts, strict=True):
            self.gaps.add(seconds, count)
        self._forget_gaps()
        ended, self._ended, self._delivered = self._ended, [], True
        return ended

    def _on_gap(self, seconds: float, count: int) -> None:
        self._new_gaps.append(seconds)
        self._new_counts.append(count)

    def _forget_gaps(self) -> None:
        if self._new_counts:
            del self._new_gaps[:]
            self._new_counts.clear()
