"""``octavo simulate plan``: how many replicas a given traffic needs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.cli.flags import add_engine_flags, read_engine_config, refuse_idle_flags
from octavo.cli.parsing import EXIT_FAILED, Arguments, Parser, add_json_flag, check_range, refuse_words, write_json
from octavo.lab.commands.cluster_flags import OPTIONS, add_cluster_flags, add_profile_flags, make_spec
from octavo.lab.commands.waiting import Waiting, add_thorough_flag
from octavo.lab.workloads.flags import FORMS, add_workload_flags, make_workload

if TYPE_CHECKING:
    from octavo.lab.simulate.cluster.capacity_plan import TrafficPlan, Tried

EXAMPLE = f"""\
examples:
  octavo simulate plan --profile llama-3.1-8b-h100 --request-rate 200 --num-requests 20000 --input-len chat \\
    --output-len chat --ttft-limit 200 --tpot-limit 10
  octavo simulate plan --trace azure.csv --ttft-limit 500 --share 0.95 --router prefix --json plan.json

Each number of replicas that is tried is simulated as 'octavo simulate --replicas N' does it. Where requests arrive at a
rate and --num-requests is left out, they are 1000, or two periods of the arrivals; with --thorough as many as it takes
for longer runs to need no other number. {FORMS}
"""
#: Seeds of a first look, and with --thorough; and about as many numbers of replicas as are tried for each.
_FEW_SEEDS, _SEEDS, _TRIES = 1, 3, 10


def make_parser() -> Parser:
    """The command's parser."""
    parser = Parser(
        prog="octavo simulate plan",
        usage="octavo simulate plan --ttft-limit MS --tpot-limit MS [options]",
        description="Finds the least number of replicas with which requests keep limits of latency.",
        epilog=EXAMPLE,
    )
    add_profile_flags(parser)
    add = parser.add_argument
    add("--share", type=float, default=0.99, metavar="X", help="of requests that must keep the limits (0.99)")
    add("--most", type=int, default=1024, metavar="N", help="replicas to try at most (1024)")
    most = f"seeds, from --seed on; the most that one needs counts ({_FEW_SEEDS})"
    add("--repeats", type=int, metavar="N", help=most)
    add_thorough_flag(parser, f"{_SEEDS} seeds, and as many requests as it takes")
    add_json_flag(parser)
    add_cluster_flags(parser, sized=False)
    add_workload_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: Arguments) -> int:
    """Prints the table and the answer, or JSON; 1 if no number suffices."""
    from octavo.lab.simulate.cluster.capacity_plan import first_requests, plan_traffic

    refuse_words(arguments)
    refuse_idle_flags(arguments, OPTIONS, "octavo simulate, which has a profile in the place of a model")
    check_range(arguments, "repeats", most=1000)
    options = read_engine_config(arguments, "none")
    spec = make_spec(arguments, "1", options.seed)
    load = make_workload(arguments, options.seed)
    has_rate = load.arrivals is not None and load.arrivals.mean_rate < math.inf
    repeats = arguments.repeats or (_SEEDS if arguments.thorough else _FEW_SEEDS)
    may_choose = arguments.num_requests is None and load.trace is None and has_rate
    if may_choose and not arguments.thorough:
        load = replace(load, requests=first_requests(load))
    show = arguments.json is None
    if show:
        print(f"{'replicas':>8} {'good':>8} {'goodput/s':>10} {'per replica':>11} {'ttft p99':>9} {'tpot p99':>9} busy")
    tries = _TRIES * repeats
    or_more = " or more" if may_choose and arguments.thorough else ""
    with Waiting(f"about {tries} simulations of {len(load)} requests{or_more}", tries) as waiting:

        def begun(requests: int, seed: int) -> None:
            waiting.phase(f"{requests} requests, seed {seed}")
            if show:
                waiting.print(f"{requests} requests, seed {seed}")

        def tried(each: Tried) -> None:
            if show:
                waiting.print(_line(each))
            waiting.add()

        plan = plan_traffic(
            spec,
            options,
            load,
            repeats=repeats,
            settle=may_choose and arguments.thorough,
            share=arguments.share,
            most=arguments.most,
            on_plan=begun,
            on_tried=tried,
        )
    if show:
        print(_answer(plan, is_first_look=may_choose and not arguments.thorough))
    else:
        write_json(arguments.json, plan)
    return 0 if plan.replicas is not None else EXIT_FAILED


def _line(t: Tried) -> str:
    return (
        f"{t.replicas:8} {t.good_share:8.2%} {t.goodput:10.3f} {t.goodput_per_replica:11.3f} {t.ttft_p99:9.4f} "
        f"{t.tpot_p99:9.4f} {t.utilisation:5.1%}"
    )


def _answer(traffic_plan: TrafficPlan, *, is_first_look: bool) -> str:
    plan = traffic_plan.plans[-1]
    if traffic_plan.replicas is not None:
        each = ", ".join(str(p.replicas) for p in traffic_plan.plans)
        unsettled = "; longer runs may need more" if traffic_plan.settled is False else ""
        if is_first_look:
            unsettled = "; longer runs may need more, which --thorough tries"
        return (
            f"{traffic_plan.replicas} replicas: at least {plan.share:.4g} of the requests keep the limits\n"
            f"by seed: {each}, of {traffic_plan.requests} requests each{unsettled}"
        )
    assert plan.good_alone is not None
    if plan.good_alone < plan.share:
        return (
            f"no number of replicas is enough: even alone on one, with nothing cached, {plan.good_alone:.2%} of the "
            f"requests keep the limits, and {plan.share:.2%} are wanted"
        )
    return f"{plan.most} replicas are not enough; alone on one, {plan.good_alone:.2%} of the requests keep the limits"
