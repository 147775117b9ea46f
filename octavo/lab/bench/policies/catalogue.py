"""All scenarios of the lab, and the groups that ``octavo bench policies --scenarios`` knows."""

from __future__ import annotations

from octavo.core.errors import ConfigError
from octavo.lab.bench.policies import scenario_files
from octavo.lab.bench.policies.agents import AGENTS
from octavo.lab.bench.policies.classical import CLASSICAL
from octavo.lab.bench.policies.scenarios import Scenario
from octavo.lab.bench.policies.separating import SEPARATING

#: By group, its scenarios by name; names are unique over all groups.
GROUPS: dict[str, dict[str, Scenario]] = {"classic": CLASSICAL, "separating": SEPARATING, "agents": AGENTS}


def find(words: list[str]) -> list[Scenario]:
    """The scenarios of these groups, names, files and ``module:Name``, each once.

    Raises:
        ConfigError: there is no such group or scenario, or two of one name.
    """
    scenarios = {name: scenario for group in GROUPS.values() for name, scenario in group.items()}
    by_name: dict[str, Scenario] = {}
    for word in words:
        if scenario_files.is_own(word):
            for own in scenario_files.load(word):
                if own.name in by_name:
                    raise ConfigError(f"{word}: there is another scenario {own.name!r}; give it another name")
                by_name[own.name] = own
            continue
        if word not in GROUPS and word not in scenarios:
            known = ", ".join((*GROUPS, *scenarios))
            raise ConfigError(f"no scenario {word!r}; known: {known}, a .yaml file or module:Name")
        by_name |= GROUPS.get(word) or {word: scenarios[word]}
    return list(by_name.values())
