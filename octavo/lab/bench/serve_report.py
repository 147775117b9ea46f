"""The report of ``octavo bench serve``: percentiles, rates and goodput as seen by the client."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain, pairwise

import msgspec
import numpy as np

from octavo.core.errors import ConfigError
from octavo.lab.bench.serve_client import RequestOutcome

#: The error of a full queue, counted apart from failures.
REJECTED = "http 429"


class Spread(msgspec.Struct, frozen=True):
    """Distribution of values in milliseconds; percentiles are interpolated linearly."""

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


class ServeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run and its figures; token counts and rates are of completed requests only."""

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
    #: Completed requests without usage; their chunks were counted as tokens.
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
    #: Time after the first text divided by the output tokens after the first.
    tpot_ms: Spread | None
    #: Every gap between two chunks of text of a request.
    itl_ms: Spread | None
    #: From sending to the last byte.
    e2e_ms: Spread | None
    #: Limits in milliseconds; requests within all of them and their own targets, a second and as a share of all.
    goodput_limits_ms: dict[str, float]
    goodput_requests_per_s: float | None
    goodput_share: float | None
    #: Largest delay in sending a request, and share of one core that the client used. If either is large, the client
    #: limits the measurement.
    send_delay_max_ms: float
    client_cpu_share: float


@dataclass(frozen=True)
class Goodput:
    """Latency limits of a good request in seconds, by name: ttft, tpot, e2e."""

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

    def is_met_by(self, outcome: RequestOutcome) -> bool:
        """Whether a completed request is within all limits and its own ones; a request of one token has no tpot."""
        limits = (*self.limits.items(), *outcome.limits.items())
        return all((getattr(outcome, name) or 0.0) <= limit for name, limit in limits)


class RunSettings(msgspec.Struct, frozen=True):
    """The settings of a run."""

    base_url: str
    model: str
    endpoint: str
    arrivals: str
    seed: int


def make_report(
    run: RunSettings, outcomes: list[RequestOutcome], cpu_seconds: float, goodput: Goodput | None
) -> ServeReport:
    """The report of these outcomes; ``cpu_seconds`` is the client's processor time."""
    if goodput is None and any(outcome.limits for outcome in outcomes):
        goodput = Goodput({})
    completed = [outcome for outcome in outcomes if outcome.error is None]
    failed = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    seconds = max(o.ended for o in outcomes) - min(o.sent for o in outcomes)
    prompt_tokens = sum(o.prompt_tokens for o in completed)
    output_tokens = sum(o.output_tokens for o in completed)
    num_good = None if goodput is None else sum(goodput.is_met_by(o) for o in completed)
    return ServeReport(
        **msgspec.structs.asdict(run),
        num_requests=len(outcomes),
        completed=len(completed),
        rejected=failed.pop(REJECTED, 0),
        errors={str(kind): count for kind, count in failed.most_common()},
        error_texts={str(o.error): o.error_text for o in outcomes if o.error in failed},
        without_usage=sum(not o.has_usage for o in completed),
        seconds=round(seconds, 4),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=round(len(completed) / seconds, 4),
        prompt_tokens_per_s=round(prompt_tokens / seconds, 2),
        output_tokens_per_s=round(output_tokens / seconds, 2),
        ttft_ms=Spread.of([o.ttft for o in completed]),
        tpot_ms=Spread.of([o.tpot for o in completed if o.tpot is not None]),
        itl_ms=Spread.of(gaps(completed)),
        e2e_ms=Spread.of([o.e2e for o in completed]),
        goodput_limits_ms={} if goodput is None else {name: limit * 1000 for name, limit in goodput.limits.items()},
        goodput_requests_per_s=None if num_good is None else round(num_good / seconds, 4),
        goodput_share=None if num_good is None else round(num_good / len(outcomes), 4),
        send_delay_max_ms=round(max(o.sent - o.due for o in outcomes) * 1000, 3),
        client_cpu_share=round(cpu_seconds / seconds, 4),
    )


def ranges(reports: list[ServeReport]) -> dict[str, tuple[float, float]]:
    """Of several runs, the least and the largest of the figures that a run is judged by."""
    columns = {name: [getattr(of, name) for of in reports] for name in ("requests_per_s", "output_tokens_per_s")}
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        for part in ("mean", "p50", "p99"):
            columns[f"{name}.{part}"] = [getattr(getattr(of, name), part, None) for of in reports]
    return {name: (min(of), max(of)) for name, of in columns.items() if None not in of}


def ranges_text(reports: list[ServeReport]) -> list[str]:
    """The ranges for a terminal; nothing of a single run."""
    if len(reports) < 2:
        return []
    parts = [f"{name} {low:.4g} to {high:.4g}" for name, (low, high) in ranges(reports).items()]
    lines = [f"above: the median of {len(reports)} runs by output tokens/s; over all of them"]
    return lines + ["  " + "; ".join(parts[i : i + 3]) for i in range(0, len(parts), 3)]


def gaps(outcomes: list[RequestOutcome]) -> list[float]:
    """Seconds between consecutive chunks, over all requests."""
    return list(chain.from_iterable((b - a for a, b in pairwise(o.chunks)) for o in outcomes))


def as_text(report: ServeReport) -> str:
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
        limits = ", ".join(f"{name} {ms:g} ms" for name, ms in report.goodput_limits_ms.items()) or "own targets"
        lines.append(f"goodput ({limits}): {report.goodput_requests_per_s:.2f} requests/s, {report.goodput_share:.1%}")
    if report.without_usage:
        lines.append(f"{report.without_usage} responses came without usage: their chunks were counted as tokens")
    lines.append(
        f"client: {report.client_cpu_share:.1%} of a core, requests sent at most {report.send_delay_max_ms:.1f} ms late"
    )
    return "\n".join(lines)
