"""``octavo simulate``: a workload on the real scheduler, on a virtual clock with a model's step profile."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from octavo.cli import simulate_plan, simulate_profile
from octavo.cli.cluster_flags import (
    add_cluster_flags,
    add_profile_flags,
    cluster_lines,
    make_spec,
    num_processes,
    refuse_without_replicas,
)
from octavo.cli.engine_flags import PREFIX, add_engine_flags, read_engine_config, refuse_idle_flags
from octavo.cli.parsing import Arguments, Parser, add_json_flag, json_stream, refuse_words
from octavo.core.scheduler_options import SchedulerOptions
from octavo.workloads.flags import FORMS, add_workload_flags, make_workload

if TYPE_CHECKING:
    from octavo.simulate.figures import Latency, RunFigures
    from octavo.simulate.profile import StepProfile

#: The engine's options that count.
OPTIONS = frozenset(SchedulerOptions.model_fields) | {
    "seed",
    "max_model_len",
    "block_size",
    "watermark",
    "enable_prefix_caching",
    "host_prefix_cache",
    "num_gpu_blocks_override",
    "num_host_blocks_override",
    "kv_cache_memory_bytes",
    "swap_space",
}
EXAMPLE = f"""\
examples:
  octavo simulate --num-requests 1000 --request-rate 2 --input-len chat --output-len chat
  octavo simulate --profile llama-3.1-8b-h100 --request-rate 20 --num-requests 5000 --scheduling-policy srpt
  octavo simulate --profile mine.json --trace azure.csv --num-gpu-blocks-override 2000 --json -
  octavo simulate --profile llama-3.1-8b-h100 --replicas 8 --router prefix --turns 4 --request-rate 20
  octavo simulate profile llama-3.1-8b-shape --bandwidth-gb-s 3350 --tflops 989 --memory-gb 80

The profile says what a step costs and how large the KV cache is: 'octavo bench calibrate' measures one, 'octavo
simulate profile' computes one. Equal calls give equal figures. {FORMS}
"""


class _SimulateParser(Parser):
    """Passes arguments after ``profile`` and ``plan`` to the parsers of these, which have other options."""

    def read(self, argv: Sequence[str]) -> Arguments:
        word = argv[0] if argv else ""
        if word not in ("profile", "plan"):
            return super().read(argv)
        parser = simulate_profile.make_parser() if word == "profile" else simulate_plan.make_parser()
        arguments = parser.read(argv[1:])
        arguments.kind = word
        return arguments


def make_parser() -> Parser:
    """The command's parser."""
    parser = _SimulateParser(
        prog="octavo simulate",
        usage="octavo simulate [profile|plan] [options]",
        description="Runs a workload through the scheduler and block manager of the engine on a virtual clock.",
        epilog=EXAMPLE,
    )
    add_profile_flags(parser)
    add_json_flag(parser)
    add_cluster_flags(parser, sized=True)
    add_workload_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: Arguments) -> int:
    """Simulates and prints a table, or JSON."""
    kind = getattr(arguments, "kind", "")
    if kind:
        return simulate_profile.run(arguments) if kind == "profile" else simulate_plan.run(arguments, OPTIONS)
    from octavo.simulate.cluster.run import simulate_cluster
    from octavo.simulate.cluster.spec import stated_limits
    from octavo.simulate.profile import load_profile
    from octavo.simulate.run import simulate

    refuse_words(arguments)
    refuse_idle_flags(arguments, OPTIONS, "octavo simulate, which has a profile in the place of a model")
    profile = load_profile(arguments.profile)
    options = read_engine_config(arguments, "none")
    workload = make_workload(arguments, options.seed)
    start = time.perf_counter()
    if arguments.replicas is None:
        refuse_without_replicas(arguments)
        limit = stated_limits(arguments.max_tokens)
        figures = simulate(profile, options, workload, mode=arguments.mode, max_tokens=limit)
        lines: list[str] = []
    else:
        spec = make_spec(arguments, arguments.replicas, options.seed)
        profile = spec.replicas[0][1]
        figures = in_cluster = simulate_cluster(spec, options, workload, processes=num_processes(arguments))
        lines = cluster_lines(in_cluster)
    if arguments.json is None:
        print("\n".join([*_table(profile, figures), *lines]))
        print(
            f"simulated in {time.perf_counter() - start:.1f} s, {_cpu_seconds():.1f} s of CPU; {_peak_memory():.0f} MB"
        )
        return 0
    given = {
        "profile": arguments.profile,
        "mode": arguments.mode,
        "max_tokens": arguments.max_tokens,
        "options": {key: value for key, value in arguments.group(PREFIX).items()},
        "seed": options.seed,
    }
    with json_stream(arguments.json) as stream:
        stream.write(msgspec.json.encode({**given, **msgspec.structs.asdict(figures)}).decode() + "\n")
    return 0


def _table(profile: StepProfile, f: RunFigures) -> list[str]:
    failed = "".join(f", {count} {reason}" for reason, count in f.failed.items())
    marks = {"computed": " (computed, not measured)", "fitted": ""}
    return [
        f"{profile.model} on {profile.device}{marks[profile.origin]}",
        f"{f.requests} requests{failed} in {f.seconds:.1f} s: {f.requests_per_s:.3f} requests/s, "
        f"{f.output_tokens_per_s:.1f} output tokens/s; {f.steps} steps",
        f"{'seconds':10} {'mean':>10} {'p50':>10} {'p90':>10} {'p99':>10} {'max':>10}",
        *(_line(name, getattr(f, name)) for name in ("ttft", "tpot", "itl", "e2e")),
        f"preempted {f.preemptions_by_recompute} by recompute ({f.recomputed_tokens} tokens), {f.preemptions_by_swap} "
        f"by swap; {f.prefix_hit_tokens} prompt tokens found in the prefix cache",
        f"on average {f.mean_running:.1f} running, {f.mean_blocks_used:.0f} of {f.num_blocks} blocks used",
    ]


def _line(name: str, latency: Latency | None) -> str:
    if latency is None:
        return f"{name:10} {'-':>10}"
    values = (latency.mean, latency.p50, latency.p90, latency.p99, latency.max)
    return f"{name:10} " + " ".join(f"{value:10.4f}" for value in values)


def _cpu_seconds() -> float:
    """Of this process and of those that it waited for."""
    own, children = (resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _peak_memory() -> float:
    """MB of the largest process at its peak."""
    return max(resource.getrusage(of).ru_maxrss for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024
