"""``octavo bench failover``: replicas of a server are killed, drained and restarted under load; the same simulated."""

from __future__ import annotations

import asyncio
import functools
import math
import re
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import psutil

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.lab.bench.capacity import capacity_of, full_load
from octavo.lab.bench.chaos_processes import server_processes
from octavo.lab.bench.own_server import SERVED_NAME, OwnServer, own_server, token_id_range
from octavo.lab.bench.serve_client import Client, RequestOutcome
from octavo.lab.bench.serve_load import closed_loop, open_loop
from octavo.lab.bench.serve_workload import Request, requests
from octavo.lab.simulate.cluster.cluster_figures import ClusterFigures
from octavo.lab.simulate.cluster.cluster_run import record_cluster
from octavo.lab.simulate.cluster.spec import ClusterSpec, Outage
from octavo.lab.simulate.figures import Completions
from octavo.lab.simulate.step_profile import StepProfile
from octavo.lab.workloads.arrivals import parse_arrivals
from octavo.lab.workloads.lengths import parse_inputs, parse_outputs
from octavo.lab.workloads.tokens import token_ids
from octavo.lab.workloads.work_items import WorkItem
from octavo.lab.workloads.workload import Workload

#: Lengths of the workload, and its load as a share of what the replicas would serve.
_INPUTS, _OUTPUTS = "lognormal:120,0.7,1000", "lognormal:60,0.7,400"
#: What happens: the engine core of a replica is killed; it is drained for a while; all are restarted in turn.
FAILURES = {"kill": "replica killed", "drain": "replica drained", "restart": "rolling restart"}
#: When it happens, and how long a replica is drained, as shares of the seconds of arrivals.
_AT, _DRAINED = 0.4, 0.2
#: Seconds between two looks at the replicas, and that a replica may take to return; of a request.
_LOOK, _PATIENCE, _TIMEOUT = 0.02, 300.0, 3600.0
_VICTIM = 0
#: Within which the pace of a run is looked for, and how precisely.
_PACES, _PRECISION = (1 / 16, 16.0), 1.005


@dataclass(frozen=True)
class FailoverFigure:
    """A figure of a run, in seconds, or how many requests were moved."""

    #: "undisturbed", or one of ``FAILURES``.
    run: str
    name: str
    measured: float
    simulated: float
    #: Simulated relative to measured; 1 where both are 0.
    ratio: float


@dataclass(frozen=True)
class FailoverRun:
    """One run of the workload."""

    #: As in ``FailoverFigure``.
    name: str
    #: Times during which replicas took no requests, as measured: so they are simulated.
    outages: list[Outage]
    #: How many times slower than the profile the machine was before the first of them: so slow is the simulation.
    pace: float


@dataclass(frozen=True)
class FailoverComparison:
    """What was run."""

    replicas: int
    requests: int
    requests_per_s: float
    runs: list[FailoverRun]
    figures: list[FailoverFigure]


def measure(
    options: EngineConfig, profile: StepProfile, load: float, seconds: float, failures: Sequence[str] = ("kill",)
) -> FailoverComparison:
    """Runs the workload on a server with replicas, undisturbed and with each failure, and simulates all runs.

    Args:
        options: of the server, with at least two replicas.
        profile: of one replica.
        load: share of what the simulated replicas can serve.
        seconds: of arrivals.
        failures: of ``FAILURES``.

    Raises:
        ConfigError: a failure is unknown, the server does not start, a request fails, or a replica does not return.
    """
    replicas = options.data_parallel_size
    if replicas < 2:
        raise ConfigError(f"data_parallel_size must be at least 2, as a replica fails, not {replicas}")
    for failure in failures:
        if failure not in FAILURES:
            raise ConfigError(f"no failure {failure!r}: it is one of {', '.join(FAILURES)}")
    items = list(_workload(options, profile, load, seconds))
    with own_server(options, {"enable_admin_routes": True}) as server:
        measured = {"undisturbed": asyncio.run(_send(server, options, items, None, seconds))}
        for failure in failures:
            measured[FAILURES[failure]] = asyncio.run(_send(server, options, items, failure, seconds))
    figures, runs = [], []
    for name, run in measured.items():
        pace = _pace(options, profile, items, run)
        ours = _simulated(options, profile.scaled(pace), items, run.outages)
        figures += [FailoverFigure(name, f, run.figures[f], ours[f], _ratio(run.figures[f], ours[f])) for f in ours]
        runs.append(FailoverRun(name, run.outages, pace))
    return FailoverComparison(replicas, len(items), len(items) / seconds, runs, figures)


def _ratio(measured: float, simulated: float) -> float:
    return simulated / measured if measured else 1.0


def _workload(options: EngineConfig, profile: StepProfile, load: float, seconds: float) -> Workload:
    """Arrivals at a share of the rate at which simulated replicas answer requests that are all there at once."""
    lengths = parse_inputs(_INPUTS), parse_outputs(_OUTPUTS)
    full = full_load(*lengths, options.seed, requests=200 * options.data_parallel_size)
    rate = load * capacity_of(_record(options, profile, full)[1])
    return Workload(
        requests=max(8, round(rate * seconds)),
        arrivals=parse_arrivals("poisson", rate, None),
        inputs=lengths[0],
        outputs=lengths[1],
        seed=options.seed,
    )


# --- measured --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Measured:
    figures: dict[str, float]
    #: Seconds a token after the first, of requests that ended before the first outage.
    token_seconds: float
    #: On the clock of the arrivals.
    outages: list[Outage] = field(default_factory=list)

    @property
    def disturbed_at(self) -> float:
        """When the first outage begins."""
        return min((outage.at for outage in self.outages), default=math.inf)


async def _send(
    server: OwnServer, options: EngineConfig, items: list[WorkItem], failure: str | None, seconds: float
) -> _Measured:
    """Sends the workload of so many seconds; meanwhile the failure happens."""
    client = Client(server.url, "completions", {"model": SERVED_NAME}, None, _TIMEOUT)
    to_send = requests(items, functools.partial(token_ids, id_range=token_id_range(options)))
    warmup = [Request([*range(100 + 20 * i, 116 + 20 * i)], 16) for i in range(8)]
    outages: list[Outage] = []
    try:
        await client.connect()
        await closed_loop(client, warmup, len(warmup), lambda: None)
        await asyncio.to_thread(_request, server, "/reset_prefix_cache", "POST")
        before = await asyncio.to_thread(_num_resumed, server)
        start = time.perf_counter()
        running = asyncio.create_task(open_loop(client, to_send, lambda: None))
        if failure is not None:
            await asyncio.sleep(max(0.0, start + _AT * seconds - time.perf_counter()))
            outages = await _fail(server, failure, start, _DRAINED * seconds)
        outcomes = await running
    finally:
        client.close()
    if failed := [outcome.error_text or outcome.error for outcome in outcomes if outcome.error is not None]:
        raise ConfigError(f"{len(failed)} of {len(outcomes)} requests failed: {failed[0]}")
    at = min((outage.at for outage in outages), default=math.inf)
    figures = _measured_figures(outcomes, start + at if outages else None)
    if outages:
        figures["requests moved"] = await asyncio.to_thread(_num_resumed, server) - before
    spans = [(o.chunks[0] - start, o.chunks[-1] - start, o.output_tokens) for o in outcomes]
    if (token_seconds := _token_seconds(spans, at)) == math.inf:
        raise ConfigError("no request ended before the failure: give more --seconds, or a lower --load")
    return _Measured(figures, token_seconds, outages)


async def _fail(server: OwnServer, failure: str, start: float, drained: float) -> list[Outage]:
    """Kills, drains or restarts; returns when the replicas took no requests, in seconds since ``start``."""

    def now() -> float:
        return time.perf_counter() - start

    if failure == "restart":
        return await _restart(server, now)
    at = now()
    if failure == "kill":
        restarts = (await asyncio.to_thread(_replicas, server))[_VICTIM].restarts
        at = now()
        _core_of_victim(server).kill()
        await _when_back(server, restarts)
    else:
        await asyncio.to_thread(_request, server, f"/admin/drain?replica={_VICTIM}", "POST")
        await asyncio.sleep(max(0.0, at + drained - now()))
        await asyncio.to_thread(_request, server, f"/admin/undrain?replica={_VICTIM}", "POST")
    return [Outage(_VICTIM, at, now() - at, planned=failure == "drain")]


async def _restart(server: OwnServer, now: Callable[[], float]) -> list[Outage]:
    began: dict[int, float] = {}
    outages: list[Outage] = []
    done = asyncio.create_task(asyncio.to_thread(_request, server, "/admin/restart", "POST"))
    while not done.done() or began:
        for number, replica in enumerate(await asyncio.to_thread(_replicas, server)):
            if replica.status != "ready":
                began.setdefault(number, now())
            elif number in began:
                at = began.pop(number)
                outages.append(Outage(number, at, now() - at, planned=True))
        await asyncio.sleep(_LOOK)
    await done
    return outages


def _core_of_victim(server: OwnServer) -> psutil.Process:
    """The engine core that was started first, which is that of the first replica."""
    cores = [process for role, process in server_processes(server.process.pid) if role == "core"]
    return min(cores, key=lambda process: (process.create_time(), process.pid))


async def _when_back(server: OwnServer, restarts: int) -> None:
    """Waits until the replica, which had been restarted so many times, takes requests again."""
    end = time.perf_counter() + _PATIENCE
    while time.perf_counter() < end:
        replica = (await asyncio.to_thread(_replicas, server))[_VICTIM]
        if replica.status == "ready" and replica.restarts > restarts:
            return
        await asyncio.sleep(_LOOK)
    raise ConfigError(f"the replica that was killed has not returned within {_PATIENCE:g} s")


class _Replica(msgspec.Struct):
    status: str
    restarts: int


class _Replicas(msgspec.Struct):
    replicas: list[_Replica]


def _request(server: OwnServer, path: str, method: str = "GET") -> bytes:
    request = urllib.request.Request(server.url + path, method=method)
    with urllib.request.urlopen(request, timeout=_PATIENCE) as response:
        return bytes(response.read())


def _replicas(server: OwnServer) -> list[_Replica]:
    return msgspec.json.decode(_request(server, "/admin/replicas"), type=_Replicas).replicas


def _num_resumed(server: OwnServer) -> float:
    metrics = _request(server, "/metrics")
    match = re.search(rb"^octavo_requests_resumed_total(?:\{[^}]*\})? (\S+)", metrics, re.MULTILINE)
    return float(match.group(1)) if match else 0.0


def _measured_figures(outcomes: list[RequestOutcome], killed: float | None) -> dict[str, float]:
    gaps = np.concatenate([np.diff(outcome.chunks) for outcome in outcomes])
    figures = {
        **_spread("ttft", [outcome.ttft for outcome in outcomes]),
        **_spread("itl", gaps.tolist()),
        "itl max": float(gaps.max()),
        **_spread("e2e", [outcome.e2e for outcome in outcomes]),
    }
    if killed is not None:
        figures["time to recover"] = _time_to_recover([(o.sent, o.ended) for o in outcomes], killed)
    return figures


def _token_seconds(spans: Iterable[tuple[float, float, int]], until: float) -> float:
    """Mean seconds a token after the first, of the requests that ended before a moment: infinite if none has.

    ``spans``: times of the first and the last token, and how many there were.
    """
    ended = [(last - first, tokens - 1) for first, last, tokens in spans if last < until and tokens > 1]
    return sum(seconds for seconds, _ in ended) / sum(tokens for _, tokens in ended) if ended else math.inf


# --- simulated -------------------------------------------------------------------------------------------------------


def _pace(options: EngineConfig, profile: StepProfile, items: list[WorkItem], run: _Measured) -> float:
    """How many times as long the steps of the profile must take for the time between tokens before the kill."""
    low, high = _PACES
    while high / low > _PRECISION:
        pace = math.sqrt(low * high)
        done = _record(options, profile.scaled(pace), items)[1]
        spans = zip(done.first, done.last, done.outputs, strict=True)
        if _token_seconds(spans, run.disturbed_at) > run.token_seconds:
            high = pace
        else:
            low = pace
    return math.sqrt(low * high)


def _simulated(
    options: EngineConfig, profile: StepProfile, items: Iterable[WorkItem], outages: Sequence[Outage] = ()
) -> dict[str, float]:
    result, done = _record(options, profile, items, outages)
    if result.failed:
        raise ConfigError(f"simulated requests failed: {dict(result.failed)}")
    assert result.itl is not None
    figures = {
        **_spread("ttft", done.ttft.tolist()),
        **{"itl p50": result.itl.p50, "itl p99": result.itl.p99, "itl max": result.itl.max},
        **_spread("e2e", done.e2e.tolist()),
    }
    if outages:
        at = min(outage.at for outage in outages)
        figures["time to recover"] = _time_to_recover([*zip(done.sent, done.last, strict=True)], at)
        figures["requests moved"] = result.resumed
    return figures


def _record(
    options: EngineConfig, profile: StepProfile, items: Iterable[WorkItem], outages: Sequence[Outage] = ()
) -> tuple[ClusterFigures, Completions]:
    spec = ClusterSpec(
        ((options.data_parallel_size, profile),),
        router=options.data_parallel_routing,
        mode="server",
        outages=tuple(outages),
        seed=options.seed,
    )
    one = options.model_copy(update={"data_parallel_size": 1, "data_parallel_routing": "prefix"})
    return record_cluster(spec, one, items)


def _time_to_recover(spans: list[tuple[float, float]], failed: float) -> float:
    """Seconds from the failure until the last of the requests has ended that were open then."""
    return max((last - failed for sent, last in spans if sent <= failed < last), default=0.0)


def _spread(name: str, seconds: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, (50, 99))
    return {f"{name} p50": float(p50), f"{name} p99": float(p99)}
