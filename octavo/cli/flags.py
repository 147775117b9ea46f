"""Flags of engine options and sampling parameters, made from ``EngineConfig`` and ``SamplingParams``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from octavo.cli.parsing import Arguments, Parser, refuse_words
from octavo.config.engine_config import EngineConfig
from octavo.config.options import Sizes
from octavo.config.sources import configured_model, parse_option, resolve_config
from octavo.core.errors import AdapterError, ConfigError, InvalidRequestError
from octavo.core.foreign import FOREIGN_OPTIONS, OTHER_NAMES
from octavo.core.request import LoRARequest
from octavo.core.sampling_params import BeamSearchParams, Parameter, SamplingParams, defaults_beside, parameters

PREFIX = "engine"
_HUB_FILE = "hub:file"
#: Options in ``--help``; ``--help all`` shows the others too.
COMMON_OPTIONS = frozenset(
    {
        *("chat_template", "revision", "dtype", "quantization", "max_model_len", "generation_config", "seed"),
        *("kv_cache_dtype", "gpu_memory_utilization", "kv_cache_memory_bytes", "enable_prefix_caching"),
        *("max_num_seqs", "max_num_batched_tokens", "scheduling_policy", "speculative_config"),
        *("tensor_parallel_size", "data_parallel_size", "enable_lora", "device", "num_threads"),
    }
)


def add_engine_flags(parser: Parser, renamed: Mapping[str, str] | None = None) -> None:
    """Adds ``--model``, ``--config`` and a flag for every engine option; unset options are absent from the arguments.

    ``renamed``: option -> flag, if the command uses the plain name for another option. ``OTHER_NAMES`` and
    ``FOREIGN_OPTIONS`` are accepted, but not in the help.
    """
    parser.add_argument("--model", metavar="MODEL", help=EngineConfig.model_fields["model"].description)
    parser.add_argument(
        "--hf-file", metavar="FILE", dest=_HUB_FILE, help="a GGUF file in MODEL, a repository of the hub"
    )
    parser.rare.add(_HUB_FILE)
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file of options; variables (OCTAVO_MAX_NUM_SEQS=8) win over it, flags over both",
    )
    fields = {name: field for name, field in EngineConfig.model_fields.items() if name != "model"}
    add_option_flags(parser, PREFIX, fields, renamed=renamed, common=COMMON_OPTIONS)
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for name, foreign in FOREIGN_OPTIONS.items():
        kind: dict[str, Any] = (
            {"action": argparse.BooleanOptionalAction} if foreign.boolean else {"type": _reader(name)}
        )
        parser.add_argument(_flag(name), dest=f"{PREFIX}:{name}", **hidden, **kind)
    for other, name in OTHER_NAMES.items():
        parser.add_argument(_flag(other), dest=f"{PREFIX}:{name}", type=_reader(name), **hidden)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_lora_flag(parser: Parser) -> None:
    parser.add_argument(
        "--lora", metavar="[NAME=]PATH", help="answer with this LoRA adapter: a folder of PEFT, or a GGUF file"
    )


def read_lora(arguments: Arguments) -> LoRARequest | None:
    """The adapter of ``--lora``, which also sets ``enable_lora``."""
    value: str | None = arguments.lora
    if value is None:
        return None
    name, separator, path = value.partition("=")
    if not separator or "/" in name:
        name, path = Path(value).stem if value.endswith(".gguf") else Path(value).name, value
    vars(arguments).setdefault(f"{PREFIX}:enable_lora", True)
    from octavo.loader.adapters import check_adapter_path

    try:
        check_adapter_path(path)
    except AdapterError as e:
        raise ConfigError(f"--lora: {e}") from None
    return LoRARequest(name, 1, path)


def add_verbose_flag(parser: Parser) -> None:
    parser.add_argument("--verbose", action="store_true", help="log the model, kernels and memory at the start")


def apply_verbosity(arguments: Arguments) -> None:
    """Hides the engine's log lines at its start, unless ``--verbose`` or ``OCTAVO_LOG_LEVEL`` is set."""
    if not arguments.verbose and not os.environ.get("OCTAVO_LOG_LEVEL"):
        logging.getLogger("octavo.startup").setLevel(logging.WARNING)


def add_option_flags(
    parser: Parser,
    prefix: str,
    fields: Mapping[str, FieldInfo],
    *,
    renamed: Mapping[str, str] | None = None,
    common: Collection[str] | None = None,
) -> None:
    """Adds a group of flags, one for each pydantic field; ``Arguments.group(prefix)`` returns those that are set.

    ``common``: fields in ``--help``, by default all; ``--help all`` shows the others too.
    """
    parser.rare |= {f"{prefix}:{name}" for name in fields if common is not None and name not in common}
    group = parser.add_argument_group(f"{prefix} options")
    for name, field in fields.items():
        flag = (renamed or {}).get(name) or _flag(name)
        options: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if field.annotation is not bool:
            options = {"type": _reader(name), "metavar": value_kind(field)}
        if list[str] in typing.get_args(field.annotation):
            options = {"action": "append", "metavar": "FILE"}
        if dict[str, str] in typing.get_args(field.annotation):
            options = {"action": "extend", "nargs": "+", "metavar": "NAME=PATH"}
        text = help_text(field.description or "", field.default)
        group.add_argument(flag, dest=f"{prefix}:{name}", default=argparse.SUPPRESS, help=text, **options)


def take_model(arguments: Arguments, *, more_words: bool = False) -> str | None:
    """The model of the command line: ``--model``, or else the first word, which is removed.

    None if there is neither, or if a variable or file sets the model: then all words are the command's own
    (``more_words``).
    """
    model: str | None = arguments.model
    why = ""
    if model is None:
        configured = configured_model(arguments.config)
        if configured is not None:
            why = f": the model, {configured!r}, is configured in a file or variable; name another as --model"
        elif arguments.words:
            model = arguments.words.pop(0)
            if any(map(str.isspace, model)) and not os.path.exists(model):
                prog = " ".join(arguments.command[:2])
                raise ConfigError(f"{model!r} is no model: a model comes first, as in {prog} smollm2-135m {model!r}")
    if not more_words:
        refuse_words(arguments, why)
    if (file := getattr(arguments, _HUB_FILE)) is None:
        return model
    if model is None:
        raise ConfigError("--hf-file needs a repository of the hub, as in: -hf owner/name --hf-file FILE.gguf")
    return f"{model}/{file}"


def read_engine_config(arguments: Arguments, model: str | None) -> EngineConfig:
    """The engine's options from flags, variables and file."""
    overrides = arguments.group(PREFIX)
    if model is not None:
        overrides["model"] = model
    return resolve_config(overrides, config_file=arguments.config)


def take_engine_config(arguments: Arguments, *, more_words: bool = False) -> EngineConfig:
    """Applies ``--verbose``, takes the model from the command line and reads the engine's options."""
    apply_verbosity(arguments)
    return read_engine_config(arguments, take_model(arguments, more_words=more_words))


def refuse_idle_flags(arguments: Arguments, counting: Collection[str], command: str) -> None:
    """Refuses the model and engine options other than ``counting``, in a command without a model.

    ``command``: the command and the reason, for the message.
    """
    for name in ["model"] * (arguments.model is not None) + list(arguments.group(PREFIX)):
        if name not in counting:
            raise ConfigError(
                f"{_flag(name)} does not count in {command}; the engine's options that do: "
                f"{', '.join(sorted(counting))}"
            )


def help_text(description: str, default: object) -> str:
    """A flag's help with its default; a description explains a default of None itself."""
    text = description if default is None else f"{description} (default: {default})"
    return text.replace("%", "%%")


def value_kind(field: FieldInfo) -> str:
    """Placeholder of a value in help and tables: ``auto|cpu``, ``N``, ``X`` or ``TEXT``."""
    kinds: list[Any] = [field.annotation]
    if typing.get_origin(field.annotation) is not Literal:
        kinds = [kind for kind in typing.get_args(field.annotation) if kind is not type(None)] or kinds
    if typing.get_origin(kinds[0]) is Literal:
        return "|".join(str(kind) for kind in typing.get_args(kinds[0]))
    shown = {int: "N", float: "X", bool: "true|false", ByteSize: "BYTES", Sizes: "N,N,..."}
    return {**shown, dict[str, str]: "NAME=PATH ..."}.get(kinds[0], "TEXT")


def _reader(name: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return parse_option(name, text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from None

    return read


# ---- sampling parameters

SAMPLING_PREFIX = "sampling"
#: Parameters in ``--help``; ``--help all`` shows the others too.
COMMON_PARAMETERS = frozenset(
    {
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "logprobs"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    }
)


def add_sampling_flags(
    parser: Parser, *, defaults: Mapping[str, Any] | None = None, leave_out: Collection[str] = ()
) -> None:
    """Adds a flag for each parameter; unset parameters are absent from the arguments.

    ``defaults``: the command's defaults in place of the fields' own.
    """
    group = parser.add_argument_group(
        "sampling options",
        "A default of the model's own (see --generation-config) comes before the one shown here.",
    )
    declared = {name: each for name, each in parameters(SamplingParams).items() if name not in leave_out}
    parser.rare |= {f"{SAMPLING_PREFIX}:{name}" for name in declared if name not in COMMON_PARAMETERS}
    add_parameters(group, declared, defaults or {})
    constraints = group.add_mutually_exclusive_group()
    for name, constraint, kind, metavar, text in (
        ("--json-schema", "json", _read_text, "FILE", "the answer is JSON of the schema in this file"),
        ("--regex", "regex", str, "REGEX", "the whole answer matches it"),
        ("--choice", "choice", str, "TEXT", "the answer is one of these texts; given several times"),
        ("--grammar", "grammar", _read_text, "FILE", "the answer follows the grammar in this file (Lark or GBNF)"),
    ):
        constraints.add_argument(
            name,
            dest=f"{SAMPLING_PREFIX}:structured_outputs",
            default=argparse.SUPPRESS,
            action=_Constraint,
            const=constraint,
            type=kind,
            metavar=metavar,
            help=text,
        )


class _Constraint(argparse.Action):
    """Stores a value as the field ``const`` of ``structured_outputs``; ``choice`` grows with each use."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        if self.const == "choice":
            values = [*getattr(namespace, self.dest, {}).get("choice", ()), values]
        setattr(namespace, self.dest, {self.const: values})


def _read_text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as e:
        raise argparse.ArgumentTypeError(f"cannot read {name}: {e}") from None


def add_beam_flags(parser: Parser) -> None:
    """Adds the parameters of ``BeamSearchParams`` that ``SamplingParams`` does not have."""
    group = parser.add_argument_group(
        "beam search options",
        "With --beam-width, other sampling options are refused, unless beam search has them too.",
    )
    shared = parameters(SamplingParams)
    add_parameters(group, {name: each for name, each in parameters(BeamSearchParams).items() if name not in shared})


def add_parameters(group: Any, declared: Mapping[str, Parameter], defaults: Mapping[str, Any] | None = None) -> None:
    """Adds a flag for each declared parameter; ``defaults`` are shown in place of the parameters' own."""
    for name, each in declared.items():
        own = None if each.default is msgspec.NODEFAULT else each.default
        default = (defaults or {}).get(name, own)
        if default is None and own is not None:
            default = "none"
        group.add_argument(
            _flag(name),
            dest=f"{SAMPLING_PREFIX}:{name}",
            default=argparse.SUPPRESS,
            help=help_text(each.description, default),
            **_argument_options(each),
        )


def read_sampling_params(arguments: Arguments, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    values = arguments.group(SAMPLING_PREFIX)
    return SamplingParams(**defaults_beside(values, defaults or {}), **values)


def read_value(name: str, text: str) -> Any:
    """Parses a parameter; several texts are a JSON list."""
    declared = parameters(SamplingParams)[name]
    if text.lower() == "none" and declared.optional:
        return None
    try:
        if bool in declared.types:
            return {"true": True, "on": True, "false": False, "off": False}[text.lower()]
        if list[str] in declared.types:
            return json.loads(text) if text.startswith("[") else [text]
        return _argument_options(declared)["type"](text)
    except (ValueError, KeyError, RecursionError, argparse.ArgumentTypeError):
        nouns = {bool: "true or false", int: "an integer", float: "a number", list[int]: "token ids, as in 13,198"}
        noun = next((noun for each, noun in nouns.items() if each in declared.types), "JSON")
        raise InvalidRequestError(f"takes {noun}, not {text!r}: {declared.description}", path=name) from None


def _argument_options(declared: Parameter) -> dict[str, Any]:
    """Keywords of ``add_argument`` for the types of a parameter."""
    types = declared.types
    if types == (bool,):
        return {"action": argparse.BooleanOptionalAction}
    if bool in types:
        return {"type": _early_stopping, "metavar": "true|false|never"}
    if int in types:
        return {"type": _optional_integer if declared.optional else int, "metavar": "N"}
    if float in types:
        return {"type": float, "metavar": "X"}
    if list[int] in types:
        return {"type": _integers, "metavar": "ID,..."}
    if list[str] in types:
        return {"action": "append", "metavar": "TEXT"}
    return {"type": _json_object, "metavar": "JSON"}


def _optional_integer(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


def number(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _early_stopping(text: str) -> bool | str:
    values: dict[str, bool | str] = {"true": True, "false": False}
    return values.get(text.lower(), text.lower())  # BeamSearchParams checks the rest


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text!r}")
    return value


# argparse names the function in its message: "invalid integer value: 'x'".
_optional_integer.__name__ = "integer"
_integers.__name__ = "list of token ids"
_json_object.__name__ = "JSON"
