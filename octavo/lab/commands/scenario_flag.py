"""``--scenario`` of commands that run one workload: its traffic in place of the workload's flags."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from octavo.core.errors import ConfigError
from octavo.lab.workloads.flags import given_flags

if TYPE_CHECKING:
    from octavo.lab.bench.policies.scenarios import Scenario


def add_scenario_flag(parser: argparse.ArgumentParser) -> None:
    """Adds ``--scenario``."""
    parser.add_argument(
        "--scenario",
        metavar="NAME|FILE|module:Name",
        help="a scenario of octavo bench policies, or your own, in place of the workload's flags",
    )


def read_scenario(arguments: argparse.Namespace) -> Scenario | None:
    """The scenario that is named; None: none is.

    Raises:
        ConfigError: there is none of this name, there are several, or flags describe another workload.
    """
    if arguments.scenario is None:
        return None
    from octavo.lab.bench.policies import catalogue

    if given := given_flags(arguments):
        raise ConfigError(f"--scenario {arguments.scenario} has its own requests: leave out {given[0]}")
    scenarios = catalogue.find([arguments.scenario])
    if len(scenarios) > 1:
        raise ConfigError(f"--scenario is one of {', '.join(scenario.name for scenario in scenarios)}")
    return scenarios[0]
