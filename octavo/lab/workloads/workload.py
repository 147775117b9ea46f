"""A workload: everything about its requests, from which they are made one by one."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from octavo.core.errors import ConfigError
from octavo.lab.workloads.arrivals import Arrivals
from octavo.lab.workloads.draws import Weighted
from octavo.lab.workloads.lengths import Constant, Lengths
from octavo.lab.workloads.sharing import Conversations, RequestClass, SystemPrompts, User
from octavo.lab.workloads.specs import require
from octavo.lab.workloads.traces import Trace
from octavo.lab.workloads.work_items import WorkItem

_LENGTH = Constant(128)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests in order of arrival, made anew, and the same, by each iteration.

    Each property is drawn from a stream of random numbers of its own, made of the seed and the property's name, so that
    another distribution of one leaves the others as they were. Requests are made as they are asked for; what is held
    meanwhile is the pending turns of conversations that have begun, and the trace.
    """

    #: How many; of a trace at most all.
    requests: int
    #: Of requests, or of conversations; None: at the times of the trace, or all at once.
    arrivals: Arrivals | None = None
    #: Lengths of what is new in each prompt, and of outputs; a trace has its own.
    inputs: Lengths = _LENGTH
    outputs: Lengths = _LENGTH
    #: Tokens that all prompts begin with, within their length.
    shared_prefix_len: int = 0
    #: Tokens that come before what is new, beside its length.
    system_prompts: SystemPrompts | None = None
    conversations: Conversations | None = None
    #: None of them: requests have no user, or no targets. All turns of a conversation have the same.
    users: tuple[User, ...] = ()
    classes: tuple[RequestClass, ...] = ()
    #: See ``WorkItem``.
    cache_ttl: float = 0.0
    #: Gives lengths and prompts, and the times unless there are ``arrivals``.
    trace: Trace | None = None
    seed: int = 0
    #: Tells workloads of the same seed apart that run together, see ``merge``.
    name: str = ""

    def __post_init__(self) -> None:
        require(self.requests >= 1, f"a workload has at least 1 request, not {self.requests}")
        require(self.shared_prefix_len >= 0, "a shared prefix has at least 0 tokens")
        require(0 <= self.cache_ttl < math.inf, f"a cache TTL is at least 0 seconds, not {self.cache_ttl:g}")
        if self.conversations is not None and self.trace is not None:
            raise ConfigError("a trace has its own requests: leave out conversations")

    def __iter__(self) -> Iterator[WorkItem]:
        return _single(self) if self.conversations is None else _turns(self, self.conversations)

    def __len__(self) -> int:
        return self.requests if self.trace is None else min(self.requests, len(self.trace))


def merge(*workloads: Workload) -> Iterator[WorkItem]:
    """The requests of several workloads in order of arrival, as of greedy and modest users side by side.

    Each needs a ``name`` of its own, or a seed: its random numbers and prompts follow from them. Of the same seed they
    have system prompts and the shared prefix in common.
    """
    return heapq.merge(*workloads, key=lambda item: item.at)


class _Shared(NamedTuple):
    """What the turns of a conversation have in common, or a request of its own has."""

    prefix: tuple[tuple[str, int], ...]
    #: Tokens of the prefix, and how many of them are within the length of the (first) prompt.
    length: int
    within: int
    user: str | None
    weight: float
    kind: RequestClass
    cache_ttl: float


_NO_CLASS = RequestClass()


class _Maker:
    """Draws what is not a time or a length."""

    def __init__(self, load: Workload) -> None:
        self._load = load
        self.root = f"{load.name}/{load.seed}" if load.name else str(load.seed)
        self._users = Weighted(user.share for user in load.users)
        self._classes = Weighted(kind.share for kind in load.classes)
        self._systems, self._of_users, self._of_classes = map(self.stream, ("system prompts", "users", "classes"))

    def stream(self, purpose: str) -> random.Random:
        """The random numbers for one purpose."""
        return random.Random(f"{self.root} {purpose}")

    def times(self) -> Iterator[float]:
        """Arrivals of requests or conversations."""
        if self._load.arrivals is None:
            return itertools.repeat(0.0) if self._load.trace is None else iter(self._load.trace.at)
        return self._load.arrivals.times(self.stream("arrivals"))

    def shared(self, input_len: int) -> _Shared:
        """Of the next request or conversation; ``input_len``: of the (first) prompt without a system prompt."""
        load = self._load
        prefix: tuple[tuple[str, int], ...] = ()
        within = min(load.shared_prefix_len, input_len)
        length = within
        if within:
            prefix = ((f"{load.seed}/shared/0", within),)
        if load.system_prompts is not None:
            prefix += ((f"{load.seed}/system/{load.system_prompts.draw(self._systems)}", load.system_prompts.length),)
            length += load.system_prompts.length
        user = load.users[self._users.draw(self._of_users)] if load.users else None
        return _Shared(
            prefix,
            length,
            within,
            user.name if user is not None else None,
            user.weight if user is not None else 1.0,
            load.classes[self._classes.draw(self._of_classes)] if load.classes else _NO_CLASS,
            load.cache_ttl,
        )


def _item(at: float, lengths: tuple[int, int], stream: str, shared: _Shared, session: str | None = None) -> WorkItem:
    return WorkItem(
        at=at,
        input_len=lengths[0],
        output_len=lengths[1],
        prefix=shared.prefix,
        stream=stream,
        user=shared.user,
        weight=shared.weight,
        ttft_target=shared.kind.ttft_target,
        tpot_target=shared.kind.tpot_target,
        priority=shared.kind.priority,
        session=session,
        cache_ttl=shared.cache_ttl,
    )


def _single(load: Workload) -> Iterator[WorkItem]:
    """Requests of their own."""
    make = _Maker(load)
    lengths = (
        _drawn_lengths(load, make) if load.trace is None else zip(load.trace.inputs, load.trace.outputs, strict=True)
    )
    prompts = {} if load.trace is None else load.trace.prompts
    for number, at, (new, output) in zip(range(len(load)), make.times(), lengths, strict=False):
        shared = make.shared(new)
        if (prompt := prompts.get(number)) is not None:
            item = _item(at, (new, output), "", shared._replace(prefix=()))
            yield msgspec.structs.replace(item, prompt=prompt)
        else:
            yield _item(at, (new - shared.within + shared.length, output), f"{make.root}/{number}", shared)


def _drawn_lengths(load: Workload, make: _Maker) -> Iterator[tuple[int, int]]:
    inputs, outputs = make.stream("inputs"), make.stream("outputs")
    while True:
        yield load.inputs.draw(inputs), load.outputs.draw(outputs)


class _Session(NamedTuple):
    """A conversation that has begun; its turns are drawn with it, so that they do not depend on other arrivals."""

    name: str
    shared: _Shared
    #: (tokens before this turn in the stream, new ones, output) of each turn, and the gap before each but the first.
    turns: list[tuple[int, int, int]]
    gaps: list[float]


def _turns(load: Workload, talk: Conversations) -> Iterator[WorkItem]:
    """Turns of conversations, which begin as long as requests are left for them."""
    make = _Maker(load)
    starts, sessions = make.times(), _sessions(load, talk, make)
    pending: list[tuple[float, int, int, _Session]] = []
    left, begun, start = len(load), 0, next(starts)
    while left or pending:
        if left and (not pending or start < pending[0][0]):
            session = next(sessions)
            del session.turns[left:]
            left -= len(session.turns)
            heapq.heappush(pending, (start, begun, 0, session))
            begun, start = begun + 1, next(starts)
            continue
        at, number, turn, session = heapq.heappop(pending)
        if turn + 1 < len(session.turns):
            heapq.heappush(pending, (at + session.gaps[turn], number, turn + 1, session))
        before, new, output = session.turns[turn]
        shared = session.shared
        if before:
            shared = shared._replace(prefix=(*shared.prefix, (session.name, before)))
        yield _item(at, (shared.length + before + new, output), session.name, shared, session.name)


def _sessions(load: Workload, talk: Conversations, make: _Maker) -> Iterator[_Session]:
    lengths, counts, gaps = _drawn_lengths(load, make), make.stream("turns"), make.stream("think times")
    for number in itertools.count():
        shared, before = None, 0
        turns: list[tuple[int, int, int]] = []
        for _ in range(talk.turns.draw(counts)):
            new, output = next(lengths)
            if shared is None:
                shared = make.shared(new)
                new -= shared.within
            elif shared.length + before + new + output > talk.max_context:
                break
            turns.append((before, new, output))
            before += new + output
        assert shared is not None
        thinks = [gaps.expovariate(1 / talk.think) for _ in turns[1:]]
        yield _Session(f"{make.root}/session/{number}", shared, turns, thinks)
