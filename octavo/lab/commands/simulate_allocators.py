"""``octavo simulate allocators``: paged and contiguous KV caches under the same scheduler and the same requests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.parsing import Arguments, Parser, add_json_flag, check_positive, check_range, refuse_words, write_json
from octavo.core.errors import ConfigError
from octavo.lab.commands.waiting import FIRST_LOOK, Waiting, add_thorough_flag, seconds_here

if TYPE_CHECKING:
    from octavo.lab.simulate.allocators.comparison import AllocatorComparison

EXAMPLE = """\
examples:
  octavo simulate allocators
  octavo simulate allocators --thorough
  octavo simulate allocators --cases samples-4,samples-6
  octavo simulate allocators --lengths chat --latency-limit 0.1 --rate 2 --json curves.json

The comparison of Kwon et al. 2023 (PagedAttention), section 6.2, on a simulated OPT-13B on an A100: oracle reserves the
true length of each request, pow2 at most twice its output, max the model's context. static-oracle and static-max batch
whole requests: as many as memory holds, padded to the longest prompt and the longest answer, begin and end together, in
memory of the true padded lengths, or of the context (FasterTransformer in the paper). Equal calls give equal figures.
With --cases: the requests and the memory of octavo bench allocators, with its profile; paged-auto is paged memory with
max_num_seqs=auto.
"""
#: Fits of the paper's traces, see octavo/lab/workloads/lengths.py; and how many requests a run has, unless it is given:
#: for a first look, and with ``--thorough``.
TRACES = {"chat": "ShareGPT", "instruct": "Alpaca"}
_FEW_REQUESTS = {"chat": 250, "instruct": 1000}
_REQUESTS = {"chat": 1000, "instruct": 3000}
#: Cost of a request in a run, in units of ``seconds_here``.
_COST = {"chat": 0.23, "instruct": 0.06}
_MOST_REQUESTS = 100_000
#: With ``--cases``: the profile, and runs of each with seeds from ``--seed`` on.
_PROFILE_OF_CASES, _SEEDS = "smollm2-135m-epyc-2-cores", 3


def make_parser() -> Parser:
    """The command's parser."""
    parser = Parser(
        prog="octavo simulate allocators",
        description="Finds the rate that each allocator of the KV cache serves under a limit of latency, and says what "
        "memory holds and how many requests are in a batch at one rate.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("--lengths", choices=(*TRACES, "both"), help="chat (ShareGPT), instruct (Alpaca) or both (chat)")
    add("--cases", metavar="NAME,...", help="cases of octavo bench allocators, all but those of beams")
    add(
        "--profile",
        metavar="NAME|FILE",
        help=f"costs of steps, memory (opt-13b-a100; with --cases {_PROFILE_OF_CASES})",
    )
    add("--num-requests", type=int, metavar="N", help="requests of each run (250 of chat, 1000 of instruct)")
    add_thorough_flag(parser, "both kinds of lengths, 1000 requests of chat and 3000 of instruct")
    add(
        "--latency-limit",
        type=float,
        metavar="X",
        help="most seconds from arrival to end for each output token, mean over requests (0.05)",
    )
    add(
        "--rate",
        type=float,
        metavar="X",
        help="requests a second at which memory and batches are counted (the one that paged serves at the limit)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of lengths and arrivals (0)")
    add_json_flag(parser)
    add("--plots", type=Path, metavar="FOLDER", help="draw latency against rate: PNG files (needs octavo[plot])")
    return parser


def run(arguments: Arguments) -> int:
    """Compares, and prints a table for each kind of lengths, or JSON with the curves too."""
    from octavo.lab.commands.simulate_report import write_plots
    from octavo.lab.plots.style import load_matplotlib
    from octavo.lab.simulate.allocators.comparison import BASELINES, RUNS, compare, make_setting
    from octavo.lab.simulate.step_profile import load_profile
    from octavo.lab.workloads.lengths import parse_inputs, parse_outputs

    refuse_words(arguments)
    check_range(arguments, "num_requests", most=_MOST_REQUESTS)
    check_positive(arguments, "latency_limit", "rate")
    if arguments.cases is not None:
        return _run_cases(arguments)
    if arguments.plots is not None:
        load_matplotlib()
    profile = load_profile(arguments.profile or "opt-13b-a100")
    lengths = arguments.lengths or ("both" if arguments.thorough else "chat")
    traces = TRACES if lengths == "both" else (lengths,)
    counts = _REQUESTS if arguments.thorough else _FEW_REQUESTS
    requests = {trace: arguments.num_requests or counts[trace] for trace in traces}
    runs = RUNS * len(BASELINES)
    seconds = seconds_here(sum(runs * count * _COST[trace] for trace, count in requests.items()))
    comparisons = {}
    what = f"about {runs * len(requests)} simulations{'' if arguments.thorough else FIRST_LOOK}"
    with Waiting(what, runs * len(requests), seconds=seconds) as waiting:
        for trace, count in requests.items():

            def begins(allocator: str, trace: str = trace) -> None:
                waiting.phase(f"{trace}, {allocator}")

            setting = make_setting(profile, parse_inputs(trace), parse_outputs(trace), count, arguments.seed)
            comparisons[trace] = compare(setting, arguments.latency_limit or 0.05, arguments.rate, begins, waiting.add)
            if arguments.json is None:
                waiting.print("\n".join(table(trace, comparisons[trace])))
    if arguments.plots is not None:
        write_plots({f"allocators_{trace}": (draw(comparisons[trace]), "") for trace in comparisons}, arguments.plots)
    if arguments.json is not None:
        write_json(
            arguments.json,
            {"profile": arguments.profile or "opt-13b-a100", "seed": arguments.seed, "lengths": comparisons},
        )
    return 0


def _run_cases(arguments: Arguments) -> int:
    """Simulates cases of ``octavo bench allocators``."""
    from octavo.config.engine_config import make_config
    from octavo.lab.bench.allocators import CASES, baselines, make_options, simulate_case
    from octavo.lab.bench.policies.tables import markdown_table, number
    from octavo.lab.bench.steady import median_and_range
    from octavo.lab.simulate.step_profile import load_profile

    known = [name for name, case in CASES.items() if not case.beams]
    names = [name.strip() for name in arguments.cases.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"no case {unknown[0]!r}; known: {', '.join(known)}")
    for name in ("lengths", "latency_limit", "rate", "plots", "thorough"):
        if getattr(arguments, name) not in (None, False):
            raise ConfigError(f"--{name.replace('_', '-')} is not for --cases: leave it out")
    profile = load_profile(arguments.profile or _PROFILE_OF_CASES)
    lines, runs = [], []
    for case in (CASES[name] for name in names):
        options = make_options(make_config(model="none"), [case])
        share = (arguments.num_requests or case.requests) / case.requests
        figures = {
            allocator: [
                simulate_case(profile, options, case, allocator, case.items(arguments.seed + i, share))
                for i in range(_SEEDS)
            ]
            for allocator in baselines(case)
        }
        for allocator, own in figures.items():
            over = [f.requests_per_s / o.requests_per_s for f, o in zip(own, figures["oracle"], strict=True)]
            lines.append(
                [
                    case.name,
                    allocator,
                    median_and_range([f.requests_per_s for f in own], number),
                    median_and_range(over, "{:.2f}".format),
                    median_and_range([f.preemptions_by_recompute for f in own], number),
                    median_and_range([f.recomputed_tokens for f in own], number),
                ]
            )
            for i, (f, ratio) in enumerate(zip(own, over, strict=True)):
                run: dict[str, object] = {"case": case.name, "allocator": allocator, "seed": arguments.seed + i}
                run |= {"requests_per_s": f.requests_per_s, "over_oracle": ratio}
                run |= {"preemptions": f.preemptions_by_recompute, "recomputed_tokens": f.recomputed_tokens}
                runs.append(run)
    if arguments.json is not None:
        write_json(arguments.json, {"profile": profile.model, "device": profile.device, "runs": runs})
    if arguments.json != "-":
        header = ["case", "allocator", "requests/s", "over oracle", "preemptions", "tokens computed again"]
        print(markdown_table(header, lines))
    return 0


def draw(result: AllocatorComparison) -> Any:
    """A figure of matplotlib as figure 12 of the paper: normalized latency against the rate."""
    from octavo.lab.plots.drawings import curves

    points = {
        a.allocator: ([point.rate for point in a.curve], [point.normalized_latency for point in a.curve])
        for a in result.allocators
    }
    return curves(points, "requests/s", "normalized latency (s/token)", 4 * result.latency_limit)


def table(trace: str, result: AllocatorComparison) -> list[str]:
    """The lines for a terminal."""
    paged = result.allocators[0]
    lines = [
        f"{trace} ({TRACES[trace]}): {result.requests} requests of {result.mean_input:.1f} + "
        f"{result.mean_output:.1f} tokens; latency limit {result.latency_limit:g} s/token; "
        f"memory and batch at {result.at:.2f} requests/s",
        f"{'':13}{'req/s':>8}{'paged /':>9}{'at once':>9}{'batch':>8}{'paged /':>9}   share of memory: "
        f"{'tokens':>6}{'reserved':>10}{'internal':>10}{'external':>10}  (rounding + free)",
    ]
    for a in result.allocators:
        s = a.shares
        ratio = paged.batch / a.batch if a.batch else math.nan
        lines.append(
            f"{a.allocator:13}{a.rate:8.2f}{paged.rate / a.rate:8.2f}x{a.throughput:9.2f}{a.batch:8.2f}{ratio:8.2f}x"
            f"{'':20}{s.tokens:6.1%}{s.reserved:10.1%}{s.internal:10.1%}{s.external:10.1%}"
            f"  ({s.rounding:.1%} + {s.free:.1%})"
        )
    by_name = {a.allocator: a for a in result.allocators}
    worth = [
        f"{name} {own.rate / static.rate:.2f}x, {own.throughput / static.throughput:.2f}x"
        for name in ("oracle", "max")
        for own, static in [(by_name[name], by_name[f"static-{name}"])]
    ]
    lines.append(
        "iteration-level over static batching in the same memory, req/s at the limit, and with all requests at the "
        f"start: {'; '.join(worth)}"
    )
    return lines
