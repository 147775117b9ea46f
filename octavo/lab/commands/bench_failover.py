"""``octavo bench failover``: prints what kills, drains and restarts of replicas cost, measured and simulated."""

from __future__ import annotations

from typing import IO

from octavo.cli.flags import read_engine_config
from octavo.cli.parsing import Arguments, check_positive
from octavo.lab.commands.records import show_one


def run(arguments: Arguments, model: str | None, stream: IO[str] | None) -> None:
    """Runs a server with replicas and the simulator; the run goes as JSON to ``stream``, if there is one."""
    from octavo.lab.bench.failover import measure
    from octavo.lab.simulate.step_profile import load_profile

    profile = load_profile(arguments.profile)
    check_positive(arguments, "seconds", "load")
    failures = [word.strip() for word in arguments.failures.split(",")]
    result = measure(read_engine_config(arguments, model), profile, arguments.load, arguments.seconds, failures)
    away = [
        f"{run.name}, simulated at the pace {run.pace:.3f}"
        + "".join(f"; replica {o.replica} away at {o.at:.2f} s for {o.seconds:.2f} s" for o in run.outages)
        for run in result.runs
    ]
    lines = [
        f"{result.replicas} replicas, {result.requests} requests, {result.requests_per_s:.3f} a second",
        *away,
        f"{'run':15} {'figure':16} {'measured':>9} {'simulated':>9} {'ratio':>6}",
        *(f"{f.run:15} {f.name:16} {f.measured:9.3f} {f.simulated:9.3f} {f.ratio:6.2f}" for f in result.figures),
    ]
    show_one(result, stream, "\n".join(lines))
