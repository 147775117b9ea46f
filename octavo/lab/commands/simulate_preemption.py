"""``octavo simulate preemption``: swapping against recomputing, at equal memory and across a link."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.cli.parsing import Arguments, Parser, add_json_flag, check_positive, check_range, refuse_words, write_json
from octavo.core.errors import ConfigError
from octavo.lab.commands.waiting import FIRST_LOOK, Waiting, add_thorough_flag, seconds_here

if TYPE_CHECKING:
    from octavo.lab.simulate.step_profile import StepProfile
    from octavo.lab.simulate.swap_or_recompute import Load, OnePreemption, Runs

#: A table: its title, its records, and its text.
_Part = tuple[str, list[Any], str]

EXAMPLE = """\
examples:
  octavo simulate preemption
  octavo simulate preemption --thorough
  octavo simulate preemption --profile opt-13b-a100 --link-gb-s 55 --copies 1

A profile of a CPU has one memory: blocks on the host are taken from those of the device. Of a GPU, host memory is
beside its own: blocks of 1 to 256 tokens cross a link, as in figure 19 of Kwon et al. 2023 (PagedAttention). All
requests are there at the start. Equal calls give equal figures.
"""
#: A fitted CPU, and the GPU and model of the paper.
PROFILES = "smollm2-135m-epyc-2-cores,opt-13b-a100"
#: For a first look: requests of each run, in one memory and across a link, and runs of each setting.
_FEW_SHARED, _FEW_LINK, _FEW_RUNS = 80, 100, 1
#: With ``--thorough``; requests are those of the loads.
_RUNS = 3
#: Cost of a request in a run in one memory and across a link, in units of ``seconds_here``.
_COST_SHARED, _COST_LINK = 0.27, 0.32


def make_parser() -> Parser:
    """The command's parser."""
    parser = Parser(
        prog="octavo simulate preemption",
        description="Says when it pays to swap the blocks of preempted requests, and when to compute them again.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("--profile", default=PROFILES, metavar="NAME|FILE,...", help=f"costs of steps, memory ({PROFILES})")
    add("--link-gb-s", type=float, default=25.0, metavar="X", help="of a GPU to host memory, 10^9 bytes/s (25)")
    add("--copy-us", type=float, default=5.0, metavar="X", help="microseconds of a copy beside its bytes (5)")
    add(
        "--copies",
        default="1,80",
        metavar="N,...",
        help="that move a block: 1 as here, where it is contiguous; 80: for each of 40 layers' keys and values (1,80)",
    )
    add(
        "--num-requests",
        type=int,
        metavar="N",
        help=f"of each run ({_FEW_SHARED} in one memory, {_FEW_LINK} across a link)",
    )
    add("--repeats", type=int, metavar="N", help=f"runs of each, with seeds from --seed on ({_FEW_RUNS})")
    add("--seed", type=int, default=0, metavar="N", help="of lengths (0)")
    add_thorough_flag(parser, f"150 requests in one memory, 200 across a link, {_RUNS} runs of each")
    add_json_flag(parser)
    return parser


def run(arguments: Arguments) -> int:
    """Prints a table for each kind of requests, or JSON with every run."""
    from octavo.lab.simulate.step_profile import load_profile

    refuse_words(arguments)
    check_positive(arguments, "link_gb_s", "copy_us")
    check_range(arguments, "repeats", "num_requests", most=100_000)
    if arguments.repeats is None:
        arguments.repeats = _RUNS if arguments.thorough else _FEW_RUNS
    copies = _whole_numbers(arguments.copies)
    profiles = {name: load_profile(name) for name in arguments.profile.split(",")}
    tables: dict[str, list[Any]] = {}
    with _waiting(profiles.values(), copies, arguments) as waiting:
        for name, profile in profiles.items():
            parts = _link_parts if profile.device_type == "gpu" else _parts
            tables[name] = []
            for title, records, table in parts(profile, copies, arguments, waiting):
                tables[name].append({"title": title, "records": records})
                if arguments.json is None:
                    waiting.print(f"**{name}: {title}**\n\n{table}\n")
    if arguments.json is not None:
        write_json(arguments.json, {**arguments.plain("json"), "profiles": tables})
    return 0


def _waiting(profiles: Iterable[StepProfile], copies: list[int], arguments: Arguments) -> Waiting:
    """What is simulated, for all profiles."""
    from octavo.lab.simulate.swap_or_recompute import HOST_SHARES, LINK_LOADS, RUN_SIZES, SHARED_LOADS

    total, cost = 0, 0.0
    for profile in profiles:
        is_gpu = profile.device_type == "gpu"
        settings = len(RUN_SIZES) * (2 + 2 * len(copies)) if is_gpu else 2 * len(HOST_SHARES)
        loads = _sized(LINK_LOADS, arguments, _FEW_LINK) if is_gpu else _sized(SHARED_LOADS, arguments, _FEW_SHARED)
        total += settings * len(loads)
        requests = sum(load.requests for load in loads)
        cost += settings * requests * arguments.repeats * (_COST_LINK if is_gpu else _COST_SHARED)
    look = "" if arguments.thorough else FIRST_LOOK
    return Waiting(f"{total * arguments.repeats} simulations{look}", total, seconds=seconds_here(cost))


def _whole_numbers(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) for word in words):
        raise ConfigError(f"--copies are integers from 1 with commas between, not {text!r}")
    return list(dict.fromkeys(map(int, words)))


def _seeds(arguments: Arguments) -> range:
    return range(arguments.seed, arguments.seed + arguments.repeats)


def _sized(loads: Sequence[Load], arguments: Arguments, few: int) -> list[Load]:
    """The loads with as many requests as are asked for, or ``few`` for a first look."""
    count = arguments.num_requests or (None if arguments.thorough else few)
    return [dataclasses.replace(load, requests=count or load.requests) for load in loads]


def _rates(runs: Runs) -> list[float]:
    return [f.requests_per_s for f in runs.runs]


def _relative(runs: Runs, to: Runs) -> str:
    """Requests a second as shares of another setting's, seed by seed."""
    from octavo.lab.bench.policies.tables import spread

    return spread([a / b for a, b in zip(_rates(runs), _rates(to), strict=True)], lambda share: f"{share:.3f}")


# --- one memory -----------------------------------------------------------------------------------------------------


def _parts(profile: StepProfile, _: list[int], arguments: Arguments, waiting: Waiting) -> Iterator[_Part]:
    from octavo.lab.simulate.swap_or_recompute import SHARED_LOADS, at_equal_memory

    for load in _sized(SHARED_LOADS, arguments, _FEW_SHARED):
        waiting.phase(f"one memory, {load.name}")
        rows = []
        for row in at_equal_memory(profile, load, _seeds(arguments)):
            rows.append(row)
            waiting.add()
        title = f"{load.name}, {load.requests} requests at once, {load.blocks} blocks in all, {arguments.repeats} runs"
        yield title, rows, _shared_table(rows)


def _shared_table(rows: list[Runs]) -> str:
    """A line for each number of host blocks; rates relative to none of them."""
    from octavo.lab.bench.policies.tables import markdown_table, spread

    cached, uncached = ([r for r in rows if r.prefix_cache is on] for on in (True, False))
    names = ("running", "preemptions_by_recompute", "preemptions_by_swap", "recomputed_tokens", "requests_per_s")
    lines = (
        [
            str(r.host_blocks),
            *(spread([getattr(f, name) for f in r.runs]) for name in names),
            _relative(r, cached[0]),
            _relative(without, uncached[0]),
        ]
        for r, without in zip(cached, uncached, strict=True)
    )
    header = ["host blocks", "running", "by recompute", "by swap", "tokens lost", "requests/s", "to none"]
    return markdown_table([*header, "without prefix cache"], lines)


# --- across a link --------------------------------------------------------------------------------------------------


def _link_parts(profile: StepProfile, copies: list[int], arguments: Arguments, waiting: Waiting) -> Iterator[_Part]:
    from octavo.lab.simulate.swap_or_recompute import CONTEXTS, LINK_LOADS, one_preemption, with_link

    linked = {n: with_link(profile, arguments.link_gb_s, n, arguments.copy_us * 1e-6) for n in copies}
    contexts = [c for c in CONTEXTS if c <= profile.max_model_len]
    ones = {(n, c): one_preemption(of_link, c) for n, of_link in linked.items() for c in contexts}
    title = f"one request alone, out and in over {arguments.link_gb_s:g} GB/s against computed again, ms"
    yield title, [{"copies": n, "figures": one} for (n, _), one in ones.items()], _one_table(ones)
    for load in _sized(LINK_LOADS, arguments, _FEW_LINK):
        waiting.phase(f"across a link, {load.name}")
        rows = _link_rows(load, linked, _seeds(arguments), waiting)
        title = f"{load.name}, {load.requests} requests at once, {arguments.repeats} runs"
        yield title, [{"copies": n, "figures": runs} for row in rows for n, runs in row], _link_table(copies, rows)


def _one_table(ones: Mapping[tuple[int, int], OnePreemption]) -> str:
    """By context and copies of a block."""
    from octavo.lab.bench.policies.tables import markdown_table, number

    sizes = next(iter(ones.values())).swap
    header = ["tokens", "copies of a block", "recompute", *(f"blocks of {size}" for size in sizes)]
    lines = (
        (f"{c}", f"{n}", *(number(1e3 * s) for s in (one.recompute, *one.swap.values())))
        for (n, c), one in ones.items()
    )
    return markdown_table(header, lines)


def _link_rows(
    load: Load, linked: Mapping[int, StepProfile], seeds: Sequence[int], waiting: Waiting
) -> list[list[tuple[int, Runs]]]:
    """By block size: (copies, runs) of recomputing with the prefix cache and without it, then of swap and auto."""
    from octavo.lab.simulate.swap_or_recompute import RUN_SIZES, across_link

    rows = []
    for size in RUN_SIZES:
        [first, *_] = linked.items()
        settings = [(*first, "recompute", on) for on in (True, False)]
        settings += [(n, p, mode, True) for n, p in linked.items() for mode in ("swap", "auto")]
        row = []
        for n, p, mode, on in settings:
            row.append((n, across_link(p, load, size, mode, seeds, prefix_cache=on)))
            waiting.add()
        rows.append(row)
    return rows


def _link_table(copies: Sequence[int], rows: list[list[tuple[int, Runs]]]) -> str:
    """Rates relative to recomputing with the prefix cache."""
    from octavo.lab.bench.policies.tables import markdown_table, spread

    swaps = [f"{mode}, {n} a block" for n in copies for mode in ("swap", "auto")]
    header = ["block size", "preemptions", "recompute, requests/s", "without prefix cache", *swaps]
    lines = []
    for row in rows:
        [recompute, *others] = [runs for _, runs in row]
        preempted = spread([f.preemptions_by_recompute for f in recompute.runs])
        relative = [_relative(runs, recompute) for runs in others]
        lines.append([str(recompute.block_size), preempted, spread(_rates(recompute)), *relative])
    return markdown_table(header, lines)
