"""The cluster: replicas stepped in the order of their clocks, with one virtual time for arrivals and routing."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.lab.simulate.cluster.autoscaler import Autoscaler
from octavo.lab.simulate.cluster.replica import ClusterJob, Replica, Role
from octavo.lab.simulate.cluster.routers import RouterSettings, SimulatedRouter, router_class
from octavo.lab.simulate.cluster.spec import ClusterSpec, stated_limits
from octavo.lab.simulate.engine import SimulatedEngine, SimulatedRequest
from octavo.lab.simulate.figures import Completions, Series
from octavo.lab.simulate.step_profile import StepProfile
from octavo.lab.simulate.stores import SimulatedStore, make_disk, make_shared
from octavo.lab.workloads.work_items import WorkItem

#: Output tokens that a request without a limit is expected to take, as in the data-parallel front end.
_EXPECTED_TOKENS = 256
#: Of several replicas.
_MOST_SAMPLES = 256
_SERIES = ("waiting", "running", "swapped", "blocks_used", "replicas")

Event = Callable[[float], None]


class Cluster:
    """Owns the replicas, the routers, and the events to come: turns of replicas, transfers, failures, starts.

    A replica's turn is at the end of its step: what that gave is known from then on, and its next step begins.
    Invariant: every request that has arrived is on one replica, on its way to one, or waits for one to come; it ends
    once.
    """

    def __init__(self, spec: ClusterSpec, options: EngineConfig) -> None:
        """Makes the replicas.

        Raises:
            ConfigError: see ``SimulatedEngine``; or a decode replica has no host blocks to receive into.
        """
        self.spec = spec
        self._options = options
        self._limit = stated_limits(spec.max_tokens)
        self._events: list[tuple[float, int, Event]] = []
        self._outage_draws: dict[int, random.Random] = {}
        self._order = itertools.count()
        self.replicas: dict[int, Replica] = {}
        #: By role: those that take requests, in the order of their numbers, and the router that chooses among them.
        self.serving: dict[Role, list[Replica]] = {}
        self._routers: dict[Role, SimulatedRouter] = {}
        self._entry: Role = "prefill" if spec.prefill else "both"
        #: Requests that no replica could take; prompts that no decode replica could.
        self.jobs_without_replica: deque[ClusterJob] = deque()
        self._prefilled: deque[tuple[ClusterJob, Replica, int]] = deque()
        #: By role: replicas that will return.
        self._coming: Counter[Role] = Counter()
        #: Of requests that did not end as they should.
        self.lost = Completions()
        # A sample looks at every replica.
        self.series = Series(_SERIES) if spec.size == 1 else Series(_SERIES, _MOST_SAMPLES)
        self.resumed = self.lost_tokens = self.transfers = self.starts = self.drained = 0
        self.transferred_bytes = 0
        self.transfer_seconds = 0.0
        self.num_open = 0
        self._arrivals_left = True
        members = spec.members()
        self._shared = make_shared(members[0][2], options)
        for number, role, profile in members:
            self._make_replica(number, role, profile)
        for role in dict.fromkeys(role for _, role, _ in members):
            self.serving[role] = []
            self._routers[role] = self._make_router(spec.decode_router if role == "decode" else spec.router, role)
        self._scaler = Autoscaler(self, spec.autoscale) if spec.autoscale is not None else None
        for replica in self.replicas.values():
            replica.start(0.0, "serving")
            self._join(replica)
        for outage in spec.outages:
            begin = self._plan_outage if outage.planned else self._fail
            self.at(outage.at, partial(begin, number=outage.replica, seconds=outage.seconds))

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self, items: Iterable[tuple[int, WorkItem]]) -> None:
        """Runs items, which come with their numbers and in the order of their arrival, until each has ended.

        Raises:
            ConfigError: an item is not valid, or arrives before the one before it.
        """
        events, overhead = self._events, next(iter(self.replicas.values())).engine.overhead
        previous = 0.0
        for number, item in items:
            if not item.at >= previous:
                raise ConfigError(f"request {number} arrives at {item.at} s, before the one before it ({previous} s)")
            previous = item.at
            now = item.at + overhead.arrival
            while events and events[0][0] < now:
                at, _, event = heapq.heappop(events)
                event(at)
            self.num_open += 1
            self._route(ClusterJob(number, item, self._work(item)), now)
        self._arrivals_left = False
        while self.num_open:
            at, _, event = heapq.heappop(events)
            event(at)
        for replica in self.replicas.values():
            replica.totals.add(replica.engine)

    @property
    def has_more(self) -> bool:
        """Whether requests are unfinished or still to arrive."""
        return self._arrivals_left or self.num_open > 0

    def at(self, time: float, event: Event) -> None:
        """Calls ``event`` at this time; events at one time come in the order in which they were made."""
        heapq.heappush(self._events, (time, next(self._order), event))

    # --- requests ---------------------------------------------------------------------------------------------------

    def _route(self, job: ClusterJob, now: float) -> None:
        """Gives a request that begins, or goes on after a failure, to a replica; it waits if all are away."""
        pool = self.serving[self._entry]
        if not pool:
            if self._will_come(self._entry):
                self.jobs_without_replica.append(job)
            else:
                self._end(job, "no replica")
            return
        replica = self._choose(self._entry, job)
        item = job.item
        if self.spec.prefill:  # one token more than it has
            item = msgspec.structs.replace(item, output_len=1 + (job.progress.tokens if job.progress else 0))
        replica.engine.wait_until(now)
        replica.engine.add(job.number, item, job.progress)
        self._take_turn(replica)

    def _choose(self, role: Role, job: ClusterJob) -> Replica:
        replica = self._routers[role].route(job.item, self.serving[role])
        if replica.state != "serving" or replica.role != role:
            raise ConfigError(f"router {self.spec.router!r} chose replica {replica.number}, which takes no requests")
        replica.take(job)
        return replica

    def _take_turn(self, replica: Replica) -> None:
        if not replica.has_turn:
            replica.has_turn = True
            self.at(replica.engine.now, partial(self._turn, replica, replica.epoch))

    def _turn(self, replica: Replica, epoch: int, now: float) -> None:
        """A replica's step is done, and the next begins."""
        if replica.epoch != epoch:
            return
        replica.has_turn = False
        for request in replica.deliver():
            self._ended(replica, request, now)
        engine = replica.engine
        if engine.has_work:
            if engine.now <= now:
                replica.step()
                if engine.now >= self.series.next:
                    self._sample(engine.now)
            self._take_turn(replica)
        elif replica.state == "draining" and not replica.jobs:
            replica.stop(now, "stopped")

    def _ended(self, replica: Replica, request: SimulatedRequest, now: float) -> None:
        """A request has ended on a replica: for good, or its prompt is computed and another one continues."""
        job = replica.jobs[request.number]
        replica.release(job)
        self._routers[replica.role].ended(job.item, replica)
        item = job.item
        if request.finish_reason not in ("stop", "length"):
            self._end(job, str(request.finish_reason))
        elif replica.role == "prefill" and item.output_len > request.tokens:
            job.progress = request
            self._send(job, replica, replica.epoch, now)
        else:
            tokens, first = request.tokens, request.first
            replica.done.add(job.number, item, item.at, first, request.last, tokens)
            each = (request.last - first) / (tokens - 1) if tokens > 1 else 0.0
            replica.good += self.spec.limits.met(item, first - item.at, each)
            self._end(job, None)

    def _end(self, job: ClusterJob, failure: str | None) -> None:
        self.num_open -= 1
        job.replica = None
        if failure is not None:
            self.lost.fail(job.item, failure)

    def _will_come(self, role: Role) -> bool:
        return self._coming[role] > 0 or self._scaler is not None

    def _work(self, item: WorkItem) -> int:
        limit = self._limit(item)
        return item.input_len + (_EXPECTED_TOKENS if limit is None else limit)

    # --- transfers --------------------------------------------------------------------------------------------------

    def _send(self, job: ClusterJob, sender: Replica, sent: int, now: float) -> None:
        """Sends the KV cache of a prompt to a decode replica, behind those that the sender is sending."""
        if sender.epoch != sent:
            self._resume(job, now)
            return
        if not self.serving["decode"]:
            if self._will_come("decode"):
                self._prefilled.append((job, sender, sent))
            else:
                self._end(job, "no replica")
            return
        receiver = self._choose("decode", job)
        assert job.progress is not None
        size = (job.item.input_len + job.progress.tokens - 1) * sender.profile.kv_bytes_per_token
        sender.link_free = max(sender.link_free, now) + size / self.spec.transfer.bandwidth
        arrival = sender.link_free + self.spec.transfer.latency
        self.transfers += 1
        self.transferred_bytes += size
        self.transfer_seconds += arrival - now
        self.at(arrival, partial(self._arrive, job, sender, sent, receiver, receiver.epoch))

    def _arrive(self, job: ClusterJob, sender: Replica, sent: int, receiver: Replica, epoch: int, now: float) -> None:
        """The KV cache is there; while the receiver has no host blocks for it, it waits on the sender."""
        if receiver.epoch != epoch:
            return  # it failed, and its requests go on elsewhere
        if sender.epoch != sent:
            receiver.release(job)
            self._routers["decode"].ended(job.item, receiver)
            self._resume(job, now)
            return
        assert job.progress is not None
        engine = receiver.engine
        engine.wait_until(now)
        if engine.take_over(job.number, job.item, job.progress) is None:
            if not engine.has_work:
                raise ConfigError(
                    f"the KV cache of request {job.number} ({job.item.input_len} tokens) does not fit the host blocks "
                    "of a decode replica, into which it arrives: give more swap_space"
                )
            # After the step that runs now, whose turn was made before this event.
            self.at(max(now, engine.now), partial(self._arrive, job, sender, sent, receiver, epoch))
        self._take_turn(receiver)

    # --- failures ---------------------------------------------------------------------------------------------------

    def _plan_outage(self, now: float, number: int, seconds: float) -> None:
        """As ``_fail``, once the tokens of the replica's step have been sent."""
        replica = self.replicas.get(number)
        at = max(now, replica.engine.now) if replica is not None and replica.has_turn else now
        self.at(at, partial(self._fail, number=number, seconds=max(seconds - (at - now), 1e-9)))

    def _fail(self, now: float, number: int, seconds: float) -> None:
        """A replica fails, and returns after so long; nothing happens if it is not in use."""
        replica = self.replicas.get(number)
        if replica is None or replica.state not in ("serving", "draining"):
            return
        draining = replica.state == "draining"
        if not draining:
            self._leave(replica)
        replica.failures += 1
        if replica.engine.stores is not None:
            replica.engine.stores.fail(now)
        self.lost_tokens += replica.lost_tokens()
        lost = replica.stop(now, "stopped" if draining else "down")
        if seconds < math.inf and not draining:
            self._coming[replica.role] += 1
            self.at(now + seconds, partial(self._return, replica))
        for job in lost:
            self._resume(job, now)
        self._route_jobs_without_replica(now)

    def _return(self, replica: Replica, now: float) -> None:
        self._coming[replica.role] -= 1
        replica.start(now, "serving")
        self._join(replica)

    def _resume(self, job: ClusterJob, now: float) -> None:
        """A request whose replica has failed goes on with the tokens that it has."""
        job.replica = None
        self.resumed += 1
        self._route(job, now)

    def _next_outage(self, replica: Replica) -> None:
        """Draws when a replica that has begun to serve fails next."""
        outages = self.spec.random_outages
        if outages is not None:
            rng = self._outage_draws[replica.number]
            at = replica.engine.now + rng.expovariate(1 / outages.between)
            self.at(at, partial(self._fail_at_random, replica, replica.epoch, rng.expovariate(1 / outages.repair)))

    def _fail_at_random(self, replica: Replica, epoch: int, seconds: float, now: float) -> None:
        if replica.epoch == epoch:
            self._fail(now, replica.number, seconds)

    # --- replicas ---------------------------------------------------------------------------------------------------

    def start_replica(self, now: float, seconds: float) -> None:
        """Starts a replica that is not in use, or a new one; it takes requests after so many seconds."""
        stopped = next((r for r in self.replicas.values() if r.state == "stopped"), None)
        if stopped is None:
            role, profile = next(iter(self.replicas.values())).role, self.spec.replicas[0][1]
            stopped = self._make_replica(len(self.replicas), role, profile)
        stopped.start(now, "starting")
        self.starts += 1
        self.at(now + seconds, partial(self._started, stopped))

    def _started(self, replica: Replica, now: float) -> None:
        replica.engine.wait_until(now)
        replica.state = "serving"
        self._join(replica)

    def drain(self, replica: Replica, now: float) -> None:
        """Gives a replica no more requests; it stops when it has none."""
        self._leave(replica)
        self.drained += 1
        replica.state = "draining"
        if not replica.jobs:
            replica.stop(now, "stopped")

    def _make_replica(self, number: int, role: Role, profile: StepProfile) -> Replica:
        # Each has a disk of its own, which outlives its engines.
        replica = Replica(number, role, profile, partial(self._make_engine, disk=make_disk(self._options)))
        if role == "decode" and not replica.engine.blocks.groups[0].host.num_blocks:
            raise ConfigError("decode replicas receive KV caches in host blocks: give swap_space above 0")
        self._outage_draws[number] = random.Random(f"{self.spec.seed} outages {number}")
        self.replicas[number] = replica
        return replica

    def _make_engine(
        self, profile: StepProfile, on_gap: Callable[[float, int], None], disk: SimulatedStore | None
    ) -> SimulatedEngine:
        return SimulatedEngine(
            profile,
            self._options,
            mode=self.spec.mode,
            max_tokens=self._limit,
            on_gap=on_gap,
            disk=disk,
            shared=self._shared,
        )

    def _make_router(self, name: str, role: Role) -> SimulatedRouter:
        pool = [replica for replica in self.replicas.values() if replica.role == role]
        settings = RouterSettings(
            self.spec.seed, pool[0].block_size, max(replica.kv_blocks for replica in pool), self._work
        )
        return router_class(name)(settings)

    def _join(self, replica: Replica) -> None:
        pool = self.serving[replica.role]
        pool.append(replica)
        pool.sort(key=lambda r: r.number)
        self._routers[replica.role].joined(replica)
        self._next_outage(replica)
        self._route_jobs_without_replica(replica.engine.now)

    def _route_jobs_without_replica(self, now: float) -> None:
        """Gives what waits for a replica to one that has come; if none will come, it fails."""
        if self.serving[self._entry] or not self._will_come(self._entry):
            waiting = sorted(self.jobs_without_replica, key=lambda job: job.number)
            self.jobs_without_replica.clear()
            for job in waiting:
                self._route(job, now)
        for _ in range(len(self._prefilled)):
            self._send(*self._prefilled.popleft(), now)

    def _leave(self, replica: Replica) -> None:
        self.serving[replica.role].remove(replica)
        self._routers[replica.role].left(replica)

    def _sample(self, now: float) -> None:
        sums = [0, 0, 0, 0]
        serving = 0
        for replica in self.replicas.values():
            queues = replica.engine.scheduler.queues
            sums[0] += queues.num_waiting
            sums[1] += len(queues.running)
            sums[2] += len(queues.swapped)
            sums[3] += replica.engine.blocks.state.used
            serving += replica.state == "serving"
        self.series.add(now, *sums, serving)
