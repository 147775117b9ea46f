"""vLLM's ``EngineArgs``: the engine's options as a dataclass, and as flags of a program's own parser."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from octavo.compat.vllm.config_parts import VllmConfig
from octavo.config.engine_config import EngineConfig, unknown_option
from octavo.config.sources import parse_option, resolve_config
from octavo.core.errors import ConfigError, UnexpectedKeywordError
from octavo.core.foreign import FOREIGN_OPTIONS, OTHER_NAMES

#: vLLM's short flags.
_SHORT = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp"}


def _defaults() -> dict[str, Any]:
    """The default of every option of Octavo and of vLLM."""
    own = {
        name: None if field.is_required() else field.get_default(call_default_factory=True)
        for name, field in EngineConfig.model_fields.items()
    }
    others = {name: option.default for name, option in FOREIGN_OPTIONS.items()}
    return {**own, **others, **dict.fromkeys(OTHER_NAMES), "profiler_config": None}


DEFAULTS = _defaults()


def non_default_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that differ from the defaults; a file or variable may set the others."""
    return {name: value for name, value in options.items() if name not in DEFAULTS or value != DEFAULTS[name]}


class _EngineArgs:
    """Methods of ``EngineArgs``, whose fields are the options of ``LLM``."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        if model is not None:
            options["model"] = model
        for name in options:
            if name not in DEFAULTS:
                raise UnexpectedKeywordError(f"{type(self).__name__}: {unknown_option(name, list(DEFAULTS))}")
        for name, default in DEFAULTS.items():
            setattr(self, name, options[name] if name in options else copy.copy(default))

    def non_default(self) -> dict[str, Any]:
        """The options that differ from the defaults."""
        return non_default_options({name: getattr(self, name) for name in DEFAULTS})

    def create_engine_config(self, *_: object, **__: object) -> VllmConfig:
        """The engine's options with those of files and variables, as views by vLLM's names."""
        options = {name: value for name, value in self.non_default().items() if name != "profiler_config"}
        return VllmConfig(resolve_config(options))

    def create_engine_configs(self) -> Any:
        """Of versions before 0.5, whose results differ; raises ConfigError."""
        raise ConfigError("write create_engine_config(): its model_config, cache_config, ... are the former results")

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds a flag for each option, with its default."""
        for name, default in DEFAULTS.items():
            flags = [f"--{name.replace('_', '-')}", *([_SHORT[name]] if name in _SHORT else [])]
            if not {*flags} & parser._option_string_actions.keys():
                parser.add_argument(*flags, dest=name, default=default, help=_help(name), **_kind(name))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The options among parsed arguments."""
        return cls(**{name: getattr(args, name) for name in DEFAULTS if hasattr(args, name)})


def _kind(name: str) -> dict[str, Any]:
    field, foreign = EngineConfig.model_fields.get(name), FOREIGN_OPTIONS.get(name)
    if (field is not None and field.annotation is bool) or (foreign is not None and foreign.boolean):
        return {"action": argparse.BooleanOptionalAction}
    if field is not None and list[str] in typing.get_args(field.annotation):
        return {"action": "append"}
    return {"type": functools.partial(_read, name), "metavar": "VALUE"}


def _help(name: str) -> str:
    field = EngineConfig.model_fields.get(name)
    return argparse.SUPPRESS if field is None else (field.description or "").replace("%", "%%")


def _read(name: str, text: str) -> Any:
    if not text or name == "model" or name not in {*EngineConfig.model_fields, *FOREIGN_OPTIONS, *OTHER_NAMES}:
        return text
    try:
        return parse_option(name, text)
    except (ValueError, ConfigError) as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _make(name: str) -> type[Any]:
    defaults = {option: functools.partial(copy.copy, default) for option, default in DEFAULTS.items()}
    fields = [(option, Any, dataclasses.field(default_factory=make)) for option, make in defaults.items()]
    made = dataclasses.make_dataclass(name, fields, bases=(_EngineArgs,), init=False)
    made.__module__, made.__doc__ = __name__, "Options of an engine, as keywords or from ``add_cli_args`` of a parser."
    return made


EngineArgs = _make("EngineArgs")
AsyncEngineArgs = _make("AsyncEngineArgs")


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes ``--max_model_len 8`` for ``--max-model-len``, ``--config FILE`` of YAML, and ``--option.key value``.

    Flags win over the file. ``--option.key.key value`` makes the JSON object that ``--option`` takes; values are YAML.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Rewrites the arguments, then parses them."""
        words = [_hyphenated(word) for word in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(self._with_mappings(self._with_file(words)), namespace)

    def _with_file(self, args: list[str]) -> list[str]:
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
        """Turns ``--option.key value`` into one JSON object for each option."""
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
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            yield flag
        elif isinstance(value, list):
            yield from (flag, *map(str, value))
        elif value is not False and value is not None:
            yield from (flag, json.dumps(value) if isinstance(value, dict) else str(value))
