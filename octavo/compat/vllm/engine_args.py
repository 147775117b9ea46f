"""vLLM's ``EngineArgs``: the engine's options as a dataclass, and as flags of a program's own parser."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any, Self

from octavo.core.config import EngineConfig
from octavo.core.config_sources import parse_option, resolve_config
from octavo.core.errors import ConfigError
from octavo.core.foreign_options import FOREIGN_OPTIONS, OTHER_NAMES

#: Flags of one letter or two that vLLM has.
_SHORT = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp"}


def _defaults() -> dict[str, Any]:
    """The default of every option: Octavo's own, and for those of vLLM alone what is done anyway."""
    own = {
        name: None if field.is_required() else field.get_default(call_default_factory=True)
        for name, field in EngineConfig.model_fields.items()
    }
    others = {name: next(iter(option.accepted), None) for name, option in FOREIGN_OPTIONS.items()}
    return {**own, **others, **dict.fromkeys(OTHER_NAMES), "profiler_config": None}


DEFAULTS = _defaults()


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without those that are as they are by default: a file or a variable may set these."""
    return {name: value for name, value in options.items() if name not in DEFAULTS or value != DEFAULTS[name]}


class _EngineArgs:
    """Methods of ``EngineArgs``, whose fields are the options of ``LLM``."""

    def given(self) -> dict[str, Any]:
        """The options that are not as they are by default."""
        return given_options({name: getattr(self, name) for name in DEFAULTS})

    def create_engine_config(self, *_: object, **__: object) -> EngineConfig:
        """The engine's options, with those of files and variables.

        Raises:
            ConfigError: an option is wrong, or there is no model.
        """
        return resolve_config({name: value for name, value in self.given().items() if name != "profiler_config"})

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds a flag for each option; what is parsed has the default of each that is not given."""
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
    if field is None:
        boolean = foreign is not None and foreign.boolean
        return {"action": argparse.BooleanOptionalAction} if boolean else {"type": _reader(name), "metavar": "VALUE"}
    if field.annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    if list[str] in typing.get_args(field.annotation):
        return {"action": "append"}
    return {"type": _reader(name), "metavar": "VALUE"}


def _help(name: str) -> str:
    field = EngineConfig.model_fields.get(name)
    return argparse.SUPPRESS if field is None else (field.description or "").replace("%", "%%")


def _reader(name: str) -> Callable[[str], Any]:
    return functools.partial(_read, name)


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
    made = dataclasses.make_dataclass(name, fields, bases=(_EngineArgs,))
    made.__module__, made.__doc__ = __name__, "Options of an engine, as keywords or from ``add_cli_args`` of a parser."
    return made


EngineArgs = _make("EngineArgs")
AsyncEngineArgs = _make("AsyncEngineArgs")
