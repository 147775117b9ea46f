"""``octavo simulate delay``: what ``scheduler_delay_factor`` trades, as a table and a curve."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.parsing import Arguments, Parser, add_json_flag, check_positive, check_range, refuse_words, write_json
from octavo.lab.commands.waiting import FIRST_LOOK, Waiting, add_thorough_flag

if TYPE_CHECKING:
    from octavo.lab.simulate.delay_factor import DelayPoint

EXAMPLE = """\
examples:
  octavo simulate delay
  octavo simulate delay --thorough --plots plots
  octavo simulate delay --profile smollm2-135m-2-cores --tpot-limit 30 --factors 0,1,2

For each factor, the highest rate of Poisson arrivals at which the mean time per output token keeps the limit, and the
time to the first token there. Equal calls give equal figures.
"""
_FEW_REQUESTS, _REQUESTS = 600, 3000


def make_parser() -> Parser:
    """The command's parser."""
    parser = Parser(
        prog="octavo simulate delay",
        description="Finds the requests a second that each scheduler_delay_factor serves under a limit of TPOT, and "
        "what the first token costs.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("--factors", type=_factors, metavar="X,X", help="values of scheduler_delay_factor (0,0.5,1,2,4)")
    add("--profile", default="llama-3.1-8b-h100", metavar="NAME|FILE", help="costs of steps (llama-3.1-8b-h100)")
    add("--input-len", default="chat", metavar="LEN", help="length of prompts in tokens (chat)")
    add("--output-len", default="chat", metavar="LEN", help="tokens to generate (chat)")
    add("--tpot-limit", type=float, default=9.0, metavar="MS", help="most milliseconds a token, mean of requests (9)")
    add("--num-requests", type=int, metavar="N", help=f"requests of each run ({_FEW_REQUESTS})")
    add_thorough_flag(parser, f"{_REQUESTS} requests")
    add("--seed", type=int, default=0, metavar="N", help="of lengths and arrivals (0)")
    add_json_flag(parser)
    add("--plots", type=Path, metavar="FOLDER", help="draw the trade: a PNG file (needs octavo[plot])")
    return parser


def run(arguments: Arguments) -> int:
    """Prints a table, or JSON."""
    from octavo.lab.commands.simulate_report import write_plots
    from octavo.lab.plots.style import load_matplotlib
    from octavo.lab.simulate.delay_factor import FACTORS, RUNS, DelaySetting, find_point
    from octavo.lab.simulate.step_profile import load_profile
    from octavo.lab.workloads.lengths import parse_inputs, parse_outputs

    refuse_words(arguments)
    check_range(arguments, "num_requests", most=1_000_000)
    check_positive(arguments, "tpot_limit")
    if arguments.plots is not None:
        load_matplotlib()
    lengths = parse_inputs(arguments.input_len), parse_outputs(arguments.output_len)
    requests = arguments.num_requests or (_REQUESTS if arguments.thorough else _FEW_REQUESTS)
    setting = DelaySetting(
        load_profile(arguments.profile), *lengths, requests, arguments.tpot_limit / 1000, arguments.seed
    )
    factors, points = arguments.factors or FACTORS, []
    total = RUNS * len(factors)
    with Waiting(f"{total} simulations{'' if arguments.thorough else FIRST_LOOK}", total) as waiting:
        for factor in factors:
            waiting.phase(f"factor {factor:g}")
            points.append(find_point(setting, factor, waiting.add))
    if arguments.plots is not None:
        write_plots({"delay": (draw(points), "")}, arguments.plots)
    if arguments.json is not None:
        write_json(arguments.json, {**arguments.plain("json"), "requests": requests, "points": points})
    else:
        print("\n".join(_table(arguments.tpot_limit, points)))
    return 0


def draw(points: Sequence[DelayPoint]) -> Any:
    """A figure of matplotlib: output tokens a second against the mean time to the first token, a point each factor."""
    from octavo.lab.plots.style import load_matplotlib, styled

    with styled():
        figure = load_matplotlib()(figsize=(7, 4))
        axes = figure.subplots()
        axes.plot([p.mean_ttft * 1e3 for p in points], [p.output_tokens_per_s for p in points], marker="o")
        for point in points:
            where = point.mean_ttft * 1e3, point.output_tokens_per_s
            axes.annotate(f"{point.factor:g}", where, xytext=(6, -12), textcoords="offset points")
        axes.set_xlabel("mean time to the first token (ms)")
        axes.set_ylabel("output tokens/s under the TPOT limit")
        return figure


def _table(limit: float, points: Sequence[DelayPoint]) -> list[str]:
    lines = [
        f"highest rate with a mean TPOT of at most {limit:g} ms, batching prefill_first",
        f"{'factor':>6}{'req/s':>9}{'out tok/s':>11}{'TTFT ms':>10}{'p99':>9}"
        f"{'TPOT ms':>10}{'ITL p99':>10}{'running':>10}",
    ]
    for p in points:
        times = f"{p.mean_ttft * 1e3:10.1f}{p.p99_ttft * 1e3:9.1f}{p.mean_tpot * 1e3:10.2f}{p.p99_itl * 1e3:10.1f}"
        lines.append(f"{p.factor:6g}{p.rate:9.2f}{p.output_tokens_per_s:11.0f}{times}{p.mean_running:10.1f}")
    return lines


def _factors(text: str) -> list[float]:
    try:
        factors = [float(word) for word in text.split(",")]
    except ValueError:
        factors = [-1.0]
    if not all(0 <= factor < 1e6 for factor in factors):
        raise argparse.ArgumentTypeError(f"factors are numbers from 0 with commas between, not {text!r}")
    return factors
