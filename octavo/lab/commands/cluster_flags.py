"""The flags that describe a simulated engine or a cluster of them, and the cluster's figures as a table."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from octavo.cli.parsing import Arguments, Parser
from octavo.config.options import SchedulerOptions
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from octavo.lab.simulate.cluster.cluster_figures import ReplicaFigures
    from octavo.lab.simulate.cluster.spec import ClusterSpec
    from octavo.lab.simulate.figures import RunFigures

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
    "kv_disk",
    "kv_disk_bytes",
    "kv_store",
    "swap_space",
}
DEFAULT_PROFILE = "smollm2-135m-2-cores"
#: Replicas that the table shows one by one.
_MOST_LINES = 16
#: Flags that need ``--replicas``, by attribute, and their defaults.
_DEFAULTS: dict[str, Any] = {
    "router": "least_loaded",
    "decode_router": "least_loaded",
    "prefill_replicas": None,
    "transfer_gb_s": 50.0,
    "transfer_latency_ms": 1.0,
    "fail": [],
    "autoscale": None,
    "processes": 1,
}


def add_profile_flags(parser: Parser) -> None:
    """Adds the flags of a simulated engine beside its options."""
    add = parser.add_argument
    add("--profile", default=DEFAULT_PROFILE, metavar="NAME|FILE", help=f"costs of steps ({DEFAULT_PROFILE})")
    add("--mode", choices=("offline", "server"), default="offline", help="which of its overheads count (offline)")
    add(
        "--max-tokens",
        type=_max_tokens,
        default="exact",
        metavar="exact|none|N",
        help="limit that each request states, which policies may look at: its true length, none, or N (exact)",
    )


def add_cluster_flags(parser: Parser, *, sized: bool) -> None:
    """Adds the flags that ``make_spec`` reads; ``sized``: the number of replicas and what changes it, too."""
    add = parser.add_argument_group("cluster").add_argument
    if sized:
        add("--replicas", metavar="N[:PROFILE],...", help="simulate so many replicas behind a router")
        add("--prefill-replicas", metavar="N[:PROFILE],...", help="replicas that compute prompts; the others decode")
        add("--decode-router", metavar="ROUTER", help="chooses the decode replica (least_loaded)")
        add(
            "--transfer-gb-s",
            type=float,
            metavar="X",
            help="rate of KV caches sent, 10^9 bytes/s (50)",
        )
        add("--transfer-latency-ms", type=float, metavar="MS", help="beside that rate (1)")
        add(
            "--fail",
            action="append",
            metavar="WHEN",
            help="REPLICA@AT[:SECONDS] it is away, or mtbf:S,mttr:S for all; may be repeated",
        )
        add(
            "--autoscale",
            metavar="MIN,MAX,TARGET",
            help="TARGET requests:N or tokens:N for each replica[,start:S][,every:S][,calm:S]",
        )
        add(
            "--processes",
            type=int,
            metavar="N",
            help="shares of the replicas in parallel, with routers of their own (1)",
        )
    add(
        "--router",
        metavar="ROUTER",
        help="round_robin, least_loaded, power_of_two, prefix, session or module:Class (least_loaded)",
    )
    add("--ttft-limit", type=float, metavar="MS", help="of good requests without a target of their own")
    add("--tpot-limit", type=float, metavar="MS", help="of good requests without a target of their own")


def refuse_without_replicas(arguments: Arguments) -> None:
    """Refuses flags of a cluster where there is none.

    Raises:
        ConfigError: one is given.
    """
    for name in (*_DEFAULTS, "ttft_limit", "tpot_limit"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} needs --replicas")


def make_spec(arguments: Arguments, replicas: str, seed: int) -> ClusterSpec:
    """The cluster that the flags describe.

    Raises:
        ConfigError: a flag's value is wrong.
    """
    from octavo.lab.simulate.cluster.routers import router_class
    from octavo.lab.simulate.cluster.spec import (
        ClusterSpec,
        LatencyLimits,
        Transfer,
        parse_autoscale,
        parse_outages,
        parse_replicas,
    )

    values = {key: _given(arguments, key) for key in _DEFAULTS}
    for name in ("router", "decode_router"):
        router_class(values[name])
    outages, at_random = parse_outages(values["fail"])
    return ClusterSpec(
        replicas=parse_replicas(replicas, arguments.profile),
        prefill=parse_replicas(values["prefill_replicas"], arguments.profile) if values["prefill_replicas"] else (),
        router=values["router"],
        decode_router=values["decode_router"],
        mode=arguments.mode,
        max_tokens=arguments.max_tokens,
        transfer=Transfer(values["transfer_gb_s"] * 1e9, values["transfer_latency_ms"] / 1000),
        outages=outages,
        random_outages=at_random,
        autoscale=parse_autoscale(values["autoscale"]) if values["autoscale"] else None,
        limits=LatencyLimits(
            _seconds(arguments.ttft_limit, "--ttft-limit"), _seconds(arguments.tpot_limit, "--tpot-limit")
        ),
        seed=seed,
    )


def num_processes(arguments: Arguments) -> int:
    """``--processes``."""
    return 1 if arguments.processes is None else int(arguments.processes)


def cluster_lines(f: RunFigures) -> list[str]:
    """What the table says of a cluster, below the lines of any run; nothing if it is none."""
    from octavo.lab.simulate.cluster.cluster_figures import ClusterFigures

    if not isinstance(f, ClusterFigures):
        return []
    lines = [
        f"{len(f.replicas)} replicas, router {f.router}, {f.replica_seconds:.1f} replica-seconds in use; one was given "
        f"at most {f.imbalance:.3f} times the mean; {f.prefix_hit_share:.1%} of prompt tokens found in a cache",
        f"good: {f.good} ({f.good_share:.2%}), {f.goodput:.3f} requests/s, {f.goodput_per_replica:.3f} a replica",
    ]
    if f.transfers:
        lines.append(
            f"{f.transfers} KV caches sent, {f.transferred_bytes / 1e9:.2f} GB, {f.mean_transfer * 1000:.2f} ms each"
        )
    if failures := sum(replica.failures for replica in f.replicas):
        lines.append(f"{failures} failures: {f.resumed} requests went on elsewhere, {f.lost_tokens} tokens were lost")
    if f.started or f.drained:
        most = max(f.series["replicas"], default=0)
        lines.append(f"{f.started} replicas started, {f.drained} drained; at most {most:.0f} took requests at once")
    lines.append(f"{'replica':>7} {'role':8} {'requests':>9} {'good':>9} {'tokens':>11} {'steps':>9} {'busy':>7}")
    return [*lines, *_replica_lines(f.replicas)]


def _replica_lines(replicas: Iterable[ReplicaFigures]) -> list[str]:
    shown = list(replicas)
    lines = [
        f"{r.number:7} {r.role:8} {r.requests:9} {r.good:9} {r.tokens:11} {r.steps:9} {r.utilisation:7.1%}"
        for r in shown[:_MOST_LINES]
    ]
    if len(shown) > _MOST_LINES:
        busy = [r.utilisation for r in shown]
        lines.append(f"    ... {len(shown)} in all, busy from {min(busy):.1%} to {max(busy):.1%}: --json has each")
    return lines


def _max_tokens(text: str) -> str | int:
    if text in ("exact", "none"):
        return text
    if text.isdigit() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"max_tokens is exact, none or an integer from 1, not {text!r}")


def _given(arguments: Arguments, name: str) -> Any:
    value = getattr(arguments, name, None)
    return _DEFAULTS[name] if value is None else value


def _seconds(milliseconds: float | None, flag: str) -> float | None:
    if milliseconds is not None and not milliseconds > 0:
        raise ConfigError(f"{flag} must be above 0 ms, not {milliseconds:g}")
    return None if milliseconds is None else milliseconds / 1000
