"""The words that describe a workload: flags of commands, and names in a file; and the workload of them."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from octavo.core.errors import ConfigError
from octavo.lab.workloads.arrivals import Arrivals, parse_arrivals
from octavo.lab.workloads.lengths import parse_inputs, parse_outputs, parse_turns
from octavo.lab.workloads.sharing import Conversations, parse_class, parse_system_prompts, parse_users
from octavo.lab.workloads.traces import read_trace
from octavo.lab.workloads.workload import Workload

#: For the end of a command's help.
FORMS = """\
Lengths are N, uniform:LOW,HIGH, poisson:MEAN, geometric:MEAN or lognormal:MEDIAN,SIGMA[,MOST] tokens; chat and instruct
are fits of published ones (ShareGPT, Alpaca). Arrivals are poisson, gamma, fixed or ticks with --request-rate, or
poisson:RATE, gamma:RATE,BURSTINESS, fixed:RATE, at-once, ticks:RATE[,SECONDS], day:LOW,HIGH[,PERIOD],
steps:SECONDS,RATE,RATE,...; a trace is CSV with the columns arrival_time,input_tokens,output_tokens (or those of the
Azure LLM inference traces), or JSONL. With a rate a trace gives the requests but not their times."""

#: Requests of a workload, unless a command has another number.
DEFAULT_REQUESTS = 100
#: Flags whose value counts without being given.
_DEFAULTS: dict[str, Any] = {
    "input_len": "128",
    "output_len": "128",
    "shared_prefix_len": 0,
    "think_time": Conversations.think,
    "max_context": Conversations.max_context,
    "cache_ttl": 0.0,
    "request_class": [],
}


def add_workload_flags(parser: argparse.ArgumentParser, requests: int | None = DEFAULT_REQUESTS) -> None:
    """Adds the flags that ``make_workload`` reads; ``requests``: the default of their number, for the help.

    ``--seed`` is not among them: commands with the engine's options have it already, others call ``add_seed_flag``.
    """
    times = parser.add_argument_group("arrivals (all at once, or the times of the trace)")
    add = times.add_argument
    add("--request-rate", "--rate", type=float, metavar="R", help="R requests a second; inf: all at once")
    add("--arrivals", metavar="ARRIVALS", help="poisson, gamma, fixed, ticks, or with their rate (poisson)")
    add("--burstiness", type=float, metavar="B", help="shape of gamma gaps: 1 is Poisson, less is bursty (1)")
    add = parser.add_argument_group("requests").add_argument
    add("--num-requests", "--requests", type=int, metavar="N", help=f"how many ({requests}, or the whole trace)")
    add("--trace", type=Path, metavar="PATH", help="CSV or JSONL file of requests and times")
    add("--input-len", metavar="LEN", help="length of prompts in tokens (128)")
    add("--output-len", metavar="LEN", help="tokens to generate (128)")
    add("--shared-prefix-len", type=int, metavar="N", help="tokens that all prompts share (0)")
    add("--system-prompts", metavar="COUNT,LEN[,S]", help="texts before prompts, popular by Zipf's law of exponent S")
    add("--turns", metavar="LEN", help="requests are turns of conversations, each of so many")
    add(
        "--think-time",
        type=float,
        metavar="S",
        help=f"mean seconds from turn to turn, answer included ({_DEFAULTS['think_time']:g})",
    )
    add(
        "--max-context",
        type=int,
        metavar="N",
        help=f"a conversation ends before it has more tokens ({_DEFAULTS['max_context']})",
    )
    add("--cache-ttl", type=float, metavar="S", help="clients ask to keep each prompt's prefix for S seconds (0: not)")
    add("--users", metavar="USERS", help="COUNT, zipf:COUNT,EXPONENT or NAME=SHARE[:WEIGHT],...")
    add(
        "--request-class",
        action="append",
        metavar="CLASS",
        help="SHARE[,ttft:MS][,tpot:MS][,priority:N] of requests; may be repeated",
    )


class _Words(argparse.ArgumentParser):
    """Reads the flags' words from a file."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _words_parser() -> _Words:
    parser = _Words(allow_abbrev=False, add_help=False)
    add_workload_flags(parser)
    return parser


def given_flags(arguments: argparse.Namespace) -> list[str]:
    """The flags of ``add_workload_flags`` that are given, with their values; none after ``make_workload``."""
    given = []
    for action in _words_parser()._actions:
        value = getattr(arguments, action.dest)
        for each in value if isinstance(value, list) else () if value is None else (value,):
            given.append(f"{action.option_strings[0]} {each}")
    return given


def workload_of_words(words: Mapping[str, Any], seed: int, folder: Path, name: str = "") -> Workload:
    """The workload that the flags' names (with hyphens or underscores) and values describe.

    Args:
        words: As in a YAML file; a list stands for a flag that is repeated.
        seed: Of all that is random.
        folder: The one that the path of a trace is relative to.
        name: Tells workloads apart that run together, see ``merge``.

    Raises:
        ConfigError: a name is unknown, or a value is wrong.
    """
    parser = _words_parser()
    flags = [flag for action in parser._actions for flag in action.option_strings]
    argv = []
    for word, value in words.items():
        flag = "--" + str(word).replace("_", "-")
        if flag not in flags:
            near = difflib.get_close_matches(flag, flags, n=1)
            raise ConfigError(f"unknown name {word!r}" + (f"; did you mean {near[0][2:]!r}?" if near else ""))
        argv += [f"{flag}={each}" for each in (value if isinstance(value, list) else [value])]
    arguments = parser.parse_args(argv)
    if arguments.trace is not None:
        arguments.trace = folder / arguments.trace
    return dataclasses.replace(make_workload(arguments, seed), name=name)


def make_workload(arguments: argparse.Namespace, seed: int, requests: int = DEFAULT_REQUESTS) -> Workload:
    """The workload that the flags describe, of so many ``requests`` unless a flag says how many; reads the trace.

    Flags that are not given get their defaults.

    Raises:
        ConfigError: a flag's value is wrong, or the trace is.
    """
    for name, default in _DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    for name in ("num_requests", "shared_prefix_len"):
        value, least = getattr(arguments, name), 1 if name == "num_requests" else 0
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    for name in ("request_rate", "burstiness"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")
    trace = read_trace(arguments.trace, arguments.num_requests) if arguments.trace is not None else None
    conversations = None
    if arguments.turns is not None:
        turns = parse_turns(arguments.turns)
        conversations = Conversations(turns, arguments.think_time, arguments.max_context)
    return Workload(
        requests=arguments.num_requests or (len(trace) if trace is not None else requests),
        arrivals=_arrivals(arguments),
        inputs=parse_inputs(arguments.input_len),
        outputs=parse_outputs(arguments.output_len),
        shared_prefix_len=arguments.shared_prefix_len,
        system_prompts=parse_system_prompts(arguments.system_prompts) if arguments.system_prompts else None,
        conversations=conversations,
        users=parse_users(arguments.users) if arguments.users else (),
        cache_ttl=arguments.cache_ttl,
        classes=tuple(parse_class(text) for text in arguments.request_class),
        trace=trace,
        seed=seed,
    )


def add_seed_flag(parser: argparse.ArgumentParser) -> None:
    """Adds ``--seed``."""
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is random in requests (0)")


def _arrivals(arguments: argparse.Namespace) -> Arrivals | None:
    if arguments.arrivals is None and arguments.request_rate is None:
        if arguments.burstiness is not None:
            raise ConfigError("--burstiness needs --request-rate")
        return None
    return parse_arrivals(arguments.arrivals or "poisson", arguments.request_rate, arguments.burstiness)
