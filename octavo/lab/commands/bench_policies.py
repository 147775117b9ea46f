"""``octavo bench policies``: scenarios under every scheduling policy, on an engine, a server and simulated."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.flags import PREFIX, add_engine_flags, take_model
from octavo.cli.parsing import Arguments, Parser, add_json_flag, add_report_flag, check_folder, check_range, json_output
from octavo.core.errors import ConfigError
from octavo.lab.commands.records import add_again_flag
from octavo.lab.commands.waiting import Waiting, add_thorough_flag
from octavo.lab.workloads.flags import FORMS, add_workload_flags, given_flags, make_workload

if TYPE_CHECKING:
    from octavo.lab.bench.policies.lab import Configure, ScenarioRow
    from octavo.lab.bench.policies.places import Place
    from octavo.lab.bench.policies.scenarios import Scenario

PLACES = ("process", "server", "simulated")
DEFAULT_PROFILE = "smollm2-135m-2-cores"
#: The name of the scenario that flags describe.
OWN = "traffic"
#: The scenario of a first look: all policies in well under a minute on two cores.
FIRST_LOOK = "sparse-short"
EXAMPLE = f"""\
examples:
  octavo bench policies smollm2-135m
  octavo bench policies smollm2-135m --thorough
  octavo bench policies smollm2-135m --places process,server,simulated --json lab.json --csv lab.csv
  octavo bench policies --places simulated --scenarios separating
  octavo bench policies --places simulated --policies fcfs,sjf,my_module:MyPolicy
  octavo bench policies smollm2-135m --request-rate 4 --num-requests 200 --input-len chat --output-len uniform:16,256
  octavo bench policies smollm2-135m --trace requests.csv --num-requests 500 --request-rate 2 --policies fcfs,srpt
  octavo bench policies smollm2-135m --scenarios mine.yaml,my_module:EVENING
  octavo bench policies opt-125m-shape --load-format dummy --places process

classic are dense-short, dense-long, sparse-short, sparse-long: 1000 requests at 1000 a second or 100 at 100, lengths
Poisson around 20 or 80 tokens; each request has a random one of three priorities, which static looks at. separating are
few-blocks-recompute and -swap, heavy-tailed-70, -90 and -110, services-90, -90-long and -90-steady, priorities,
greedy-and-modest, deadlines-90 and -110: those of heavy-tailed and services hide lengths from all policies but the
oracles, sjf and srpt-oracle, and the place server does not run them. Priorities and targets are left out where a
policy does not look at them. Every run begins with empty blocks and a policy that has learned nothing; repeat i has
the seed --seed + i, and every second repeat runs the policies backwards. A run by the clock beside which the machine
changed is repeated, and marked with * if that did not help.

The flags of arrivals and requests describe a scenario of your own. A .yaml file has the same words under traffic, and a
load in place of a rate is a share of the capacity: see the module octavo.lab.bench.policies.scenario_files.
{FORMS}
"""


def make_parser() -> Parser:
    """The command's parser."""
    parser = Parser(
        prog="octavo bench policies",
        usage="octavo bench policies [options] [MODEL]",
        description="Compares scheduling policies on scenarios: latencies, rates, preemptions, goodput.",
        epilog=EXAMPLE,
    )
    lab = parser.add_argument_group("lab").add_argument
    lab("--scenarios", metavar="S,S", help=f"groups, names, .yaml files or module:Name ({FIRST_LOOK})")
    lab("--policies", metavar="P,P", help="names, srpt-oracle, or module:Class (all that are installed)")
    lab("--places", default="process", metavar="P,P", help=f"some of {', '.join(PLACES)} (process)")
    lab("--repeats", type=int, metavar="N", help="runs of each, with seeds of their own (2 by the clock, else 1)")
    add_thorough_flag(parser, "the scenarios classic, three runs of each")
    add_again_flag(parser)
    lab("--profile", default=DEFAULT_PROFILE, metavar="NAME|FILE", help=f"of the simulation ({DEFAULT_PROFILE})")
    lab("--mode", choices=("offline", "server"), default="offline", help="which of its overheads count (offline)")
    add_json_flag(parser)
    lab("--csv", type=Path, metavar="PATH", help="write all figures as CSV")
    lab("--plots", type=Path, metavar="FOLDER", help="draw the lab: PNG files (needs the extra octavo[plot])")
    add_report_flag(parser)
    add_workload_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: Arguments) -> int:
    """Runs the lab and prints its tables, or JSON."""
    from octavo.lab.bench.policies import catalogue, tables
    from octavo.lab.bench.policies.lab import Lab
    from octavo.lab.bench.policies.oracles import scheduling_policy
    from octavo.lab.bench.policies.scenarios import Scenario
    from octavo.lab.bench.steady import Guard
    from octavo.lab.plots.style import load_matplotlib
    from octavo.scheduler.policies import POLICIES, policy_class

    model = take_model(arguments)
    given = given_flags(arguments)
    if arguments.scenarios is None and not given:
        arguments.scenarios = "classic" if arguments.thorough else FIRST_LOOK
    scenarios = catalogue.find(_words("scenarios", arguments.scenarios)) if arguments.scenarios is not None else []
    if given:
        make_workload(arguments, 0)  # wrong flags are refused before a model is loaded
        scenarios.append(Scenario(OWN, " ".join(given), {}, lambda capacity, seed: make_workload(arguments, seed)))
    policies = _words("policies", arguments.policies) if arguments.policies else list(POLICIES)
    names = _words("places", arguments.places)
    for policy in policies:
        policy_class(scheduling_policy(policy))
    for name in names:
        if name not in PLACES:
            raise ConfigError(f"no place {name!r}; known: {', '.join(PLACES)}")
    if arguments.repeats is None:
        by_the_clock = any(name != "simulated" for name in names)
        arguments.repeats = 3 if arguments.thorough else 2 if by_the_clock else 1
    check_range(arguments, "repeats")
    check_range(arguments, "again", least=0)
    if "scheduling_policy" in arguments.group(PREFIX):
        raise ConfigError("--scheduling-policy has no meaning here: name the policies in --policies")
    if arguments.report is not None or arguments.plots is not None:
        load_matplotlib()
        check_folder(arguments.report, "--report")
    configure = _configure(arguments, model)
    seed = configure(names[0], {}).seed
    places = [_place(name, arguments, configure) for name in names]
    with ExitStack() as stack:
        for place in places:
            stack.callback(place.close)
        json_to = stack.enter_context(json_output(arguments))
        csv_to = stack.enter_context(_csv_stream(arguments.csv)) if arguments.csv is not None else None
        runs = len(places) * len(scenarios) * len(policies) * arguments.repeats
        what = f"{runs} runs: {', '.join(s.name for s in scenarios)} under {', '.join(policies)}; {', '.join(names)}"
        with Waiting(what, runs, skip=1) as waiting:  # the first run loads the model

            def ended(row: ScenarioRow) -> None:
                if row.place == "simulated":
                    waiting.add()

            def begins(place: str, scenario: str) -> None:
                waiting.phase(f"{place}, {scenario}")

            guard = Guard(again=arguments.again, ended=waiting.add, say=waiting.say)
            rows = Lab(places, configure, seed, guard).run(scenarios, policies, arguments.repeats, ended, begins)
        notes = guard.report()
        about = {place.name: place.about for place in places}
        if arguments.plots is not None or arguments.report is not None:
            _draw(arguments, rows, scenarios, about, notes)
        if json_to is not None:
            settings = {"repeats": arguments.repeats, "seed": seed, "options": arguments.group(PREFIX)}
            settings["scenarios"] = {scenario.name: scenario.about for scenario in scenarios}
            json_to.write(tables.as_json(rows, about, settings).decode() + "\n")
        if csv_to is not None:
            tables.write_csv(rows, csv_to)
        if arguments.json != "-":
            print(tables.markdown(rows, about, notes), end="")
    return 0


def _draw(
    arguments: Arguments,
    rows: list[ScenarioRow],
    scenarios: list[Scenario],
    about: Mapping[str, str],
    notes: list[str],
) -> None:
    from octavo.lab.bench.policies import pictures
    from octavo.lab.commands.simulate_report import write_plots

    drawn = pictures.draw(rows, scenarios)
    if arguments.plots is not None:
        write_plots(drawn, arguments.plots)
    if arguments.report is not None:
        options = {**arguments.plain("json", "csv", "report", "plots"), **arguments.group(PREFIX)}
        report = pictures.make_report(rows, scenarios, about, drawn, arguments.command, options, notes)
        report.write(arguments.report)


def _words(flag: str, text: str) -> list[str]:
    """The names of a list, each once."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise ConfigError(f"--{flag} names nothing: {text!r}")
    return words


def _configure(arguments: Arguments, model: str | None) -> Configure:
    """The engine's options in a place, with those that a scenario and a policy set."""
    from octavo.config.engine_config import EngineConfig
    from octavo.config.sources import resolve_config
    from octavo.lab.commands.cluster_flags import OPTIONS

    flags = arguments.group(PREFIX)

    def configure(place: str, changes: Mapping[str, Any]) -> EngineConfig:
        if place == "simulated":
            counting = {name: value for name, value in flags.items() if name in OPTIONS}
            return resolve_config({**counting, **changes, "model": "none"}, config_file=arguments.config)
        named = {} if model is None else {"model": model}
        return resolve_config({**flags, **changes, **named}, config_file=arguments.config)

    return configure


def _place(name: str, arguments: argparse.Namespace, configure: Configure) -> Place:
    if name == "simulated":
        from octavo.lab.bench.policies.places import Simulated
        from octavo.lab.simulate.step_profile import load_profile

        return Simulated(load_profile(arguments.profile), arguments.mode)
    model = configure(name, {}).model
    if name == "process":
        from octavo.lab.bench.policies.places import InProcess

        return InProcess(model)
    from octavo.lab.bench.policies.server import OwnServer

    return OwnServer(model)


def _csv_stream(path: Path) -> Any:
    try:
        return path.open("w", encoding="utf-8", newline="")
    except OSError as e:
        raise ConfigError(f"cannot write --csv {path}: {e.strerror}") from None
