"""Figures of ``octavo bench serve``: percentiles, rates and goodput of what the client saw."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain, pairwise

import msgspec
import numpy as np

from octavo.bench.serve_client import Outcome
from octavo.core.errors import ConfigError

#: The error that back-pressure is answered with: counted apart, as it is a promise kept.
REJECTED = "http 429"


class Spread(msgspec.Struct, frozen=True):
    """How values are distributed, in milliseconds; percentiles are interpolated linearly."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: list[float]) -> Spread | None:
        """Of values in seconds; None if there are none."""
        if not seconds:
            return None
        values = np.asarray(seconds) * 1000
        p50, p90, p99 = np.percentile(values, (50, 90, 99))
        return cls(*(round(float(value), 3) for value in (values.mean(), p50, p90, p99, values.max())))


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one run was, and its figures. ``output_tokens`` and so on count completed requests only."""

    base_url: str
    model: str
    endpoint: str
    #: "closed, 16 clients", "poisson, 4/s" and so on.
    arrivals: str
    seed: int
    num_requests: int
    completed: int
    #: Answered 429.
    rejected: int
    #: Other failures, by kind, and one text of each kind.
    errors: dict[str, int]
    error_texts: dict[str, str]
    #: Completed, but the server did not say how many tokens: their chunks were counted.
    without_usage: int
    #: From the first request sent to the last byte.
    seconds: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    #: From sending to the first text.
    ttft_ms: Spread | None
    #: A request's time after the first text, by its output tokens after the first.
    tpot_ms: Spread | None
    #: Every gap between two chunks of text of a request.
    itl_ms: Spread | None
    #: From sending to the last byte.
    e2e_ms: Spread | None
    #: Limits in milliseconds; requests that kept them all, a second, and as a share of all sent.
    goodput_limits_ms: dict[str, float]
    goodput_requests_per_s: float | None
    goodput_share: float | None
    #: How late requests were sent, at worst, and the share of one core that the client used. Where either is
    #: large, the client was measured rather than the server.
    send_delay_max_ms: float
    client_cpu_share: float


@dataclass(frozen=True)
class Goodput:
    """Limits in seconds that a good request keeps, by name: ttft, tpot, e2e."""

    limits: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> Goodput:
        """``ttft:500,tpot:50,e2e:10000``, in milliseconds, each at most once.

        Raises:
            ConfigError: it is not of this form.
        """
        limits = {}
        for part in text.split(","):
            name, _, number = part.strip().partition(":")
            try:
                limits[name] = float(number) / 1000
            except ValueError:
                limits[name] = -1.0
            if name not in ("ttft", "tpot", "e2e") or not limits[name] > 0:
                raise ConfigError(f"--goodput is ttft:MS,tpot:MS,e2e:MS, some or all of them, not {text!r}")
        return cls(limits)

    def kept_by(self, outcome: Outcome) -> bool:
        """Whether a completed request is good. One of a single token has no tpot to exceed."""
        return all((getattr(outcome, name) or 0.0) <= limit for name, limit in self.limits.items())


class Run(msgspec.Struct, frozen=True):
    """What was asked for, as the report repeats it."""

    base_url: str
    model: str
    endpoint: str
    arrivals: str
    seed: int


def make_report(run: Run, outcomes: list[Outcome], cpu_seconds: float, goodput: Goodput | None) -> Report:
    """The figures of these requests; ``cpu_seconds`` is processor time that the client took for them."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    failed = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    seconds = max(o.ended for o in outcomes) - min(o.sent for o in outcomes)
    prompt_tokens = sum(o.prompt_tokens for o in good)
    output_tokens = sum(o.output_tokens for o in good)
    kept = None if goodput is None else sum(goodput.kept_by(o) for o in good)
    return Report(
        **msgspec.structs.asdict(run),
        num_requests=len(outcomes),
        completed=len(good),
        rejected=failed.pop(REJECTED, 0),
        errors={str(kind): count for kind, count in failed.most_common()},
        error_texts={str(o.error): o.error_text for o in outcomes if o.error in failed},
        without_usage=sum(not o.has_usage for o in good),
        seconds=round(seconds, 4),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=round(len(good) / seconds, 4),
        prompt_tokens_per_s=round(prompt_tokens / seconds, 2),
        output_tokens_per_s=round(output_tokens / seconds, 2),
        ttft_ms=Spread.of([o.ttft for o in good]),
        tpot_ms=Spread.of([o.tpot for o in good if o.tpot is not None]),
        itl_ms=Spread.of(gaps(good)),
        e2e_ms=Spread.of([o.e2e for o in good]),
        goodput_limits_ms={} if goodput is None else {name: limit * 1000 for name, limit in goodput.limits.items()},
        goodput_requests_per_s=None if kept is None else round(kept / seconds, 4),
        goodput_share=None if kept is None else round(kept / len(outcomes), 4),
        send_delay_max_ms=round(max(o.sent - o.due for o in outcomes) * 1000, 3),
        client_cpu_share=round(cpu_seconds / seconds, 4),
    )


def gaps(outcomes: list[Outcome]) -> list[float]:
    """Seconds between every two chunks that follow each other, of all these requests."""
    return list(chain.from_iterable((b - a for a, b in pairwise(o.chunks)) for o in outcomes))


def as_text(report: Report) -> str:
    """The report for a terminal."""
    lines = [
        f"{report.model} at {report.base_url} ({report.endpoint}), {report.arrivals}: {report.num_requests} requests"
        f" in {report.seconds:.2f} s",
        f"completed {report.completed}, rejected (429) {report.rejected}, failed {sum(report.errors.values())}",
        *(f"  {kind}: {count}  {report.error_texts[kind][:200]}" for kind, count in report.errors.items()),
        f"{report.requests_per_s:.2f} requests/s, tokens/s: {report.prompt_tokens_per_s:.1f} in, "
        f"{report.output_tokens_per_s:.1f} out",
    ]
    if report.completed:
        lines.append(f"{'ms':6} {'mean':>9} {'p50':>9} {'p90':>9} {'p99':>9} {'max':>9}")
    for name in ("ttft", "tpot", "itl", "e2e"):
        spread: Spread | None = getattr(report, f"{name}_ms")
        if spread is not None:
            lines.append(f"{name.upper():6} " + " ".join(f"{value:9.1f}" for value in msgspec.structs.astuple(spread)))
    if report.goodput_requests_per_s is not None:
        limits = ", ".join(f"{name} {ms:g} ms" for name, ms in report.goodput_limits_ms.items())
        lines.append(f"goodput ({limits}): {report.goodput_requests_per_s:.2f} requests/s, {report.goodput_share:.1%}")
    if report.without_usage:
        lines.append(f"{report.without_usage} answers came without usage: their chunks were counted as tokens")
    lines.append(
        f"client: {report.client_cpu_share:.1%} of a core, requests sent at most {report.send_delay_max_ms:.1f} ms late"
    )
    return "\n".join(lines)
