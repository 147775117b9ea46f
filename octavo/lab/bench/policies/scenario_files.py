"""Scenarios of one's own: YAML files, and ``module:Name``.

A file has one scenario, or a list of them:

    name: lunch
    about: chats at 90 % of capacity, and reports beside them
    options: {max_num_seqs: 8}
    traffic:
      - {name: chats, load: 0.9, num-requests: 200, input-len: chat, output-len: chat}
      - {name: reports, request-rate: 0.1, num-requests: 10, input-len: 500, output-len: "uniform:100,900"}

The words of ``traffic`` are the flags of ``octavo simulate`` and ``octavo bench serve``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.files import read_bounded
from octavo.core.plugins import load_attribute
from octavo.lab.bench.policies.scenarios import Scenario
from octavo.lab.workloads.flags import workload_of_words
from octavo.lab.workloads.work_items import WorkItem
from octavo.lab.workloads.workload import Workload, merge

_MOST_BYTES = 1 << 20
_NAMES = ("name", "about", "options", "max_tokens", "traffic")


def is_own(word: str) -> bool:
    """Whether the word names a file or an object, and not a scenario of the catalogue."""
    return ":" in word or Path(word).suffix in (".yaml", ".yml")


def load(word: str) -> list[Scenario]:
    """The scenarios of a YAML file, or of ``module:Name``: a ``Scenario``, a mapping as in a file, or a list of them.

    Raises:
        ConfigError: it cannot be read, or is no scenario; the message names the place.
    """
    path = Path(word)
    if path.suffix in (".yaml", ".yml"):
        import yaml  # rarely needed

        try:
            content = yaml.safe_load(read_bounded(path, _MOST_BYTES))
        except yaml.YAMLError as e:
            raise ConfigError(f"{path} is not YAML: {e}") from None
    else:
        content, path = load_attribute(word, "scenario"), Path()
    entries = content if isinstance(content, list | tuple) else [content]
    if not entries:
        raise ConfigError(f"{word} has no scenario")
    name = Path(word).stem if path.name else word.rpartition(":")[2]
    found = []
    for number, entry in enumerate(entries):
        if isinstance(entry, Scenario):
            found.append(entry)
            continue
        where = word if len(entries) == 1 else f"{word}[{number}]"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where}: a scenario has the names {', '.join(_NAMES)}, not {entry!r}")
        found.append(_scenario(entry, where, name if len(entries) == 1 else f"{name}-{number}", path.parent))
    return found


def _scenario(entry: Mapping[str, Any], where: str, name: str, folder: Path) -> Scenario:
    if unknown := [key for key in entry if key not in _NAMES]:
        raise ConfigError(f"{where}: unknown name {unknown[0]!r}; known: {', '.join(_NAMES)}")
    options, traffic, limit = entry.get("options") or {}, entry.get("traffic"), entry.get("max_tokens")
    if not isinstance(options, Mapping) or (bad := [key for key in options if key not in EngineConfig.model_fields]):
        raise ConfigError(f"{where}.options: engine options by name, not {bad[0] if options else options!r}")
    if limit is not None and not (isinstance(limit, int) and limit > 0):
        raise ConfigError(f"{where}.max_tokens must be an integer from 1, not {limit!r}")
    streams = [traffic] if isinstance(traffic, Mapping) else traffic
    if not isinstance(streams, Sequence) or not streams or not all(isinstance(each, Mapping) for each in streams):
        raise ConfigError(f"{where}.traffic must be one or more mappings such as {{request-rate: 4}}, not {traffic!r}")
    parts = [_Stream(each, f"{where}.traffic[{i}]", i, folder) for i, each in enumerate(streams)]
    loaded = next((part for part in parts if part.load is not None), None)
    about = entry.get("about") or "; ".join(", ".join(f"{k} {v}" for k, v in each.items()) for each in streams)
    return Scenario(
        str(entry.get("name", name)),
        str(about),
        dict(options),
        functools.partial(_make, parts),
        None if loaded is None else loaded.example.inputs,
        None if loaded is None else loaded.example.outputs,
        load=sum(part.load or 0.0 for part in parts) or None,
        max_tokens=limit,
    )


class _Stream:
    """One workload of a scenario."""

    def __init__(self, entry: Mapping[str, Any], where: str, number: int, folder: Path) -> None:
        self._words = {key: value for key, value in entry.items() if key not in ("name", "load")}
        self._where, self._folder = where, folder
        self._name = str(entry.get("name", number or ""))
        self.load: float | None = entry.get("load")
        if self.load is not None:
            if not isinstance(self.load, int | float) or not self.load > 0:
                raise ConfigError(f"{where}.load is a share of the capacity above 0, such as 0.9, not {self.load!r}")
            if clash := {str(key).replace("_", "-") for key in self._words} & {"request-rate", "rate", "trace"}:
                raise ConfigError(f"{where}: load says how many requests come; leave out {min(clash)}")
        self.example = self.make(1.0, 0)

    def make(self, capacity: float, seed: int) -> Workload:
        """``capacity`` in requests a second."""
        words = self._words if self.load is None else {**self._words, "request-rate": self.load * capacity}
        try:
            return workload_of_words(words, seed, self._folder, self._name)
        except ConfigError as e:
            raise ConfigError(f"{self._where}: {e}") from None


def _make(parts: Sequence[_Stream], capacity: float, seed: int) -> Iterable[WorkItem]:
    return merge(*(part.make(capacity, seed) for part in parts))
