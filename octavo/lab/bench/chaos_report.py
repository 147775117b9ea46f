"""The report of ``octavo bench chaos``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.lab.bench.chaos_answers import Answer
from octavo.lab.bench.chaos_client import Exchange
from octavo.lab.bench.chaos_faults import Fault
from octavo.lab.bench.chaos_pauses import Times, measure

#: Most failures that are kept with all that belongs to them.
_MOST_FAILURES = 20
#: Longest text of a request, truth or answer in a table, in characters.
_MOST_CHARS = 2_000


class KindOfRequests(msgspec.Struct):
    """Answers to the requests of a kind."""

    answers: int = 0
    #: Whose answer differs from the truth.
    different: int = 0
    #: That ended with an error, or as a broken stream.
    errors: int = 0
    tokens: int = 0


class KindOfFaults(msgspec.Struct, frozen=True):
    """Faults of a name, and what streams saw of those that came alone; of all, also of several together. In seconds."""

    faults: int
    #: Of each fault and each stream: the longest gap that belongs to it, see ``chaos_pauses``.
    pauses: Times | None
    #: Of each kill: until the first further token of a stream that stood.
    first_tokens: Times | None


class Failure(msgspec.Struct, frozen=True):
    """A client that saw an error or another answer than the truth."""

    request: str
    body: dict[str, Any]
    #: Seconds after the beginning of the faults at which it was sent, and at which it ended.
    sent: float
    ended: float
    what: str
    truth: Answer | None
    answer: Answer | None


class FaultRecord(msgspec.Struct, frozen=True):
    """One fault; times in seconds after the beginning of the faults."""

    name: str
    pid: int
    at: float
    until: float


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, what came, and what was left."""

    model: str
    clients: int
    seed: int
    interval: float
    options: dict[str, Any]
    #: Seconds of the faults, until the last stream had ended.
    seconds: float
    #: Requests computed alone first, and the seconds of that.
    distinct_requests: int
    truth_seconds: float
    requests: dict[str, KindOfRequests]
    faults: dict[str, KindOfFaults]
    timeline: list[FaultRecord]
    failures: list[Failure]
    #: What is not as before: processes, shared memory, descriptors, files, the exit code.
    leftovers: list[str]
    #: By tier of the KV stores and event: blocks, over all engine cores.
    stores: dict[str, dict[str, int]] = {}

    @property
    def num_failed(self) -> int:
        """Clients that saw an error or another answer."""
        return sum(kind.different + kind.errors for kind in self.requests.values())

    @property
    def passed(self) -> bool:
        """Whether every answer is the truth, and nothing is left."""
        return not self.num_failed and not self.leftovers


def by_kind(exchanges: Sequence[Exchange]) -> dict[str, KindOfRequests]:
    """Counts by the kind of request."""
    kinds: dict[str, KindOfRequests] = {}
    for exchange in sorted(exchanges, key=lambda exchange: exchange.request.kind):
        kind = kinds.setdefault(exchange.request.kind, KindOfRequests())
        kind.answers += 1
        kind.errors += exchange.error is not None
        kind.different += exchange.difference is not None
        kind.tokens += exchange.completion_tokens
    return kinds


def failures(exchanges: Sequence[Exchange], truths: Mapping[str, Answer], begin: float) -> list[Failure]:
    """The first that failed; times after ``begin``."""
    return [
        Failure(
            request=exchange.request.name,
            body=exchange.request.body,
            sent=round(exchange.sent - begin, 3),
            ended=round(exchange.ended - begin, 3),
            what=exchange.error or exchange.difference or "",
            truth=truths.get(exchange.request.name),
            answer=exchange.answer,
        )
        for exchange in exchanges
        if exchange.failed
    ][:_MOST_FAILURES]


def by_fault(faults: Sequence[Fault], exchanges: Sequence[Exchange], replicas: int) -> dict[str, KindOfFaults]:
    """What streams saw, by the name of faults."""
    counts = Counter(fault.name for fault in faults)
    counts["all"] = len(faults)
    return {
        name: KindOfFaults(counts[name], seen.pauses, seen.first_tokens)
        for name, seen in measure(faults, exchanges, replicas).items()
    }


def timeline(faults: Sequence[Fault], begin: float) -> list[FaultRecord]:
    """The faults, by time after ``begin``."""
    return [FaultRecord(f.name, f.pid, round(f.at - begin, 3), round(f.until - begin, 3)) for f in faults]


def as_text(report: ChaosReport) -> str:
    """The report as tables."""
    options = " ".join(f"{name}={value}" for name, value in report.options.items())
    lines = [
        f"{report.model}  {options}".rstrip(),
        f"{report.clients} clients for {report.seconds:.0f} s; {report.distinct_requests} distinct requests, computed "
        f"alone first in {report.truth_seconds:.0f} s; seed {report.seed}",
        "",
        "requests    answers  tokens  different  errors",
    ]
    lines += [
        f"{name:10}  {kind.answers:7}  {kind.tokens:6}  {kind.different:9}  {kind.errors:6}"
        for name, kind in report.requests.items()
    ]
    if report.faults:
        lines += ["", "faults         count  pauses: median s    99 %   worst  first token: median s   worst"]
    for name, seen in report.faults.items():
        pauses, first = seen.pauses, seen.first_tokens
        lines.append(
            f"{name:13}  {seen.faults:5}"
            + (f"  {pauses.median:16.2f}  {pauses.p99:6.2f}  {pauses.worst:6.2f}" if pauses else " " * 34)
            + (f"  {first.median:21.2f}  {first.worst:6.2f}" if first else "")
        )
    for tier, events in report.stores.items():
        lines += ["", f"KV store, {tier}: " + ", ".join(f"{count} {event}" for event, count in events.items())]
    lines += _failed(report)
    lines += ["", *(f"not as before: {left}" for left in report.leftovers)] if report.leftovers else []
    count = sum(kind.answers for kind in report.requests.values())
    verdict = "passed" if report.passed else "FAILED"
    return "\n".join(
        [*lines, "", f"{verdict}: {count - report.num_failed} of {count} answers are those that the requests get alone"]
    )


def _failed(report: ChaosReport) -> list[str]:
    """Requests, truths and answers."""
    lines = []
    for failure in report.failures:
        lines += [
            "",
            f"{failure.request}, sent after {failure.sent:.1f} s, ended after {failure.ended:.1f} s: {failure.what}",
            f"  request: {_short(failure.body)}",
        ]
        if failure.answer is not None:
            lines += [f"  truth:   {_short(failure.truth)}", f"  answer:  {_short(failure.answer)}"]
    if (more := report.num_failed - len(report.failures)) > 0:
        lines += ["", f"and {more} more"]
    return lines


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}... ({len(text)} characters)"
