"""Scheduling policies: the order in which groups are admitted, kept and resumed, and which group is preempted.

A policy is a class with one method. Write one in a module of your own and name it ``module:Class``:

    class ShortestPromptFirst(Policy):
        uses_priority = False

        def key(self, group):
            return len(group.request.prompt_token_ids)
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from octavo.config.options import SchedulerOptions
from octavo.core.errors import ConfigError
from octavo.core.plugins import load_class
from octavo.core.request import EngineCoreRequest, Generate, SequenceStatus
from octavo.scheduler import groups
from octavo.scheduler.groups import SequenceGroup

# What a scheduling policy is.


class Policy(ABC):
    """Orders groups.

    A subclass needs ``key`` alone. What it learns meanwhile it is told by the methods ``on_...``, which do nothing by
    default; ``policy_data`` of a group is the policy's own.
    """

    #: Whether the key of a running group changes with what it computes, or with time.
    dynamic = False
    #: Whether the key may depend on the request's ``priority``. If not, a request with one is refused.
    uses_priority = True
    #: Whether it may depend on ``ttft_target`` and ``tpot_target``. If not, a request with one is refused.
    uses_targets = False
    #: Whether the order depends on how much time has passed, beside the order of events. If so, processes that plan for
    #: themselves (``external_launcher``) refuse the policy.
    uses_clock = False
    #: Whether a waiting group may preempt running ones (``displaces``) without the option ``priority_preemption``.
    preemptive = False
    #: Whether the key of a waiting group may grow while it waits: see ``lane``.
    waiting_keys_grow = False

    @classmethod
    def from_options(cls, options: SchedulerOptions) -> Self:
        """The policy under these options; by default they do not matter to it."""
        return cls()

    @abstractmethod
    def key(self, group: SequenceGroup) -> Any:
        """The sort key: lower goes first; among equals, the earlier arrival."""

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        """Whether ``waiting``, which goes first, is worth the preemption of ``running``: by default by priority."""
        return running.priority > waiting.priority

    def lane(self, group: SequenceGroup) -> Hashable:
        """With ``waiting_keys_grow``: waiting groups of one lane go in order of arrival, lanes by their first group."""
        return group.group_id

    def on_arrival(self, group: SequenceGroup) -> None:  # noqa: B027
        """A group is about to be queued for the first time; before that its key is not asked for."""

    def on_admit(self, group: SequenceGroup) -> None:  # noqa: B027
        """A waiting or swapped group begins to run."""

    def on_preempt(self, group: SequenceGroup) -> None:  # noqa: B027
        """A running group is about to be queued again; what it has computed is lost or moved."""

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:  # noqa: B027
        """A step is about to be planned; of ``dynamic`` policies only. ``now`` on the clock of the arrival times."""

    def on_sequence_end(self, seq: groups.Sequence, status: SequenceStatus) -> None:  # noqa: B027
        """A sequence ends, alone or with its group."""

    def on_end(self, group: SequenceGroup) -> None:  # noqa: B027
        """A group has ended, and so have its sequences."""


def num_output_tokens(group: SequenceGroup) -> int:
    """Tokens that each of a group's sequences has generated: they sample together."""
    return len(group.seqs[0].token_ids) - len(group.request.prompt_token_ids)


# Policies that need no state: by arrival, priority, declared length or tokens held.


class FirstComeFirstServed(Policy):
    """By arrival."""

    uses_priority = False

    def key(self, group: SequenceGroup) -> tuple[float, int]:
        """The time of the arrival."""
        return group.arrival


class StaticPriority(Policy):
    """By the request's own ``priority``."""

    def key(self, group: SequenceGroup) -> float:
        """The priority; lower goes first."""
        return group.priority


class ShortestJobFirst(Policy):
    """By ``max_tokens``, or what the context length leaves."""

    uses_priority = False

    def key(self, group: SequenceGroup) -> int:
        """Most tokens that one of its sequences may generate."""
        return group.max_length - len(group.request.prompt_token_ids)


class LongestDataFirst(Policy):
    """By tokens of prompt and output, most first: finishing such a group frees most, recomputing it costs most."""

    dynamic = True
    uses_priority = False

    def key(self, group: SequenceGroup) -> int:
        """Minus its tokens, computed or not."""
        return -group.num_tokens


class LastComeFirstServed(Policy):
    """By arrival, the latest first."""

    uses_priority = False

    def key(self, group: SequenceGroup) -> tuple[float, int]:
        """Minus the time of the arrival."""
        seconds, number = group.arrival
        return -seconds, -number


# Earliest deadline first, over targets for the first token and for the tokens after it.

#: Weight of the newest interval between steps in their average.
_SMOOTHING = 0.1


@dataclass(slots=True)
class _Targets:
    """Seconds; infinity: none. ``due`` is on the clock of the arrival times."""

    tpot: float
    #: When the first token is due; without a target for it, when the token came.
    due: float


class EarliestDeadlineFirst(Policy):
    """By the time at which the next token is due: the first ``ttft_target`` after the arrival, each further one
    ``tpot_target`` later.

    Nothing is dropped. A group whose deadline has passed, or cannot be met even if its prompt is computed at once, goes
    behind all whose can still be met, as do those without a deadline; among these the earlier arrival goes first. Under
    overload this keeps the share of requests that meet their targets: plain earliest deadline first would serve those
    that are late already, and make the others late. A waiting group that has used up half of its target preempts
    running groups that are late or have no deadline.
    """

    dynamic = True
    uses_priority = False
    uses_targets = True
    uses_clock = True
    preemptive = True
    waiting_keys_grow = True

    def __init__(self, ttft_target: float | None, tpot_target: float | None, token_budget: int) -> None:
        """Targets of requests that bring none, in seconds."""
        self._ttft_target, self._tpot_target = ttft_target, tpot_target
        self._token_budget = token_budget
        self._now = -math.inf
        #: Whether the last step had something to compute.
        self._was_running = False
        self._seconds_per_step = 0.0

    @classmethod
    def from_options(cls, options: SchedulerOptions) -> Self:
        """With the targets of requests that bring none."""
        return cls(options.ttft_target, options.tpot_target, options.token_budget)

    def key(self, group: SequenceGroup) -> tuple[bool, float]:
        """(whether the deadline is missed, the deadline), or (True, arrival)."""
        due = self._due(group)
        if due < math.inf and self._now + self._seconds_needed(group) <= due:
            return False, due
        return True, group.request.arrival_time

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        """If it has used up half of its target, and the other has none to meet."""
        due = self._due(waiting)
        if self._now - waiting.request.arrival_time <= due - self._now or self.key(waiting)[0]:
            return False
        return self.key(running)[0]

    def on_arrival(self, group: SequenceGroup) -> None:
        """Takes its targets, or those of the options."""
        options, arrival = group.request.options, group.request.arrival_time
        ttft = _first(options.ttft_target, self._ttft_target)
        group.policy_data = _Targets(_first(options.tpot_target, self._tpot_target), arrival + ttft)

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
        """Takes the time, and how long steps take."""
        if self._was_running:
            self._seconds_per_step += _SMOOTHING * (now - self._now - self._seconds_per_step)
        self._now, self._was_running = now, bool(running)
        for group in running:
            targets: _Targets = group.policy_data
            if targets.due == math.inf and num_output_tokens(group):
                targets.due = now

    def _due(self, group: SequenceGroup) -> float:
        """When its next token is due."""
        targets: _Targets = group.policy_data
        generated = num_output_tokens(group)
        return targets.due + generated * targets.tpot if generated else targets.due

    def _seconds_needed(self, group: SequenceGroup) -> float:
        """Until its next token, if it is scheduled at once; running groups that decode are in every step."""
        if not group.prefilling:
            return 0.0
        uncomputed = sum([len(s.token_ids) - s.num_computed for s in group.seqs])
        return math.ceil(uncomputed / self._token_budget) * self._seconds_per_step


def _first(*targets: float | None) -> float:
    return next((t for t in targets if t is not None), math.inf)


# Fair shares of service among users: virtual token counters.

#: Service of a token of a prompt and of a generated one (Sheng et al. 2024, section 5.1).
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
#: Idle users whose counters are kept.
_MAX_IDLE = 4096


@dataclass(slots=True)
class _Service:
    """What a group has been charged for."""

    waiting: bool = True
    prompt: bool = False
    #: Generated tokens of each unfinished sequence.
    outputs: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _User:
    weight: float
    counter: float = 0.0
    waiting: int = 0
    unfinished: int = 0
    #: Whether there is an entry in the heap.
    listed: bool = False


class FairShare(Policy):
    """By the service that the group's user has received, divided by the user's weight; within a user by arrival.

    Virtual token counters (Sheng et al. 2024, "Fairness in serving large language models", algorithm 2). A prompt is
    charged when it is admitted, a generated token when it is known; what is computed again after a preemption is not. A
    user who comes back from idleness is lifted to the least counter of those that wait, so that idle time cannot be
    saved up. Between two users with requests waiting all the time, weighted service differs by at most
    2 max(w_p L, w_q M) (theorem 4.4): prompts of at most L tokens, at most M tokens in the KV cache.
    """

    dynamic = True
    uses_priority = False
    waiting_keys_grow = True

    def __init__(self, weights: Mapping[str, float]) -> None:
        """``weights`` of users; 1 for those without."""
        self._weights = weights
        self._users: dict[str, _User] = {}
        #: (counter, number, user) of each who has waiting groups, and perhaps of others; the counter as it was once,
        #: for it never falls.
        self._heap: list[tuple[float, int, _User]] = []
        self._numbers = itertools.count()
        self._num_idle = 0
        #: The counter of the user whose last waiting group was admitted or ended most recently.
        self._last_counter = 0.0

    @classmethod
    def from_options(cls, options: SchedulerOptions) -> Self:
        """With the weights of the users."""
        return cls(options.user_weights or {})

    def key(self, group: SequenceGroup) -> float:
        """The counter of its user."""
        return self._users[group.request.options.user].counter

    def lane(self, group: SequenceGroup) -> Hashable:
        """Its user."""
        return group.request.options.user

    def counters(self) -> dict[str, float]:
        """Weighted service of each user, as it is compared."""
        return {name: user.counter for name, user in self._users.items()}

    def on_arrival(self, group: SequenceGroup) -> None:
        """Lifts the counter of a user who comes back."""
        name = group.request.options.user
        user = self._users.get(name)
        if user is None:
            user = self._users[name] = _User(self._weights.get(name, 1.0))
        elif not user.unfinished:
            self._num_idle -= 1
        if not user.waiting:
            user.counter = max(user.counter, self._least_counter())
        self._wait(user)
        user.unfinished += 1
        group.policy_data = _Service()

    def _wait(self, user: _User) -> None:
        user.waiting += 1
        if not user.listed:
            user.listed = True
            heapq.heappush(self._heap, (user.counter, next(self._numbers), user))

    def _least_counter(self) -> float:
        """The least counter of those that wait; if nobody does, of the last who did."""
        heap = self._heap
        while heap:
            counter, number, user = heap[0]
            if not user.waiting:
                heapq.heappop(heap)
                user.listed = False
            elif user.counter > counter:
                heapq.heapreplace(heap, (user.counter, number, user))
            else:
                return counter
        return self._last_counter

    def on_admit(self, group: SequenceGroup) -> None:
        """Charges its prompt, the first time."""
        service: _Service = group.policy_data
        self._leave_queue(group)
        if not service.prompt:
            service.prompt = True
            user = self._users[group.request.options.user]
            user.counter += PROMPT_WEIGHT * len(group.request.prompt_token_ids) / user.weight

    def on_preempt(self, group: SequenceGroup) -> None:
        """Its user waits again; the counter is not lifted."""
        group.policy_data.waiting = True
        self._wait(self._users[group.request.options.user])

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
        """Charges the tokens that have been generated."""
        for group in running:
            for seq in group.seqs:
                self._charge(seq)

    def on_sequence_end(self, seq: groups.Sequence, status: SequenceStatus) -> None:
        """Charges its last tokens."""
        self._charge(seq)
        seq.group.policy_data.outputs.pop(seq.seq_id, None)

    def on_end(self, group: SequenceGroup) -> None:
        """Its user may become idle."""
        self._leave_queue(group)
        user = self._users[group.request.options.user]
        user.unfinished -= 1
        if not user.unfinished:
            self._num_idle += 1
            if self._num_idle > _MAX_IDLE:
                self._forget_idle()

    def _forget_idle(self) -> None:
        """Forgets the half of the idle users who have been served least: they would be lifted anyway."""
        idle = sorted((u.counter, name) for name, u in self._users.items() if not u.unfinished)
        for _, name in idle[: len(idle) // 2]:
            del self._users[name]
        self._num_idle -= len(idle) // 2
        for _, _, user in self._heap:
            user.listed = user.waiting > 0
        self._heap = [entry for entry in self._heap if entry[2].listed]
        heapq.heapify(self._heap)

    def _charge(self, seq: groups.Sequence) -> None:
        group = seq.group
        outputs: dict[int, int] = group.policy_data.outputs
        generated = len(seq.token_ids) - len(group.request.prompt_token_ids)
        # A beam begins with the tokens of the one that it was forked from, and one of its own.
        charged = outputs.get(seq.seq_id, 0 if group.beam is None else generated - 1)
        if generated > charged:
            outputs[seq.seq_id] = generated
            user = self._users[group.request.options.user]
            user.counter += OUTPUT_WEIGHT * (generated - charged) / user.weight

    def _leave_queue(self, group: SequenceGroup) -> None:
        service: _Service = group.policy_data
        if service.waiting:
            service.waiting = False
            user = self._users[group.request.options.user]
            user.waiting -= 1
            if not user.waiting:
                self._last_counter = user.counter


# What a user's policy raises is the failure of one request.

logger = logging.getLogger("octavo")


class _Key:
    """A key of a user's policy, whose comparison is the user's code too. Keys of failed groups go last."""

    __slots__ = ("failed", "group", "guard", "value")

    def __init__(self, guard: GuardedPolicy, group: SequenceGroup, value: Any, failed: bool = False) -> None:
        self.guard, self.group, self.value, self.failed = guard, group, value, failed

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Key)
        if self.failed or other.failed:
            return self.failed and other.failed
        try:
            return bool(self.value == other.value)
        except Exception as e:
            return self._fail(e)

    def __lt__(self, other: _Key) -> bool:
        if self.failed or other.failed:
            return other.failed and not self.failed
        try:
            return bool(self.value < other.value)
        except Exception as e:
            return self._fail(e)

    def __le__(self, other: _Key) -> bool:
        return not other < self

    def _fail(self, error: Exception) -> bool:
        self.guard.fail(self.group, "key", error)
        self.failed = True
        return False


class GuardedPolicy(Policy):
    """Calls a policy of the user's. If it raises in a call about a group, that group fails, and nothing else does.

    Until the scheduler ends a failed group (``take_failures``), it goes last, and the policy is only told of its end.
    What ``on_step`` raises is about no group: it is logged, and the step is planned all the same.
    """

    def __init__(self, name: str, policy: Policy) -> None:
        self._name, self._policy = name, policy
        self.dynamic, self.preemptive = policy.dynamic, policy.preemptive
        self.uses_priority, self.uses_targets = policy.uses_priority, policy.uses_targets
        self.waiting_keys_grow = policy.waiting_keys_grow
        #: By group id, the method that failed, until the group has ended.
        self._failed: dict[int, str] = {}
        self._failures: list[tuple[SequenceGroup, str]] = []
        self._logged: set[str] = set()

    def take_failures(self) -> list[tuple[SequenceGroup, str]]:
        """The groups that have failed since it was last asked, some of which may have ended; and why."""
        failures, self._failures = self._failures, []
        return failures

    def fail(self, group: SequenceGroup, method: str, error: Exception) -> None:
        """A call about this group has raised."""
        message = self._log(method, error)
        if group.group_id not in self._failed:
            self._failed[group.group_id] = method
            self._failures.append((group, message))

    def _log(self, method: str, error: Exception) -> str:
        """Logs the first error of each method with its traceback; what happened, in words."""
        message = f"scheduling_policy {self._name!r}: {method}() raised {type(error).__name__}: {error}"
        if method not in self._logged:
            self._logged.add(method)
            logger.error("%s; further errors of this method are not logged", message, exc_info=error)
        return message

    def key(self, group: SequenceGroup) -> _Key:
        """The policy's key; it must be comparable."""
        if group.group_id not in self._failed:
            try:
                value = self._policy.key(group)
                if value < value or not value == value:  # None and the like raise, and "not a number" has no place
                    raise ValueError(f"the key {value!r} cannot be ordered")
                return _Key(self, group, value)
            except Exception as e:
                self.fail(group, "key", e)
        return _Key(self, group, None, failed=True)

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        """As the policy says; never if one of them has failed."""
        if waiting.group_id in self._failed or running.group_id in self._failed:
            return False
        try:
            return bool(self._policy.displaces(waiting, running))
        except Exception as e:
            self.fail(waiting, "displaces", e)
            return False

    def lane(self, group: SequenceGroup) -> Hashable:
        """As the policy says; a lane of its own if that fails."""
        if group.group_id not in self._failed:
            try:
                lane = self._policy.lane(group)
                hash(lane)
                return lane
            except Exception as e:
                self.fail(group, "lane", e)
        return self, group.group_id

    def on_arrival(self, group: SequenceGroup) -> None:
        """Tells the policy."""
        self._tell(group, "on_arrival", group)

    def on_admit(self, group: SequenceGroup) -> None:
        """Tells the policy."""
        self._tell(group, "on_admit", group)

    def on_preempt(self, group: SequenceGroup) -> None:
        """Tells the policy."""
        self._tell(group, "on_preempt", group)

    def on_sequence_end(self, seq: groups.Sequence, status: SequenceStatus) -> None:
        """Tells the policy, also of a failed group unless its arrival failed."""
        self._tell(seq.group, "on_sequence_end", seq, status)

    def on_end(self, group: SequenceGroup) -> None:
        """Tells the policy, as ``on_sequence_end`` does."""
        self._tell(group, "on_end", group)
        self._failed.pop(group.group_id, None)

    def _tell(self, group: SequenceGroup, method: str, *args: object) -> None:
        failed_at = self._failed.get(group.group_id)
        if failed_at is not None and (failed_at == "on_arrival" or method not in ("on_sequence_end", "on_end")):
            return
        try:
            getattr(self._policy, method)(*args)
        except Exception as e:
            self.fail(group, method, e)

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
        """Tells the policy."""
        try:
            self._policy.on_step(now, running)
        except Exception as e:
            self._log("on_step", e)


# Skip-join multi-level feedback queues.

#: Service that a group receives in the first queue before it is demoted; each further queue gives twice as much.
_QUANTUM = 64.0
_LEVELS = 12
_QUANTA = [_QUANTUM * 2**level for level in range(_LEVELS)]


@dataclass(slots=True)
class _Place:
    level: int
    #: Service in all at which it is demoted.
    limit: float
    #: Seconds on the clock of the arrival times.
    entered: float
    #: Number of the step before which it was queued last.
    queued: int


class MultiLevelFeedback(Policy):
    """By queue, and within one by the time of entering it: short work goes first without knowing what is short.

    Skip-join multi-level feedback queues (Wu et al. 2023, "Fast distributed inference serving for large language
    models", section 4.1): a group joins the first queue whose quantum its prompt does not exceed, and is demoted when
    the service that it has received (``PROMPT_WEIGHT`` and ``OUTPUT_WEIGHT`` for each token) exceeds the quantum. A
    waiting group preempts running ones of later queues, but only when it has waited for as many steps as it may
    generate tokens in its own: until then a slot is likely to become free, and nothing need be computed again.
    Promotion is by ageing: ``aging_limit`` / 12 seconds of waiting count as much as one queue.
    """

    dynamic = True
    uses_priority = False
    preemptive = True

    def __init__(self, aging_limit: float | None) -> None:
        """``aging_limit`` in seconds; None: no promotion."""
        self._seconds_per_level = None if aging_limit is None else aging_limit / _LEVELS
        self._steps = 0

    @classmethod
    def from_options(cls, options: SchedulerOptions) -> Self:
        """With the ageing limit."""
        return cls(options.aging_limit)

    def key(self, group: SequenceGroup) -> tuple[float, float]:
        """Its queue and when it entered it; with promotion, as if it had entered the first queue so much later.

        All that wait age alike, so this order changes with service alone.
        """
        place: _Place = group.policy_data
        if self._seconds_per_level is None:
            return place.level, place.entered
        return place.entered + place.level * self._seconds_per_level, 0.0

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        """If it is in an earlier queue and has waited for as long as it may run there."""
        place: _Place = waiting.policy_data
        earlier: bool = place.level < running.policy_data.level
        return earlier and OUTPUT_WEIGHT * (self._steps - place.queued) >= _QUANTA[place.level]

    def on_arrival(self, group: SequenceGroup) -> None:
        """Joins the first queue whose quantum its prompt does not exceed."""
        cost = PROMPT_WEIGHT * len(group.request.prompt_token_ids)
        level = min(bisect.bisect_left(_QUANTA, cost), _LEVELS - 1)
        group.policy_data = _Place(level, max(cost, _QUANTA[level]), group.request.arrival_time, self._steps)

    def on_preempt(self, group: SequenceGroup) -> None:
        """Waits from now on."""
        group.policy_data.queued = self._steps

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
        """Demotes the groups that have received what their queue gives."""
        self._steps += 1
        for group in running:
            place: _Place = group.policy_data
            prompt = len(group.request.prompt_token_ids)
            generated = (len(group.seqs[0].token_ids) - prompt) * group.num_seqs
            if PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * generated > place.limit and place.level < _LEVELS - 1:
                place.level += 1
                place.limit += _QUANTA[place.level]
                place.entered = now


# Predicts how many tokens a request will generate, from what is known when it arrives; learns while serving.

#: What a request is known by; the first is the same for all.
Features = tuple[Hashable, ...]

#: Tokens at the beginning of a prompt that stand for its prefix.
_PREFIX = 16
#: Variance of a weight before it is observed, and what each observation of it adds (lengths drift).
_PRIOR_VARIANCE, _DRIFT = 0.5, 1e-4
#: Weights kept; of more the least recently used are dropped.
_MAX_WEIGHTS = 8192
#: Residuals are counted in bins of this width of the logarithm, from minus to plus the limit.
_BIN, _LIMIT = 0.125, 5.0
_NUM_BINS = int(2 * _LIMIT / _BIN)
#: Residuals after which older ones count half, and after which the tails are computed again.
_HALVE_AFTER, _REFRESH_AFTER = 4096.0, 32
#: Finished requests that are remembered with what was predicted.
_WINDOW = 1024


def features_of(request: EngineCoreRequest) -> Features:
    """What is cheap to know of a request: user, task, lengths, beginning of the prompt, and when it stops."""
    task, prompt = request.task, request.prompt_token_ids
    prefix = hash(tuple(prompt[:_PREFIX]))
    limit = task.max_tokens
    stops = None
    if isinstance(task, Generate):
        stop = task.params.stop
        stops = (len(task.stop_token_ids), task.params.min_tokens, tuple(stop) if isinstance(stop, list) else stop)
    return (
        None,
        ("user", request.options.user),
        ("prefix", prefix),
        ("user and prefix", request.options.user, prefix),
        ("prompt", int(3 * math.log2(len(prompt)))),
        ("max_tokens", limit and int(3 * math.log2(limit))),
        ("stops", type(task).__name__, stops),
    )


class LengthPredictor:
    """Lengths in tokens. Its memory is bounded; predicting and learning take a few microseconds."""

    def __init__(self) -> None:
        #: Mean and variance of each weight, the least recently used first.
        self._weights: dict[Hashable, tuple[float, float]] = {None: (4.0, 4.0)}
        self._noise = 1.0
        # Until something is learned: normally distributed, as of eight requests.
        centres = [-_LIMIT + (i + 0.5) * _BIN for i in range(_NUM_BINS)]
        bell = [math.exp(-0.5 * c * c) for c in centres]
        self._counts = [8 * b / sum(bell) for b in bell]
        self._total, self._unseen = 8.0, 0
        self._factors = [math.exp(c) for c in centres]
        #: For each bin: the mean of exp(residual) of those in it or above.
        self._tails = [1.0] * _NUM_BINS
        self._refresh()
        #: Of the latest requests: the logarithm that was predicted at their arrival, and their length.
        self.recent: deque[tuple[float, int]] = deque(maxlen=_WINDOW)

    def log_length(self, features: Features) -> float:
        """The logarithm of the typical (about the median) length."""
        weights = self._weights
        return sum([weights[f][0] for f in features if f in weights])

    def expected(self, log_length: float, generated: int = 0) -> tuple[float, float]:
        """The expected length of a request that has generated so many tokens, and at how many to ask again."""
        index = 0
        if generated > 0:
            index = int((math.log(generated) - log_length + _LIMIT) / _BIN) + 1
            if index >= _NUM_BINS:  # longer than anything before: as long again, as of a heavy tail
                return 2.0 * generated, 2.0 * generated
        index = max(index, 0)
        total = math.exp(log_length) * self._tails[index]
        return max(total, generated + 1.0), math.exp(log_length - _LIMIT + index * _BIN)

    def learn(self, features: Features, length: int) -> None:
        """A request with these features has generated ``length`` tokens, at least one."""
        weights = self._weights
        estimates = [weights.pop(f, (0.0, _PRIOR_VARIANCE)) for f in features]
        predicted = sum([w for w, _ in estimates])
        variance = sum([v for _, v in estimates])
        residual = math.log(length) - predicted
        step = 1.0 / (variance + self._noise)
        for f, (w, v) in zip(features, estimates, strict=True):
            gain = v * step
            weights[f] = (w + gain * residual, v * (1.0 - gain) + _DRIFT)
        while len(weights) > _MAX_WEIGHTS:
            del weights[next(iter(weights))]
        self._noise += 0.02 * (min(max(residual * residual - variance, 0.02), 4.0) - self._noise)
        self.recent.append((predicted, length))
        self._count(residual)

    def _count(self, residual: float) -> None:
        index = int((residual + _LIMIT) / _BIN)
        self._counts[min(max(index, 0), _NUM_BINS - 1)] += 1
        self._total += 1
        self._unseen += 1
        if self._unseen >= _REFRESH_AFTER:
            if self._total > _HALVE_AFTER:
                self._counts = [c / 2 for c in self._counts]
                self._total /= 2
            self._refresh()

    def _refresh(self) -> None:
        self._unseen = 0
        above = weighted = 1e-9
        for i in range(_NUM_BINS - 1, -1, -1):
            above += self._counts[i]
            weighted += self._counts[i] * self._factors[i]
            self._tails[i] = max(weighted / above, self._factors[i])


# Shortest remaining processing time first, with predicted lengths.

#: How many times the remaining steps of a waiting group must fit into those until the next slot is free.
_CLEAR_GAIN = 2.0


@dataclass(slots=True)
class _Estimate:
    features: Features
    log_length: float
    #: Tokens of the prompt.
    prompt: int
    #: Most tokens that a sequence may generate.
    limit: int
    #: Expected tokens in all, and the number of generated ones at which this is estimated again.
    total: float = 0.0
    valid_until: float = 0.0
    #: Steps that all its sequences still need: the sort key.
    remaining: float = 0.0


class ShortestRemaining(Policy):
    """By the expected remaining steps, of all sequences: tokens to generate, and prompt tokens by the token budget.

    The expectation is conditional on what a group has generated, so the order changes while it runs (Schrage and Miller
    1966; with expectations: SERPT, Scully et al. 2020, "Simple near-optimal scheduling for the M/G/1"). A waiting group
    preempts a running one only if it would end before the first of the running groups does, with ``_CLEAR_GAIN`` to
    spare and including the steps in which the other computes its tokens again: with many slots one becomes free soon.
    And it preempts none that was preempted before: more than once gains nothing on average and costs the longest most.
    """

    dynamic = True
    uses_priority = False
    preemptive = True

    def __init__(self, token_budget: int) -> None:
        self.predictor = LengthPredictor()
        self._token_budget = token_budget
        #: Steps until the first of the running groups is expected to end.
        self._next_end = math.inf

    @classmethod
    def from_options(cls, options: SchedulerOptions) -> Self:
        """With the token budget of the steps."""
        return cls(options.token_budget)

    def key(self, group: SequenceGroup) -> float:
        """Remaining steps; of a waiting group as they were estimated when it was queued."""
        remaining: float = group.policy_data.remaining
        return remaining

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        """If it would end long before the next slot is free, and the other needs more than that."""
        enough: float = _CLEAR_GAIN * waiting.policy_data.remaining
        if self._next_end <= enough or running.totals.num_recomputes or running.totals.num_swaps:
            return False
        enough += 2 * running.num_computed / self._token_budget
        return self._next_end > enough and running.policy_data.remaining > enough

    def on_arrival(self, group: SequenceGroup) -> None:
        """Predicts its length."""
        features = features_of(group.request)
        prompt = len(group.request.prompt_token_ids)
        limit = group.max_length - prompt if group.samples else 0
        group.policy_data = _Estimate(features, self.predictor.log_length(features), prompt, limit)
        self._estimate(group)

    def on_preempt(self, group: SequenceGroup) -> None:
        """Estimates it again: what it has to compute again counts."""
        self._estimate(group)

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
        """Counts down what running groups have generated."""
        next_end = math.inf
        for group in running:
            estimate: _Estimate = group.policy_data
            generated = len(group.seqs[0].token_ids) - estimate.prompt
            if generated >= estimate.valid_until or group.prefilling:
                self._estimate(group)
            else:
                estimate.remaining = (estimate.total - generated) * group.num_seqs
            if estimate.remaining < next_end:
                next_end = estimate.remaining
        self._next_end = next_end

    def on_sequence_end(self, seq: groups.Sequence, status: SequenceStatus) -> None:
        """Learns from sequences that have come to their own end; beams end together and early."""
        group, generated = seq.group, len(seq.token_ids) - seq.num_prompt_tokens
        natural = status in (SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH)
        if natural and generated > 0 and group.beam is None:
            self.predictor.learn(group.policy_data.features, generated)

    def _estimate(self, group: SequenceGroup) -> None:
        estimate: _Estimate = group.policy_data
        generated = num_output_tokens(group)
        total, estimate.valid_until = self.predictor.expected(estimate.log_length, generated)
        estimate.total = min(total, estimate.limit) if group.beam is None else estimate.limit
        uncomputed = sum([len(s.token_ids) - s.num_computed for s in group.seqs]) if group.prefilling else 0
        estimate.remaining = (estimate.total - generated) * group.num_seqs + uncomputed / self._token_budget


POLICIES: dict[str, type[Policy]] = {
    "fcfs": FirstComeFirstServed,
    "static": StaticPriority,
    "sjf": ShortestJobFirst,
    "ldf": LongestDataFirst,
    "lcfs": LastComeFirstServed,
    "srpt": ShortestRemaining,
    "fair": FairShare,
    "deadline": EarliestDeadlineFirst,
    "mlfq": MultiLevelFeedback,
}


def policy_class(name: str) -> type[Policy]:
    """The class of this name, or of ``module:Class``.

    Raises:
        ConfigError: there is no such policy.
    """
    return load_class(name, POLICIES, Policy, "scheduling_policy", "octavo.scheduler.policies.Policy")


def load_policy(name: str, options: SchedulerOptions | None = None) -> Policy:
    """A new policy of this name, or of ``module:Class``, under these options (by default those of the engine).

    That of a user is guarded: what it raises later ends one request, not the engine.

    Raises:
        ConfigError: there is no such policy, or it cannot be made.
    """
    kind = policy_class(name)
    if ":" not in name:
        return kind.from_options(options or SchedulerOptions())
    try:
        return GuardedPolicy(name, kind.from_options(options or SchedulerOptions()))
    except Exception as e:
        raise ConfigError(f"scheduling_policy {name!r} cannot be made: {type(e).__name__}: {e}") from e
