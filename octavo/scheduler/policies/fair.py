"""Fair shares of service among users: virtual token counters."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from octavo.core.config import SchedulerOptions
from octavo.core.request import SequenceStatus
from octavo.scheduler import groups
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.policies.policy import Policy

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
