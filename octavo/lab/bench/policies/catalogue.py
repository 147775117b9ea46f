"""All scenarios of the lab, and the groups that ``octavo bench policies --scenarios`` knows."""

from __future__ import annotations

from octavo.core.errors import ConfigError
from octavo.lab.bench.policies.classical import CLASSICAL
from octavo.lab.bench.policies.scenarios import Scenario
from octavo.lab.bench.policies.separating import SEPARATING

#: By group, its scenarios by name; names are unique over all groups.
GROUPS: dict[str, dict[str, Scenario]] = {"classic": CLASSICAL, "separating": SEPARATING}


def find(words: list[str]) -> list[Scenario]:
    """The scenarios of these groups and names, each once.

    Raises:
        ConfigError: there is no such group or scenario.
    """
    scenarios = {name: scenario for group in GROUPS.values() for name, scenario in group.items()}
    by_name: dict[str, Scenario] = {}
    for word in words:
        if word not in GROUPS and word not in scenarios:
            raise ConfigError(f"no scenario {word!r}; known: {', '.join((*GROUPS, *scenarios))}")
        by_name |= GROUPS.get(word) or {word: scenarios[word]}
    return list(by_name.values())
