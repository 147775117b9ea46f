"""``octavo bench allocators``: paged and contiguous KV caches on the engine, by the clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from octavo.cli.flags import add_engine_flags, read_engine_config, take_model
from octavo.cli.parsing import Arguments, Parser, add_json_flag, check_range, write_json
from octavo.core.errors import ConfigError
from octavo.lab.commands.records import add_again_flag
from octavo.lab.commands.waiting import Waiting

if TYPE_CHECKING:
    from octavo.lab.bench.allocators import AllocatorCase, AllocatorRun
    from octavo.lab.bench.steady import GuardedRun

EXAMPLE = """\
examples:
  octavo bench allocators smollm2-135m --json allocators.json
  octavo bench allocators smollm2-135m --cases short,beams-4 --repeats 1
  octavo bench allocators smollm2-135m --cases short --requests-share 0.2 --repeats 1     # a few seconds

The evaluation of Kwon et al. 2023 (PagedAttention), sections 6.2 to 6.5, on the engine: the same requests, all there at
the start, with the engine's block manager and with contiguous reservations in memory of the same size. The profile is
of this engine on this machine: what the simulator says of the same requests stands beside what was measured. paged-auto
is the engine's block manager with max_num_seqs=auto; the others run up to 64 sequences. Cases of one sequence a request
also run in static batches, padded to their longest prompt and answer (padded rows count as sequences in a step). The
table has medians of the repeats, and in brackets the least and the largest; * marks cases in which the machine changed.
"""


def make_parser() -> Parser:
    """The parser of ``octavo bench allocators``."""
    parser = Parser(
        prog="octavo bench allocators",
        usage="octavo bench allocators MODEL [options]",
        description="Measures requests a second with paged and with contiguous KV caches of the same size.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("--cases", metavar="NAME,...", help="short, long, samples-2|4|6, beams-2|4|6, one-shot, five-shot, chat (all)")
    add("--repeats", type=int, default=3, metavar="N", help="runs of each, with seeds from --seed on (3)")
    add("--requests-share", type=float, default=1.0, metavar="X", help="of each case's requests (1)")
    add(
        "--profile",
        default="smollm2-135m-epyc-2-cores",
        metavar="NAME|FILE|none",
        help="of this engine on this machine, to simulate the same (smollm2-135m-epyc-2-cores)",
    )
    add_again_flag(parser)
    add_json_flag(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: Arguments) -> int:
    """Measures and prints tables in Markdown; JSON has every run."""
    from octavo.lab.bench.allocators import CASES, baselines, make_options, measure
    from octavo.lab.bench.steady import Guard
    from octavo.lab.simulate.step_profile import load_profile

    model = take_model(arguments)
    names = list(CASES) if arguments.cases is None else [name.strip() for name in arguments.cases.split(",")]
    if unknown := [name for name in names if name not in CASES]:
        raise ConfigError(f"no case {unknown[0]!r}; known: {', '.join(CASES)}")
    check_range(arguments, "repeats", most=1000)
    check_range(arguments, "again", least=0)
    if not 0 < arguments.requests_share <= 100:
        raise ConfigError(f"--requests-share must be above 0 and at most 100, not {arguments.requests_share:g}")
    profile = None if arguments.profile == "none" else load_profile(arguments.profile)
    cases = [CASES[name] for name in names]
    options = make_options(read_engine_config(arguments, model), cases)
    total = sum(len(baselines(case)) for case in cases) * arguments.repeats
    with Waiting(f"{total} runs", total, skip=1) as waiting:  # the first run loads the model
        guard = Guard(again=arguments.again, ended=waiting.add, say=waiting.say)
        how = {"repeats": arguments.repeats, "share": arguments.requests_share, "profile": profile}
        runs = list(measure(options, cases, guard=guard, **how))
    if arguments.json is not None:
        each = [{**msgspec.to_builtins(run.result), "conditions": run.as_json()} for run in runs]
        write_json(arguments.json, {**arguments.plain("json"), "runs": each})
    if arguments.json != "-":
        print("\n".join([table(cases, runs), *guard.report()]))
    return 0


def table(cases: Sequence[AllocatorCase], guarded: Sequence[GuardedRun[AllocatorRun]]) -> str:
    """A line for each case and allocator; rates and sequences of the paged one relative to those of the same seed."""
    from octavo.lab.bench.allocators import baselines
    from octavo.lab.bench.policies.tables import markdown_table, number
    from octavo.lab.bench.steady import median_and_range

    by_key: dict[tuple[str, str], list[AllocatorRun]] = {}
    marked = {(run.result.case, run.result.allocator) for run in guarded if run.is_disturbed}
    for run in sorted((run.result for run in guarded), key=lambda f: f.seed):
        by_key.setdefault((run.case, run.allocator), []).append(run)
    lines = []
    for case, allocator in [(of, name) for of in cases for name in baselines(of)]:
        own, paged = by_key[case.name, allocator], by_key[case.name, "paged"]

        def times(figure: str, own: list[AllocatorRun] = own, paged: list[AllocatorRun] = paged) -> str:
            pairs = [(getattr(p, figure), getattr(f, figure)) for p, f in zip(paged, own, strict=True)]
            held = [p / f for p, f in pairs if p and f]
            return median_and_range(held, "{:.2f}".format) if held else "-"

        lines.append(
            [
                case.name + "*" * ((case.name, allocator) in marked),
                allocator,
                median_and_range([f.requests_per_s for f in own], number),
                times("requests_per_s"),
                times("simulated"),
                median_and_range([f.sequences for f in own], number),
                times("sequences"),
                median_and_range([f.filled for f in own], "{:.1%}".format),
                median_and_range([f.preemptions for f in own], number),
            ]
        )
    header = ["case", "allocator", "requests/s", "paged serves", "simulated", "sequences in a step", "paged has"]
    return markdown_table([*header, "memory with tokens", "preemptions"], lines)
