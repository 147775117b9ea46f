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
from functools import partial
from typing import Any, Self

from octavo.config.options import SchedulerOptions
from octavo.core.errors import ConfigError
from octavo.core.plugins import load_class
from octavo.core.request import EngineCoreRequest, Generate, SequenceStatus
from octavo.scheduler import groups
from octavo.scheduler.groups import SequenceGroup


class Policy(ABC):
    """Orders groups. A subclass needs ``key`` alone: ``on_...`` tell it of events, ``policy_data`` is its own."""

    #: Options that the constructor takes, in their order.
    option_names: tuple[str, ...] = ()
    #: Whether the key of a running group changes with its computed tokens, or with time.
    dynamic = False
    #: Whether the key may depend on the request's ``priority``. If not, a request with one is refused.
    uses_priority = True
    #: Whether the key may depend on ``ttft_target`` and ``tpot_target``. If not, a request with one is refused.
    uses_targets = False
    #: Whether the order depends on the clock. If so, ``external_launcher``, whose processes each plan, refuses it.
    uses_clock = False
    #: Whether a waiting group may preempt running ones (``displaces``) without the option ``priority_preemption``.
    preemptive = False
    #: Whether the key of a waiting group may grow (``lane``).
    waiting_keys_grow = False
    #: Whether ``prompt_limit`` may keep tokens of prompts out of a step.
    limits_prompts = False
    #: Whether ``aging_limit`` applies. If not, the policy itself lets nobody starve.
    ages = True

    @classmethod
    def from_options(cls, options: SchedulerOptions) -> Self:
        return cls(*(getattr(options, name) for name in cls.option_names))

    @abstractmethod
    def key(self, group: SequenceGroup) -> Any:
        """The sort key: lower goes first; among equals, the earlier arrival."""

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        """Whether ``waiting``, which goes first, is worth the preemption of ``running``: by default by priority."""
        return running.priority > waiting.priority

    def prompt_limit(self, group: SequenceGroup, prompts: Sequence[tuple[SequenceGroup, int]]) -> int | None:
        """With ``limits_prompts``: the most tokens of the group's prompt in a step; None: as the token budget allows.

        ``prompts``: the prompts that are in the step already, which go before it, and their tokens. A request waits for
        the whole step in which its prompt is computed, and for the one that runs when it arrives. A group must not be
        limited to 0 for ever, and never if ``prompts`` is empty. Prompts that are computed whole know only 0 as limit.
        """
        return None

    def lane(self, group: SequenceGroup) -> Hashable:
        """With ``waiting_keys_grow``: waiting groups of one lane go in order of arrival, lanes by their first group."""
        return group.group_id

    def on_arrival(self, group: SequenceGroup) -> None:  # noqa: B027
        """A group is about to be queued for the first time; its key is not asked for before."""

    def on_admit(self, group: SequenceGroup) -> None:  # noqa: B027
        """A waiting or swapped group begins to run."""

    def on_preempt(self, group: SequenceGroup) -> None:  # noqa: B027
        """A running group is about to be queued again; what it has computed is lost or moved."""

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:  # noqa: B027
        """A step is about to be planned (``dynamic`` policies only). ``now`` is on the clock of the arrival times."""

    def on_sequence_end(self, seq: groups.Sequence, status: SequenceStatus) -> None:  # noqa: B027
        """A sequence ends, alone or with its group."""

    def on_end(self, group: SequenceGroup) -> None:  # noqa: B027
        """A group has ended, and so have its sequences."""


def num_output_tokens(group: SequenceGroup) -> int:
    """Tokens that each of a group's sequences has generated: they sample together."""
    return len(group.seqs[0].token_ids) - len(group.request.prompt_token_ids)


class FirstComeFirstServed(Policy):
    """By arrival."""

    uses_priority = False

    def key(self, group: SequenceGroup) -> tuple[float, int]:
        return group.arrival


class StaticPriority(Policy):
    """By the request's own ``priority``."""

    def key(self, group: SequenceGroup) -> float:
        return group.priority


class ShortestJobFirst(Policy):
    """By ``max_tokens``, or what the context length leaves."""

    uses_priority = False

    def key(self, group: SequenceGroup) -> int:
        return group.max_length - len(group.request.prompt_token_ids)


class LongestDataFirst(Policy):
    """By tokens of prompt and output, most first: such a group frees most when it ends, and costs most to recompute."""

    dynamic = True
    uses_priority = False

    def key(self, group: SequenceGroup) -> int:
        return -group.num_tokens


class LastComeFirstServed(Policy):
    """By arrival, the latest first."""

    uses_priority = False

    def key(self, group: SequenceGroup) -> tuple[float, int]:
        seconds, number = group.arrival
        return -seconds, -number


#: Weight of the latest interval between steps in their mean.
_SMOOTHING = 0.1


@dataclass(slots=True)
class _Targets:
    """Seconds; infinity: none."""

    tpot: float
    #: When the first token is due, on the clock of the arrival times; without a target for it, when the token came.
    due: float


class EarliestDeadlineFirst(Policy):
    """By the time at which the next token is due: ``ttft_target`` after the arrival, or ``tpot_target`` after the last.

    Groups that cannot meet their deadline any more, or have none, go last, by arrival. Under overload this keeps the
    share of requests that meet their targets: plain EDF would serve late ones first, and make the others late. A
    waiting group that has used up half of its target preempts groups that are late or have no deadline.
    """

    option_names = ("ttft_target", "tpot_target", "token_budget")
    dynamic = True
    uses_priority = False
    uses_targets = True
    uses_clock = True
    preemptive = True
    waiting_keys_grow = True

    def __init__(self, ttft_target: float | None, tpot_target: float | None, token_budget: int) -> None:
        self._ttft_target, self._tpot_target = ttft_target, tpot_target
        self._token_budget = token_budget
        self._now, self._was_running, self._seconds_per_step = -math.inf, False, 0.0

    def key(self, group: SequenceGroup) -> tuple[bool, float]:
        """(whether the deadline is missed, the deadline), or (True, arrival)."""
        due = self._due(group)
        seconds = 0.0  # until its next token, if it is scheduled at once; decoding groups are in every step
        if group.prefilling:
            uncomputed = sum([len(s.token_ids) - s.num_computed for s in group.seqs])
            seconds = math.ceil(uncomputed / self._token_budget) * self._seconds_per_step
        if due < math.inf and self._now + seconds <= due:
            return False, due
        return True, group.request.arrival_time

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        due = self._due(waiting)
        if self._now - waiting.request.arrival_time <= due - self._now or self.key(waiting)[0]:
            return False
        return self.key(running)[0]

    def on_arrival(self, group: SequenceGroup) -> None:
        options, arrival = group.request.options, group.request.arrival_time
        ttft = _first(options.ttft_target, self._ttft_target)
        group.policy_data = _Targets(_first(options.tpot_target, self._tpot_target), arrival + ttft)

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
        if self._was_running:
            self._seconds_per_step += _SMOOTHING * (now - self._now - self._seconds_per_step)
        self._now, self._was_running = now, bool(running)
        for group in running:
            targets: _Targets = group.policy_data
            if targets.due == math.inf and num_output_tokens(group):
                targets.due = now

    def _due(self, group: SequenceGroup) -> float:
        targets: _Targets = group.policy_data
        generated = num_output_tokens(group)
        return targets.due + generated * targets.tpot if generated else targets.due


def _first(*targets: float | None) -> float:
    return next((t for t in targets if t is not None), math.inf)


#: Service of a token of a prompt and of a generated one (Sheng et al. 2024, section 5.1).
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
#: Service divided by weight that an idle user may save up: bursts of a user who asks for little are served at once.
_CREDIT = 4096.0
#: Service divided by weight that the user of a preempted group must be ahead, where shares do not decide.
_LEAD = _CREDIT / 2
#: Share of the token budget that prompts of users with waiting groups may fill.
_FLOOD_SHARE = 1 / 16
#: Idle users whose counters are kept.
_MAX_IDLE = 4096


@dataclass(slots=True)
class _Service:
    waiting: bool = True
    #: Sequences that count as running.
    running: int = 0
    prompt: bool = False
    #: Tokens of its sequences that it must have before it is preempted for another user again.
    least_tokens: float = 0.0
    #: Generated tokens of each unfinished sequence.
    outputs: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _User:
    weight: float
    counter: float = 0.0
    waiting: int = 0
    #: Sequences of running groups, as of their admission.
    running: int = 0
    unfinished: int = 0
    #: Whether the heap has an entry.
    listed: bool = False


class FairShare(Policy):
    """By the service that the group's user has received, divided by the user's weight; within a user by arrival.

    Virtual token counters (Sheng et al. 2024, "Fairness in serving large language models", algorithm 2). Prompts are
    charged at admission, generated tokens when they are known, recomputed tokens never. A user who returns from
    idleness is lifted to the least counter of the waiting users, so that idle time cannot be saved up.
    Between two users with requests waiting all the time, weighted service differs by at most 2 max(w_p L, w_q M)
    (theorem 4.4): prompts of at most L tokens, at most M tokens in the KV cache. So nobody starves, and ageing does not
    apply: all requests of a user who floods would age, and go before those of the others.

    The counters order admission only; a flood that has filled slots and blocks would leave them when its requests end.
    So a waiting group preempts one of a user who runs more sequences by weight, even after the exchange: the running
    sequences approach max-min shares, and no exchange is reversed. A user without a queue, who has received far less
    service (``_LEAD``), takes more than this share: a burst of few requests need not wait for itself. A group that was
    preempted is not displaced again before it has received as much service as it would cost to compute its tokens once
    more: one on a slot that its user has above the share would lose it to every short request of the others.

    A step is not preempted, so it must not be long because of a flood: prompts of a user are left out of a step that
    computes one of a user who runs fewer sequences by weight, and prompts of users with waiting groups fill only a part
    of a step (``_FLOOD_SHARE``) if there are other users.
    """

    option_names = ("user_weights", "token_budget")
    dynamic = True
    uses_priority = False
    preemptive = True
    waiting_keys_grow = True
    limits_prompts = True
    ages = False

    def __init__(self, weights: Mapping[str, float] | None, token_budget: int) -> None:
        self._weights = weights or {}
        self._most_prompts = max(1, round(_FLOOD_SHARE * token_budget))
        self._users: dict[str, _User] = {}
        #: (counter, number, user) of users with waiting groups, and maybe of others; counters may be outdated (lower).
        self._heap: list[tuple[float, int, _User]] = []
        self._numbers = itertools.count()
        self._num_idle = 0
        #: The counter of the user who was last to have no waiting group any more.
        self._last_counter = 0.0

    def key(self, group: SequenceGroup) -> float:
        return self._users[group.request.options.user].counter

    def lane(self, group: SequenceGroup) -> Hashable:
        return group.request.options.user

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        one, other = (self._users[group.request.options.user] for group in (waiting, running))
        if one is other or running.num_tokens < running.policy_data.least_tokens:
            return False
        if one.waiting <= one.running and other.counter - one.counter >= _LEAD:
            return True
        after = (one.running + waiting.num_seqs) / one.weight
        return after <= (other.running - running.policy_data.running) / other.weight

    def prompt_limit(self, group: SequenceGroup, prompts: Sequence[tuple[SequenceGroup, int]]) -> int | None:
        user, filled = self._users[group.request.options.user], 0
        for other, tokens in prompts:
            owner = self._users[other.request.options.user]
            if owner is not user and self._share(owner, other) < self._share(user, group):
                return 0
            if owner.waiting > other.policy_data.waiting:
                filled += tokens
        if user.waiting == group.policy_data.waiting or len(self._users) == 1:
            return None
        return max(1, self._most_prompts - filled)

    @staticmethod
    def _share(user: _User, group: SequenceGroup) -> float:
        """A user's running sequences by weight, those of ``group`` included."""
        return (user.running + (group.num_seqs if group.policy_data.waiting else 0)) / user.weight

    def on_arrival(self, group: SequenceGroup) -> None:
        name = group.request.options.user
        user = self._users.get(name)
        if user is None:
            user = self._users[name] = _User(self._weights.get(name, 1.0))
        elif not user.unfinished:
            self._num_idle -= 1
        if not user.waiting:
            user.counter = max(user.counter, self._least_counter() - _CREDIT)
        self._wait(user)
        user.unfinished += 1
        group.policy_data = _Service()

    def _wait(self, user: _User) -> None:
        user.waiting += 1
        if not user.listed:
            user.listed = True
            heapq.heappush(self._heap, (user.counter, next(self._numbers), user))

    def _least_counter(self) -> float:
        """The least counter of the waiting users; without any, of the last one."""
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
        service: _Service = group.policy_data
        self._leave_queue(group)
        user = self._users[group.request.options.user]
        service.running = group.num_seqs
        user.running += service.running
        if group.totals.num_recomputes or group.totals.num_swaps:
            service.least_tokens = group.num_tokens * (1 + PROMPT_WEIGHT / OUTPUT_WEIGHT)
        if not service.prompt:
            service.prompt = True
            user.counter += PROMPT_WEIGHT * len(group.request.prompt_token_ids) / user.weight

    def on_preempt(self, group: SequenceGroup) -> None:
        """Its user waits again; the counter is not lifted."""
        group.policy_data.waiting = True
        self._leave_running(group)
        self._wait(self._users[group.request.options.user])

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
        for group in running:
            for seq in group.seqs:
                self._charge(seq)

    def on_sequence_end(self, seq: groups.Sequence, status: SequenceStatus) -> None:
        self._charge(seq)
        seq.group.policy_data.outputs.pop(seq.seq_id, None)

    def on_end(self, group: SequenceGroup) -> None:
        self._leave_queue(group)
        self._leave_running(group)
        user = self._users[group.request.options.user]
        user.unfinished -= 1
        if not user.unfinished:
            self._num_idle += 1
            if self._num_idle > _MAX_IDLE:  # those who were served least would be lifted anyway
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
        # A beam starts with the tokens of its parent, and one of its own.
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

    def _leave_running(self, group: SequenceGroup) -> None:
        service: _Service = group.policy_data
        self._users[group.request.options.user].running -= service.running
        service.running = 0


logger = logging.getLogger("octavo")


class GuardedPolicy(Policy):
    """Calls a policy of the user's. If it raises in a call about a group, that group fails, and nothing else does.

    Until the scheduler ends a failed group (``take_failures``), it goes last, and the policy is only told of its end.
    A key fails that cannot be compared with itself or with the last one. Whatever else a comparison raises is raised by
    the scheduler.
    """

    def __init__(self, name: str, policy: Policy) -> None:
        self._name, self._policy = name, policy
        for flag in (name for name, value in vars(Policy).items() if isinstance(value, bool)):
            setattr(self, flag, getattr(policy, flag))
        for method in ("on_arrival", "on_admit", "on_preempt", "on_sequence_end", "on_end"):
            setattr(self, method, partial(self._tell, method))
        #: By group id, the method that failed, until the group has ended.
        self._failed: dict[int, str] = {}
        self._failures: list[tuple[SequenceGroup, str]] = []
        self._logged: set[str] = set()
        #: The last key, to compare others with; none at first and after one that failed.
        self._last_key: list[Any] = []

    def take_failures(self) -> list[tuple[SequenceGroup, str]]:
        """The groups that have failed since the last call, with the errors; some may have ended."""
        failures, self._failures = self._failures, []
        return failures

    def _fail(self, group: SequenceGroup, method: str, error: Exception) -> None:
        message = self._log(method, error)
        if group.group_id not in self._failed:
            self._failed[group.group_id] = method
            self._failures.append((group, message))

    def _log(self, method: str, error: Exception) -> str:
        """Logs the first error of each method with its traceback; returns the message."""
        message = f"scheduling_policy {self._name!r}: {method}() raised {type(error).__name__}: {error}"
        if method not in self._logged:
            self._logged.add(method)
            logger.error("%s; further errors of this method are not logged", message, exc_info=error)
        return message

    def key(self, group: SequenceGroup) -> tuple[bool, Any]:
        """(whether the group has failed, its key)."""
        if group.group_id not in self._failed:
            try:
                key = self._policy.key(group)
                if key < key or not key == key:  # "not a number" has no order
                    raise ValueError(f"the key {key!r} cannot be ordered")
                last, self._last_key = self._last_key, []
                sorted([key, *last])  # raises if their types cannot be compared
                self._last_key = [key]
                return False, key
            except Exception as e:
                self._fail(group, "key", e)
        return True, None

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        if waiting.group_id in self._failed or running.group_id in self._failed:
            return False
        try:
            return bool(self._policy.displaces(waiting, running))
        except Exception as e:
            self._fail(waiting, "displaces", e)
            return False

    def prompt_limit(self, group: SequenceGroup, prompts: Sequence[tuple[SequenceGroup, int]]) -> int | None:
        if group.group_id in self._failed:
            return None
        try:
            limit = self._policy.prompt_limit(group, prompts)
            return None if limit is None else int(limit)
        except Exception as e:
            self._fail(group, "prompt_limit", e)
            return None

    def lane(self, group: SequenceGroup) -> Hashable:
        if group.group_id not in self._failed:
            try:
                lane = self._policy.lane(group)
                hash(lane)
                return lane
            except Exception as e:
                self._fail(group, "lane", e)
        return self, group.group_id

    def _tell(self, method: str, subject: SequenceGroup | groups.Sequence, *args: object) -> None:
        group = subject if isinstance(subject, SequenceGroup) else subject.group
        failed_at = self._failed.get(group.group_id)
        if failed_at is None or (failed_at != "on_arrival" and method in ("on_sequence_end", "on_end")):
            try:
                getattr(self._policy, method)(subject, *args)
            except Exception as e:
                self._fail(group, method, e)
        if method == "on_end":
            self._failed.pop(group.group_id, None)

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
        try:
            self._policy.on_step(now, running)
        except Exception as e:
            self._log("on_step", e)


#: Service in each queue before a group is demoted.
_LEVELS = 12
_QUANTA = [64.0 * 2**level for level in range(_LEVELS)]


@dataclass(slots=True)
class _Place:
    level: int
    #: Total service at which it is demoted.
    limit: float
    #: On the clock of the arrival times.
    entered: float
    #: Number of the step before it was last queued.
    queued: int


class MultiLevelFeedback(Policy):
    """By queue, and within one by the time of entering it: short work goes first without a prediction of lengths.

    Skip-join multi-level feedback queues (Wu et al. 2023, "Fast distributed inference serving for large language
    models", section 4.1): a group joins the first queue whose quantum its prompt does not exceed, and is demoted when
    its service (``PROMPT_WEIGHT`` and ``OUTPUT_WEIGHT`` for each token) exceeds the quantum. A waiting group preempts
    running ones of later queues only when it has waited for as many steps as it may generate tokens in its own: until
    then a slot is likely to become free. ``aging_limit`` / 12 seconds of waiting promote a group by one queue.
    """

    option_names = ("aging_limit",)
    dynamic = True
    uses_priority = False
    preemptive = True

    def __init__(self, aging_limit: float | None) -> None:
        self._seconds_per_level = None if aging_limit is None else aging_limit / _LEVELS
        self._steps = 0

    def key(self, group: SequenceGroup) -> tuple[float, float]:
        """(queue, time of entering it); with promotion, as if it had entered the first queue later: all age alike."""
        place: _Place = group.policy_data
        if self._seconds_per_level is None:
            return place.level, place.entered
        return place.entered + place.level * self._seconds_per_level, 0.0

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        place: _Place = waiting.policy_data
        earlier: bool = place.level < running.policy_data.level
        return earlier and OUTPUT_WEIGHT * (self._steps - place.queued) >= _QUANTA[place.level]

    def on_arrival(self, group: SequenceGroup) -> None:
        cost = PROMPT_WEIGHT * len(group.request.prompt_token_ids)
        level = min(bisect.bisect_left(_QUANTA, cost), _LEVELS - 1)
        group.policy_data = _Place(level, max(cost, _QUANTA[level]), group.request.arrival_time, self._steps)

    def on_preempt(self, group: SequenceGroup) -> None:
        group.policy_data.queued = self._steps

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
        self._steps += 1
        for group in running:
            place: _Place = group.policy_data
            prompt = len(group.request.prompt_token_ids)
            generated = (len(group.seqs[0].token_ids) - prompt) * group.num_seqs
            if PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * generated > place.limit and place.level < _LEVELS - 1:
                place.level += 1
                place.limit += _QUANTA[place.level]
                place.entered = now


# Shortest remaining processing time first, with predicted lengths.

#: Predictors of a request's length; the first is the same for all.
Features = tuple[Hashable, ...]

#: First tokens of a prompt that count as its prefix.
_PREFIX = 16
#: Initial variance of a weight, and its increase per observation (lengths drift).
_PRIOR_VARIANCE, _DRIFT = 0.5, 1e-4
#: Most weights; the least recently used are dropped.
_MAX_WEIGHTS = 8192
#: Width of the bins of residuals (logarithms), from minus to plus the limit.
_BIN, _LIMIT = 0.125, 5.0
_NUM_BINS = int(2 * _LIMIT / _BIN)
#: Residuals after which older ones count half, and after which the tails are updated.
_HALVE_AFTER, _REFRESH_AFTER = 4096.0, 32
#: Length of ``LengthPredictor.recent``.
_WINDOW = 1024
#: Exponents above it count as it: such a request has no boost.
_MOST_EXPONENT = 50.0


def features_of(request: EngineCoreRequest) -> Features:
    task, prompt = request.task, request.prompt_token_ids
    prefix, limit, stops = hash(tuple(prompt[:_PREFIX])), task.max_tokens, None
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
    """Predicts output lengths in tokens, and learns while serving; in bounded memory and a few microseconds each."""

    def __init__(self) -> None:
        #: Mean and variance, the least recently used first.
        self._weights: dict[Hashable, tuple[float, float]] = {None: (4.0, 4.0)}
        self._noise = 1.0
        # At first: normally distributed, as of eight requests.
        centres = [-_LIMIT + (i + 0.5) * _BIN for i in range(_NUM_BINS)]
        bell = [math.exp(-0.5 * c * c) for c in centres]
        self._counts = [8 * b / sum(bell) for b in bell]
        self._total, self._unseen = 8.0, 0
        self._factors = [math.exp(c) for c in centres]
        #: By bin: the mean of exp(residual) in it or above.
        self._tails = [1.0] * _NUM_BINS
        self._refresh()
        #: Of the latest requests: the predicted logarithm, and the length.
        self.recent: deque[tuple[float, int]] = deque(maxlen=_WINDOW)

    def log_length(self, features: Features) -> float:
        """The logarithm of the median length, about."""
        weights = self._weights
        return sum([weights[f][0] for f in features if f in weights])

    def expected(self, log_length: float, generated: int = 0) -> tuple[float, float]:
        """The expected length of a request with ``generated`` tokens, and the number at which to ask again."""
        index = 0
        if generated > 0:
            index = int((math.log(generated) - log_length + _LIMIT) / _BIN) + 1
            if index >= _NUM_BINS:  # longer than any before: as long again, as of a heavy tail
                return 2.0 * generated, 2.0 * generated
        index = max(index, 0)
        total = math.exp(log_length) * self._tails[index]
        return max(total, generated + 1.0), math.exp(log_length - _LIMIT + index * _BIN)

    def mean_exponential(self, log_length: float, generated: int, most: int, rate: float, start: float) -> float:
        """The mean of exp(``start`` + ``rate`` x tokens to come), of a request that generates at most ``most``."""
        total = weighted = 0.0
        median = math.exp(log_length)
        for count, factor in zip(self._counts, self._factors, strict=True):
            length = min(median * factor, most)
            if length > generated:
                total += count
                weighted += count * math.exp(min(start + rate * (length - generated), _MOST_EXPONENT))
        # Longer than any before: as long again, as of a heavy tail.
        return weighted / total if total else math.exp(min(start + rate * generated, _MOST_EXPONENT))

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


#: A waiting group preempts if this multiple of its remaining steps fits into the steps until the next slot is free.
_CLEAR_GAIN = 2.0


@dataclass(slots=True)
class _Estimate:
    features: Features
    log_length: float
    prompt: int
    #: Most tokens to generate.
    limit: int
    #: Expected tokens in total, and the number of generated ones at which to estimate again.
    total: float = 0.0
    valid_until: float = 0.0
    #: Steps that all its sequences still need.
    remaining: float = 0.0


class ShortestRemaining(Policy):
    """By the expected remaining steps, of all sequences: tokens to generate, and prompt tokens by the token budget.

    The expectation is conditional on the generated tokens, so the order changes while a group runs (Schrage and Miller
    1966; with expectations: SERPT, Scully et al. 2020, "Simple near-optimal scheduling for the M/G/1"). A waiting group
    preempts a running one only if it would end before the first of the running groups does, with ``_CLEAR_GAIN`` to
    spare and including the recomputation; and none that was preempted before.
    """

    option_names = ("token_budget",)
    dynamic = True
    uses_priority = False
    preemptive = True

    def __init__(self, token_budget: int) -> None:
        self.predictor = LengthPredictor()
        self._token_budget = token_budget
        #: Steps until the first of the running groups is expected to end.
        self._next_end = math.inf

    def key(self, group: SequenceGroup) -> float:
        remaining: float = group.policy_data.remaining
        return remaining

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        enough: float = _CLEAR_GAIN * waiting.policy_data.remaining
        if self._next_end <= enough or running.totals.num_recomputes or running.totals.num_swaps:
            return False
        enough += 2 * running.num_computed / self._token_budget
        return self._next_end > enough and running.policy_data.remaining > enough

    def on_arrival(self, group: SequenceGroup) -> None:
        features = features_of(group.request)
        prompt = len(group.request.prompt_token_ids)
        limit = group.max_length - prompt if group.samples else 0
        group.policy_data = _Estimate(features, self.predictor.log_length(features), prompt, limit)
        self._estimate(group)

    def on_preempt(self, group: SequenceGroup) -> None:
        self._estimate(group)  # tokens to recompute count

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
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


@dataclass(slots=True)
class _Boosted:
    features: Features
    log_length: float
    #: Most tokens to generate.
    limit: int
    #: The arrival time less the boost.
    key: float = 0.0
    #: Service that is counted in the pace.
    served: float = 0.0


#: Latencies from which the decay rate is estimated, the fewest of them, and how often.
_LATENCIES, _FEWEST_LATENCIES, _ESTIMATE_AFTER = 1024, 64, 32
#: Percentiles between which the decay rate is estimated.
_LOW_TAIL, _HIGH_TAIL = 0.9, 0.99
#: What seconds and service of a step count after each later one, in the pace.
_PACE_DECAY = 0.999


class TailBoost(Policy):
    """By arrival, less a boost in seconds that is large for short requests and vanishes for long ones: for the p99.

    Gamma-Boost (Yu and Scully 2024, "Strongly tail-optimal scheduling in the light-tailed M/G/1"), which minimises the
    tail of latency where shortest-first orders minimise its mean and sacrifice the tail. A request of S seconds of work
    is boosted by log(m / (m - 1)) / gamma, m = E[exp(gamma S)]; of a known S, that is log(1 / (1 - exp(-gamma S))) /
    gamma. S is distributed as ``LengthPredictor`` has learned, at the observed pace of the engine. Gamma is the decay
    rate of the tail, P[latency > t] ~ exp(-gamma t), and is estimated from the observed latencies, as Li et al. 2026
    ("Beyond prediction: tail-aware scheduling for LLM inference") adapt theirs: under a light load it is large, and the
    order is that of arrival; the longer the queues, the nearer to shortest first. Running requests keep their slots.
    """

    dynamic = True
    uses_priority = False
    uses_clock = True

    def __init__(self) -> None:
        self.predictor = LengthPredictor()
        #: Per second; infinity, until it is estimated: no boost.
        self.decay_rate = math.inf
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)
        self._unseen = 0
        self._now, self._was_running = -math.inf, False
        self._seconds = self._service = 0.0

    @property
    def pace(self) -> float:
        """Seconds of the engine's time per unit of service (``PROMPT_WEIGHT``, ``OUTPUT_WEIGHT``)."""
        return self._seconds / self._service if self._service else 0.0

    def key(self, group: SequenceGroup) -> float:
        key: float = group.policy_data.key
        return key

    def on_arrival(self, group: SequenceGroup) -> None:
        features = features_of(group.request)
        limit = group.max_length - len(group.request.prompt_token_ids) if group.samples else 0
        group.policy_data = _Boosted(features, self.predictor.log_length(features), limit)
        self._boost(group)

    def on_preempt(self, group: SequenceGroup) -> None:
        self._boost(group)

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
        if self._was_running:
            self._seconds = _PACE_DECAY * self._seconds + now - self._now
            self._service *= _PACE_DECAY
        self._now, self._was_running = now, bool(running)
        for group in running:
            boosted: _Boosted = group.policy_data
            served = PROMPT_WEIGHT * min(group.num_computed, len(group.request.prompt_token_ids))
            served += OUTPUT_WEIGHT * num_output_tokens(group) * group.num_seqs
            if served > boosted.served:  # less after preemption: recomputed tokens serve nobody
                self._service += served - boosted.served
                boosted.served = served

    def on_sequence_end(self, seq: groups.Sequence, status: SequenceStatus) -> None:
        group, generated = seq.group, len(seq.token_ids) - seq.num_prompt_tokens
        if status not in (SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH):
            return
        if generated > 0 and group.beam is None:
            self.predictor.learn(group.policy_data.features, generated)
        self._latencies.append(self._now - group.request.arrival_time)
        self._unseen += 1
        if self._unseen >= _ESTIMATE_AFTER and len(self._latencies) >= _FEWEST_LATENCIES:
            self._unseen = 0
            self._estimate_decay_rate()

    def _estimate_decay_rate(self) -> None:
        """From the slope of the logarithm of P[latency > t] between two percentiles."""
        ordered = sorted(self._latencies)
        low, high = (ordered[int(share * len(ordered))] for share in (_LOW_TAIL, _HIGH_TAIL))
        if high > low:
            self.decay_rate = math.log((1 - _LOW_TAIL) / (1 - _HIGH_TAIL)) / (high - low)

    def _boost(self, group: SequenceGroup) -> None:
        boosted: _Boosted = group.policy_data
        boosted.key = group.request.arrival_time
        gamma = self.decay_rate
        if gamma == math.inf or not self.pace:
            return
        per_unit = gamma * self.pace
        prompt = per_unit * PROMPT_WEIGHT * len(group.request.prompt_token_ids)
        per_token = per_unit * OUTPUT_WEIGHT * group.num_seqs
        mean = self.predictor.mean_exponential(
            boosted.log_length, num_output_tokens(group), boosted.limit, per_token, prompt
        )
        boosted.key += math.log1p(-1 / mean) / gamma


POLICIES: dict[str, type[Policy]] = {
    "fcfs": FirstComeFirstServed,
    "static": StaticPriority,
    "sjf": ShortestJobFirst,
    "ldf": LongestDataFirst,
    "lcfs": LastComeFirstServed,
    "srpt": ShortestRemaining,
    "boost": TailBoost,
    "fair": FairShare,
    "deadline": EarliestDeadlineFirst,
    "mlfq": MultiLevelFeedback,
}


def policy_class(name: str) -> type[Policy]:
    return load_class(name, POLICIES, Policy, "scheduling_policy", "octavo.scheduler.policies.Policy")


def load_policy(name: str, options: SchedulerOptions | None = None) -> Policy:
    """A new policy of this name, or of ``module:Class``, which is guarded: its exceptions end one request."""
    kind, options = policy_class(name), options or SchedulerOptions()
    if ":" not in name:
        return kind.from_options(options)
    try:
        return GuardedPolicy(name, kind.from_options(options))
    except Exception as e:
        raise ConfigError(f"scheduling_policy {name!r} cannot be made: {type(e).__name__}: {e}") from e
