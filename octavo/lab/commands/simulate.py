"""``octavo simulate``: a workload on the real scheduler, on a virtual clock with a model's step profile."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.cli.flags import PREFIX, add_engine_flags, read_engine_config, refuse_idle_flags
from octavo.cli.parsing import Arguments, Parser, add_json_flag, add_report_flag, check_folder, refuse_words, write_json
from octavo.core.errors import ConfigError
from octavo.lab.commands import (
    simulate_allocators,
    simulate_delay,
    simulate_flood,
    simulate_plan,
    simulate_preemption,
    simulate_profile,
)
from octavo.lab.commands.cluster_flags import (
    OPTIONS,
    add_cluster_flags,
    add_profile_flags,
    cluster_lines,
    make_spec,
    num_processes,
    refuse_without_replicas,
)
from octavo.lab.commands.scenario_flag import add_scenario_flag, read_scenario
from octavo.lab.commands.waiting import Waiting
from octavo.lab.workloads.flags import FORMS, add_workload_flags, make_workload
from octavo.lab.workloads.workload import Workload

if TYPE_CHECKING:
    from octavo.config.engine_config import EngineConfig
    from octavo.lab.bench.policies.scenarios import Scenario
    from octavo.lab.commands.simulate_report import PolicyRun
    from octavo.lab.simulate.cluster.spec import ClusterSpec
    from octavo.lab.simulate.engine import MaxTokens
    from octavo.lab.simulate.figures import Completions, Latency, RunFigures, StoreFigures
    from octavo.lab.simulate.step_profile import StepProfile
    from octavo.lab.workloads.work_items import WorkItem

EXAMPLE = f"""\
examples:
  octavo simulate --num-requests 1000 --request-rate 2 --input-len chat --output-len chat
  octavo simulate --profile llama-3.1-8b-h100 --request-rate 20 --num-requests 5000 --scheduling-policy srpt
  octavo simulate --profile mine.json --trace azure.csv --num-gpu-blocks-override 2000 --json -
  octavo simulate --request-rate 1.5 --max-num-seqs 24 --output-len chat --compare sjf,srpt,mlfq --report out.html
  octavo simulate --profile llama-3.1-8b-h100 --replicas 8 --router prefix --turns 4 --request-rate 20
  octavo simulate --scenario agent --kv-disk store --kv-disk-bytes 4GiB
  octavo simulate profile llama-3.1-8b-shape --bandwidth-gb-s 3350 --tflops 989 --memory-gb 80
  octavo simulate --request-rate 4 --num-requests 200 --num-gpu-blocks-override 400 --record run.jsonl
  octavo simulate --scenario heavy-tailed-90 --compare srpt,sjf
  octavo simulate --scenario mine.yaml --report out.html
  octavo simulate --replay ~/.cache/octavo/dumps/step-20260102-030405-6-789.jsonl
  octavo simulate allocators
  octavo simulate preemption
  octavo simulate delay
  octavo simulate flood

The profile says what a step costs and how large the KV cache is: 'octavo bench calibrate' measures one, 'octavo
simulate profile' computes one. Equal calls give equal figures. {FORMS}
"""


#: Commands of their own after ``octavo simulate``.
_COMMANDS = {
    "profile": simulate_profile,
    "plan": simulate_plan,
    "allocators": simulate_allocators,
    "preemption": simulate_preemption,
    "delay": simulate_delay,
    "flood": simulate_flood,
}


class _SimulateParser(Parser):
    """Passes arguments after the name of a command of its own to its parser, which has other options."""

    def read(self, argv: Sequence[str]) -> Arguments:
        if not argv or argv[0] not in _COMMANDS:
            return super().read(argv)
        arguments = _COMMANDS[argv[0]].make_parser().read(argv[1:])
        arguments.command_of_simulate = argv[0]
        return arguments


def make_parser() -> Parser:
    """The command's parser."""
    parser = _SimulateParser(
        prog="octavo simulate",
        usage="octavo simulate [profile|plan|allocators|preemption|delay|flood] [options]",
        description="Runs a workload through the scheduler and block manager of the engine on a virtual clock.",
        epilog=EXAMPLE,
    )
    parser.kinds = {name: module.make_parser for name, module in _COMMANDS.items()}
    add_profile_flags(parser)
    parser.add_argument(
        "--compare", metavar="POLICY,...", help="the same requests under these policies too, beside --scheduling-policy"
    )
    add_json_flag(parser)
    add_report_flag(parser)
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="draw the run: PNG files (needs the extra octavo[plot])"
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="write what the engine's blocks and queues do: see octavo view"
    )
    parser.add_argument(
        "--replay", type=Path, metavar="DUMP", help="replay the scheduler to a step that failed, from the step's dump"
    )
    add_cluster_flags(parser, sized=True)
    add_scenario_flag(parser)
    add_workload_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: Arguments) -> int:
    """Simulates and prints a table, or JSON."""
    if hasattr(arguments, "command_of_simulate"):
        return _COMMANDS[arguments.command_of_simulate].run(arguments)
    from octavo.lab.commands import simulate_report
    from octavo.lab.plots.style import load_matplotlib
    from octavo.lab.simulate.cluster.spec import stated_limits
    from octavo.lab.simulate.step_profile import load_profile

    refuse_words(arguments)
    if arguments.replay is not None:
        return _replay(arguments)
    refuse_idle_flags(arguments, OPTIONS, "octavo simulate, which has a profile in the place of a model")
    if arguments.report is not None or arguments.plots is not None:
        load_matplotlib()
        check_folder(arguments.report, "--report")
    options = read_engine_config(arguments, "none")
    if arguments.replicas is None:
        refuse_without_replicas(arguments)
        spec, profile = None, load_profile(arguments.profile)
    else:
        spec = make_spec(arguments, arguments.replicas, options.seed)
        profile = spec.replicas[0][1]
    if arguments.record is not None:
        check_folder(arguments.record, "--record")
        if spec is not None or arguments.compare is not None:
            raise ConfigError("--record is for one engine under one policy: leave out --replicas and --compare")
    policies = _policies(options.scheduling_policy, arguments.compare)
    scenario = read_scenario(arguments)
    if scenario is not None and spec is not None:
        raise ConfigError("--scenario is for one engine: leave out --replicas")
    if scenario is None:
        workload: Sequence[WorkItem] | Workload = make_workload(arguments, options.seed)
        stated = stated_limits(arguments.max_tokens)
        conditions = {policy: (_under(options, policy), stated) for policy in policies}
    else:
        workload, conditions = _of_scenario(arguments, scenario, profile, options, policies)
    start = time.perf_counter()
    runs = []
    what = f"{len(workload)} requests under {', '.join(policies)}"
    with Waiting(what, len(policies), shown=len(policies) > 1) as waiting:
        for policy in policies:
            waiting.phase(policy)
            figures, done = _simulate(arguments, spec or profile, workload, *conditions[policy])
            runs.append(simulate_report.PolicyRun(policy, figures, done))
            waiting.add()
    if arguments.json is None:
        print("\n".join(_table(profile, runs[0].figures) if len(runs) == 1 else simulate_report.comparison_text(runs)))
        seconds = time.perf_counter() - start
        print(f"simulated in {seconds:.1f} s, {_cpu_seconds():.1f} s of CPU; {_peak_memory():.0f} MB")
    else:
        _write_json(arguments, options, runs)
    if arguments.report is not None or arguments.plots is not None:
        drawn = simulate_report.draw(runs)
        if arguments.plots is not None:
            simulate_report.write_plots(drawn, arguments.plots)
        if arguments.report is not None:
            in_force = {name: getattr(options, name) for name in OPTIONS}
            given = {**arguments.plain("json", "report", "plots"), **in_force}
            simulate_report.make_report(profile, runs, drawn, arguments.command, given).write(arguments.report)
    return 0


def _of_scenario(
    arguments: Arguments, scenario: Scenario, profile: StepProfile, options: EngineConfig, policies: Sequence[str]
) -> tuple[list[WorkItem], dict[str, tuple[EngineConfig, MaxTokens]]]:
    """Its requests, and for each policy the options and what requests state of their length."""
    from octavo.config.engine_config import make_config
    from octavo.lab.bench.policies.lab import Lab, options_for
    from octavo.lab.bench.policies.places import Simulated, stated

    def configure(place: str, changes: Mapping[str, Any]) -> EngineConfig:
        return make_config(**{**options.model_dump(exclude_unset=True), **changes})

    capacity = Lab([], configure, options.seed).capacity(Simulated(profile, arguments.mode), scenario)
    items = list(scenario.make(float("inf") if capacity is None else capacity, options.seed))
    conditions = {
        # sjf is the oracle, see ``Scenario.max_tokens``.
        policy: (configure("", options_for(scenario, policy)), stated(None if policy == "sjf" else scenario.max_tokens))
        for policy in policies
    }
    return items, conditions


def _replay(arguments: Arguments) -> int:
    """Prints what the scheduler plans up to the failed step."""
    from octavo.lab.simulate.replay import replay

    played = replay(arguments.replay)
    if arguments.json is None:
        print("\n".join(played.lines()))
    else:
        steps = [{"step": s.step, "recorded": s.recorded, "planned": s.planned} for s in played.steps]
        failed = {"step": played.failure.step, "error": played.failure.error, "from_idle": played.failure.from_idle}
        write_json(arguments.json, {"failure": failed, "equal": played.num_equal, "steps": steps})
    return 0


def _simulate(
    arguments: Arguments,
    place: StepProfile | ClusterSpec,
    load: Sequence[WorkItem] | Workload,
    options: EngineConfig,
    max_tokens: MaxTokens,
) -> tuple[RunFigures, Completions]:
    """On one engine with a profile, or on a cluster."""
    from octavo.lab.simulate.cluster.cluster_run import record_cluster
    from octavo.lab.simulate.cluster.spec import ClusterSpec
    from octavo.lab.simulate.run import record, record_views

    if isinstance(place, ClusterSpec):
        assert isinstance(load, Workload)
        return record_cluster(place, options, load, processes=num_processes(arguments))
    settings = {"mode": arguments.mode, "max_tokens": max_tokens}
    if arguments.record is not None:
        return record_views(arguments.record, place, options, load, **settings)
    return record(place, options, load, **settings)


def _policies(first: str, others: str | None) -> list[str]:
    """Each once.

    Raises:
        ConfigError: one is unknown.
    """
    from octavo.scheduler.policies import policy_class

    names = list(dict.fromkeys([first, *(name.strip() for name in (others or first).split(","))]))
    for name in names:
        policy_class(name)
    return names


def _under(options: EngineConfig, policy: str) -> EngineConfig:
    """The options with another policy; what is of the given one alone, it does not look at."""
    if policy == options.scheduling_policy:
        return options
    return options.model_copy(update={"scheduling_policy": policy, "priority_preemption": False})


def _write_json(arguments: Arguments, options: EngineConfig, runs: Sequence[PolicyRun]) -> None:
    """One run's figures beside the settings; those of several as ``runs``, by policy."""
    report: dict[str, Any] = {
        "profile": arguments.profile,
        "mode": arguments.mode,
        "max_tokens": arguments.max_tokens,
        "options": {key: value for key, value in arguments.group(PREFIX).items()},
        "seed": options.seed,
    }
    if len(runs) == 1:
        report |= msgspec.structs.asdict(runs[0].figures)
    else:
        report["runs"] = {run.policy: run.figures for run in runs}
    write_json(arguments.json, report)


def _table(profile: StepProfile, f: RunFigures) -> list[str]:
    failed = "".join(f", {count} {reason}" for reason, count in f.failed.items())
    from octavo.lab.commands.simulate_report import ORIGINS

    return [
        f"{profile.model} on {profile.device}{ORIGINS[profile.origin]}",
        f"{f.requests} requests{failed} in {f.seconds:.1f} s: {f.requests_per_s:.3f} requests/s, "
        f"{f.output_tokens_per_s:.1f} output tokens/s; {f.steps} steps",
        f"{'seconds':10} {'mean':>10} {'p50':>10} {'p90':>10} {'p99':>10} {'max':>10}",
        *(_line(name, getattr(f, name)) for name in ("ttft", "tpot", "itl", "e2e")),
        *_goodput(f),
        f"preempted {f.preemptions_by_recompute} by recompute ({f.recomputed_tokens} tokens), {f.preemptions_by_swap} "
        f"by swap; {f.prefix_hit_tokens} prompt tokens found in the prefix cache"
        + (f" ({f.prefix_hit_tokens / f.prefix_queried_tokens:.1%})" if f.prefix_queried_tokens else ""),
        f"on average {f.mean_running:.1f} running, {f.mean_blocks_used:.0f} of {f.num_blocks} blocks used",
        *(_store_line(tier, store) for tier, store in f.stores.items()),
        *cluster_lines(f),
    ]


def _store_line(tier: str, store: StoreFigures) -> str:
    return (
        f"KV store, {tier}: {store.found} blocks found of {store.asked} looked for, {store.bytes_read / 1e9:.2f} GB "
        f"read in {store.read_seconds:.2f} s; {store.written} written ({store.bytes_written / 1e9:.2f} GB), "
        f"{store.dropped} dropped, {store.evicted} evicted; holds {store.held_bytes / 1e9:.2f} GB"
    )


def _goodput(f: RunFigures) -> list[str]:
    if f.goodput_share is None:
        return []
    return [f"goodput {f.goodput_requests_per_s:.3f} requests/s: {f.goodput_share:.1%} of those with targets met them"]


def _line(name: str, latency: Latency | None) -> str:
    if latency is None:
        return f"{name:10} {'-':>10}"
    values = (latency.mean, latency.p50, latency.p90, latency.p99, latency.max)
    return f"{name:10} " + " ".join(f"{value:10.4f}" for value in values)


def _cpu_seconds() -> float:
    """Of this process and of those that it waited for."""
    process, children = (resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return process.ru_utime + process.ru_stime + children.ru_utime + children.ru_stime


def _peak_memory() -> float:
    """MB of the largest process at its peak."""
    return max(resource.getrusage(of).ru_maxrss for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024
