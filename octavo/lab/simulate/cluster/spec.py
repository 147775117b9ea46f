"""What a simulated cluster consists of: plain data, read from flags or made in Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from octavo.core.errors import ConfigError
from octavo.lab.simulate.engine import MaxTokens
from octavo.lab.simulate.step_profile import StepProfile, load_profile
from octavo.lab.workloads.specs import require
from octavo.lab.workloads.work_items import WorkItem

#: Most replicas of a cluster.
MOST_REPLICAS = 10_000

Role = Literal["both", "prefill", "decode"]
T = TypeVar("T")


@dataclass(frozen=True)
class Transfer:
    """The cost of moving a KV cache to another replica; those that leave one replica go one after another."""

    #: Bytes a second, and seconds from the last byte sent to the arrival.
    bandwidth: float = 50e9
    latency: float = 1e-3

    def __post_init__(self) -> None:
        require(self.bandwidth > 0, f"a bandwidth must be above 0, not {self.bandwidth:g}")
        require(0 <= self.latency < math.inf, f"a latency must be at least 0 s, not {self.latency:g}")


@dataclass(frozen=True)
class Outage:
    """A replica fails at a time, and returns after some seconds; infinite: never.

    ``planned``: it is drained or restarted on purpose, so its requests leave at the end of the step that is computed.
    """

    replica: int
    at: float
    seconds: float = math.inf
    planned: bool = False

    def __post_init__(self) -> None:
        require(self.replica >= 0 and 0 <= self.at < math.inf and self.seconds > 0, "an outage is REPLICA@AT[:SECONDS]")


@dataclass(frozen=True)
class RandomOutages:
    """Every replica fails and returns after exponentially distributed times of these means, in seconds."""

    between: float
    repair: float

    def __post_init__(self) -> None:
        require(0 < self.between < math.inf and 0 < self.repair < math.inf, "MTBF and MTTR must be above 0 s")


@dataclass(frozen=True)
class Autoscale:
    """Replicas are started and drained so that each has about ``target`` of what is outstanding."""

    least: int
    most: int
    target: float
    #: What is counted: tokens of open requests (prompt and expected output), or open requests.
    metric: Literal["tokens", "requests"] = "requests"
    #: Seconds until a started replica takes requests; between two looks; and of too little load before one is drained.
    start: float = 60.0
    every: float = 10.0
    calm: float = 60.0

    def __post_init__(self) -> None:
        require(1 <= self.least <= self.most <= MOST_REPLICAS, f"replicas must be from 1 to {MOST_REPLICAS}, MIN,MAX")
        require(0 < self.target < math.inf, f"a target must be above 0, not {self.target:g}")
        require(0 < self.every < math.inf, "looks must be some seconds apart")
        require(0 <= self.start < math.inf and 0 <= self.calm < math.inf, "start and calm must be at least 0 s")


@dataclass(frozen=True)
class LatencyLimits:
    """What a request must keep to count as good: its own targets where it has any, else these; in seconds."""

    ttft: float | None = None
    tpot: float | None = None

    def met(self, item: WorkItem, ttft: float, tpot: float) -> bool:
        """Whether a request with these latencies is good; ``tpot`` 0 if it has one token."""
        first = self.ttft if item.ttft_target is None else item.ttft_target
        each = self.tpot if item.tpot_target is None else item.tpot_target
        return (first is None or ttft <= first) and (each is None or tpot <= each)


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster: ``replicas`` that do all, or those that compute prompts beside those that continue."""

    #: (how many, with which profile).
    replicas: tuple[tuple[int, StepProfile], ...]
    #: Instead of all being alike: the ``replicas`` decode only, and these compute the prompts.
    prefill: tuple[tuple[int, StepProfile], ...] = ()
    router: str = "least_loaded"
    #: Chooses the decode replica.
    decode_router: str = "least_loaded"
    mode: Literal["offline", "server"] = "offline"
    #: What requests state of their length: "exact", "none" or a number.
    max_tokens: str | int = "exact"
    transfer: Transfer = Transfer()
    outages: tuple[Outage, ...] = ()
    random_outages: RandomOutages | None = None
    autoscale: Autoscale | None = None
    limits: LatencyLimits = LatencyLimits()
    seed: int = 0
    #: Numbers of the replicas, in order: those that compute prompts first; made from the counts by default.
    numbers: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        require(bool(self.replicas), "a cluster has at least one replica")
        require(
            all(count >= 1 for count, _ in (*self.replicas, *self.prefill)) and self.size <= MOST_REPLICAS,
            f"a cluster has from 1 to {MOST_REPLICAS} replicas",
        )
        if self.autoscale is not None and (self.prefill or len(self.replicas) > 1):
            raise ConfigError("autoscaling is for replicas of one kind: one profile, and no replicas for prompts alone")
        if self.prefill and len({p.kv_bytes_per_token for _, p in (*self.prefill, *self.replicas)}) > 1:
            raise ConfigError("a KV cache can be sent between profiles with the same kv_bytes_per_token only")
        for outage in self.outages:
            require(
                self.autoscale is not None or outage.replica < self.size or bool(self.numbers),
                f"there is no replica {outage.replica} that could fail: they are 0 to {self.size - 1}",
            )

    @property
    def size(self) -> int:
        """Replicas at the start."""
        return sum(count for count, _ in (*self.prefill, *self.replicas))

    def members(self) -> list[tuple[int, Role, StepProfile]]:
        """Number, role and profile of each replica at the start."""
        roles: list[tuple[Role, StepProfile]] = [("prefill", p) for count, p in self.prefill for _ in range(count)]
        rest: Role = "decode" if self.prefill else "both"
        roles += [(rest, p) for count, p in self.replicas for _ in range(count)]
        return [(n, *role) for n, role in zip(self.numbers or range(len(roles)), roles, strict=True)]


def stated_limits(stated: str | int) -> MaxTokens:
    """What requests state of their length; a limit below it is raised to it, so that lengths stay those given."""

    def limit(item: WorkItem) -> int | None:
        if stated == "none":
            return None
        return item.output_len if isinstance(stated, str) else max(stated, item.output_len)

    return limit


def parse_replicas(text: str, default: str) -> tuple[tuple[int, StepProfile], ...]:
    """``COUNT[:PROFILE],...``; ``default`` is the profile of those without one.

    Raises:
        ConfigError: it is not of this form, or a profile is not valid.
    """
    return tuple((count, load_profile(name or default)) for count, name in _split(text))


def parse_outages(texts: list[str]) -> tuple[tuple[Outage, ...], RandomOutages | None]:
    """``REPLICA@AT[:SECONDS]`` or ``mtbf:SECONDS,mttr:SECONDS``, each possibly several times.

    Raises:
        ConfigError: one is neither.
    """
    outages, random = [], None
    for text in texts:
        usage = f"--fail is REPLICA@AT[:SECONDS] or mtbf:SECONDS,mttr:SECONDS, not {text!r}"
        if text.startswith("mtbf"):
            values = _words(text, {"mtbf": float, "mttr": float}, usage)
            if len(values) < 2:
                raise ConfigError(usage)
            random = RandomOutages(values["mtbf"], values["mttr"])
            continue
        replica, _, times = text.partition("@")
        at, _, seconds = times.partition(":")
        outages.append(
            Outage(_read(int, replica, usage), _read(float, at, usage), _read(float, seconds or "inf", usage))
        )
    return tuple(outages), random


def parse_autoscale(text: str) -> Autoscale:
    """``MIN,MAX,requests:N|tokens:N[,start:S][,every:S][,calm:S]``.

    Raises:
        ConfigError: it is not of this form.
    """
    usage = f"--autoscale is MIN,MAX,requests:N|tokens:N[,start:S][,every:S][,calm:S], not {text!r}"
    bounds, words = text.split(",", 2)[:2], text.split(",", 2)[2:]
    kinds = dict.fromkeys(("requests", "tokens", "start", "every", "calm"), float)
    values = _words(words[0], kinds, usage) if words else {}
    metric: Literal["tokens", "requests"] = "tokens" if "tokens" in values else "requests"
    if len(bounds) < 2 or ("tokens" in values) == ("requests" in values):
        raise ConfigError(usage)
    target = values.pop(metric)
    least, most = (_read(int, bound, usage) for bound in bounds)
    return Autoscale(least, most, target, metric, **values)


def _split(text: str) -> list[tuple[int, str]]:
    usage = f"--replicas is COUNT[:PROFILE],..., not {text!r}"
    parts = [part.partition(":") for part in text.split(",")]
    return [(_read(int, count, usage), name) for count, _, name in parts]


def _words(text: str, kinds: dict[str, type[float]], usage: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for word in text.split(","):
        name, _, number = word.partition(":")
        if name not in kinds or name in values:
            raise ConfigError(usage)
        values[name] = _read(kinds[name], number, usage)
    return values


def _read(kind: Callable[[str], T], text: str, usage: str) -> T:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(usage) from None
