"""vLLM's parser of flags: underscores for hyphens, a file of options, and mappings written key by key."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes ``--max_model_len 8`` for ``--max-model-len``, ``--config FILE`` of YAML, and ``--option.key value``.

    Flags win over the file. ``--option.key.key value`` makes the JSON object that ``--option`` takes; values are YAML.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As usual, of arguments that are rewritten first."""
        given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._with_mappings(self._with_file(list(map(_hyphenated, given)))), namespace)

    def _with_file(self, args: list[str]) -> list[str]:
        """The options of the file before those of the command line."""
        if "--config" not in args or "--config" in self._option_string_actions:
            return args
        index = args.index("--config")
        if index + 1 == len(args):
            self.error("argument --config: expected a file")
        try:
            content = yaml.safe_load(Path(args[index + 1]).read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError) as e:
            self.error(f"argument --config: {e}")
        return [*_flags(content), *args[:index], *args[index + 2 :]]

    def _with_mappings(self, args: list[str]) -> list[str]:
        """The arguments with ``--option.key value`` as one object for each option."""
        plain: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        words = iter(args)
        for word in words:
            flag, equals, value = word.partition("=")
            if not flag.startswith("--") or "." not in flag:
                plain.append(word)
                continue
            option, *keys = flag.split(".")
            inner = objects.setdefault(option, {})
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = yaml.safe_load(value if equals else next(words, ""))
        return plain + [word for option, content in objects.items() for word in (option, json.dumps(content))]


def _hyphenated(word: str) -> str:
    flag, equals, value = word.partition("=")
    if not flag.startswith("--"):
        return word
    option, dot, keys = flag.partition(".")
    return f"{option.replace('_', '-')}{dot}{keys}{equals}{value}"


def _flags(options: dict[str, Any]) -> Iterator[str]:
    """The options of a file as flags: a value that is true as a flag alone, a list as several words."""
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            yield flag
        elif isinstance(value, list):
            yield from (flag, *map(str, value))
        elif value is not False and value is not None:
            yield from (flag, json.dumps(value) if isinstance(value, dict) else str(value))
