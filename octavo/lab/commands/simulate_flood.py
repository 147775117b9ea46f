"""``octavo simulate flood``: a victim's first token beside another user's flood, under several policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.cli.parsing import Arguments, Parser, add_json_flag, check_range, refuse_words, write_json
from octavo.lab.commands.waiting import Waiting

if TYPE_CHECKING:
    from octavo.lab.bench.flood import FloodFigures

EXAMPLE = """\
examples:
  octavo simulate flood
  octavo simulate flood --profile llama-3.1-8b-h100 --max-num-seqs 64 --max-num-batched-tokens 256
  octavo simulate flood --policies fair,my_module:MyPolicy --input-len instruct --output-len instruct

The victim sends a tenth of the capacity, Poisson; the flood is there at the start. ratio: the victim's p99 of the first
token beside the flood over that alone. Jain: Jain's index of what four floods of other lengths have been served while
all of them wait. Equal calls give equal figures.
"""


def make_parser() -> Parser:
    """The command's parser."""
    parser = Parser(
        prog="octavo simulate flood",
        description="Compares policies by what a flood of one user costs another, and by the shares of several floods.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("--policies", default="fcfs,srpt,fair", metavar="P,P", help="names, or module:Class (fcfs,srpt,fair)")
    add("--profile", default="smollm2-135m-2-cores", metavar="NAME|FILE", help="costs of steps (smollm2-135m-2-cores)")
    add("--input-len", default="chat", metavar="LEN", help="length of prompts in tokens (chat)")
    add("--output-len", default="chat", metavar="LEN", help="tokens to generate (chat)")
    add("--flood", type=int, default=1000, metavar="N", help="requests of the flood (1000)")
    add("--victims", type=int, default=200, metavar="N", help="requests of the victim (200)")
    add("--max-num-seqs", type=int, default=8, metavar="N", help="most sequences at once (8)")
    add("--max-num-batched-tokens", type=int, metavar="N", help="most tokens of a step (the default of the engine)")
    add("--repeats", type=int, default=3, metavar="N", help="seeds (3)")
    add("--seed", type=int, default=0, metavar="N", help="the first of them (0)")
    add_json_flag(parser)
    return parser


def run(arguments: Arguments) -> int:
    """Prints a table, or JSON."""
    from octavo.lab.bench.flood import FloodSetting
    from octavo.lab.simulate.step_profile import load_profile
    from octavo.lab.workloads.lengths import parse_inputs, parse_outputs
    from octavo.scheduler.policies import policy_class

    refuse_words(arguments)
    for name in ("flood", "victims", "repeats", "max_num_seqs"):
        check_range(arguments, name, most=1_000_000)
    policies = [word.strip() for word in arguments.policies.split(",")]
    for policy in policies:
        policy_class(policy)
    options = {"max_num_seqs": arguments.max_num_seqs}
    if arguments.max_num_batched_tokens is not None:
        options["max_num_batched_tokens"] = arguments.max_num_batched_tokens
    setting = FloodSetting(
        load_profile(arguments.profile),
        parse_inputs(arguments.input_len),
        parse_outputs(arguments.output_len),
        arguments.flood,
        arguments.victims,
        options,
    )
    figures, total = [], 3 * len(policies) * arguments.repeats
    with Waiting(f"{total} simulations", total) as waiting:
        for seed in range(arguments.seed, arguments.seed + arguments.repeats):
            waiting.phase(f"seed {seed}")
            figures += setting.measure(policies, seed, waiting.add)
    if arguments.json is not None:
        write_json(arguments.json, {**arguments.plain("json"), "figures": figures})
    else:
        print("\n".join(_table(policies, figures)))
    return 0


def _table(policies: Sequence[str], figures: Sequence[FloodFigures]) -> list[str]:
    lines = [
        "the victim's first token in ms, alone and beside the flood; by seed",
        f"{'policy':<10}{'alone p50':>10}{'p99':>9}{'beside p50':>12}{'p99':>11}{'ratio':>9}{'Jain':>8}"
        f"{'flood s':>9}{'preempted':>11}{'out tok/s':>11}",
    ]
    for policy in policies:
        for f in (f for f in figures if f.policy == policy):
            lines.append(
                f"{policy:<10}{f.alone_p50_ttft * 1e3:10.1f}{f.alone_p99_ttft * 1e3:9.1f}{f.p50_ttft * 1e3:12.1f}"
                f"{f.p99_ttft * 1e3:11.1f}{f.ratio:9.2f}{f.jain:8.4f}{f.flood_seconds:9.1f}{f.preemptions:11d}"
                f"{f.output_tokens_per_s:11.0f}"
            )
    return lines
