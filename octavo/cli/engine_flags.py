"""Flags for engine options, made from the fields of ``EngineConfig``."""

from __future__ import annotations

import argparse
import logging
import os
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from octavo.cli.parsing import Arguments, Parser, refuse_words
from octavo.core.adapters import LoRARequest
from octavo.core.config import EngineConfig, Sizes
from octavo.core.config_sources import configured_model, parse_option, resolve_config
from octavo.core.errors import AdapterError, ConfigError
from octavo.core.foreign_options import FOREIGN_OPTIONS, OTHER_NAMES

PREFIX = "engine"
#: Options that help shows; the others are in ``--help all``.
COMMON_OPTIONS = frozenset(
    (
        "chat_template",
        "revision",
        "dtype",
        "quantization",
        "max_model_len",
        "generation_config",
        "seed",
        "kv_cache_dtype",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "enable_prefix_caching",
        "max_num_seqs",
        "max_num_batched_tokens",
        "scheduling_policy",
        "speculative_config",
        "tensor_parallel_size",
        "data_parallel_size",
        "enable_lora",
        "device",
        "num_threads",
    )
)


def add_engine_flags(parser: Parser, renamed: Mapping[str, str] | None = None) -> None:
    """Adds ``--model``, ``--config`` and a flag for every engine option.

    Help leaves out ``OTHER_NAMES`` and ``FOREIGN_OPTIONS``.

    Args:
        parser: the flags are added to it; an option that is not given is absent from the arguments.
        renamed: option -> flag, where the command uses the plain name for another option.
    """
    parser.add_argument("--model", metavar="MODEL", help=EngineConfig.model_fields["model"].description)
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file of options; variables (OCTAVO_MAX_NUM_SEQS=8) win over it, flags over both",
    )
    fields = {name: field for name, field in EngineConfig.model_fields.items() if name != "model"}
    add_option_flags(parser, PREFIX, fields, renamed=renamed, common=COMMON_OPTIONS)
    for name, foreign in FOREIGN_OPTIONS.items():
        kind: dict[str, Any] = (
            {"action": argparse.BooleanOptionalAction} if foreign.boolean else {"type": _reader(name)}
        )
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, dest=f"{PREFIX}:{name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS, **kind)
    for other, name in OTHER_NAMES.items():
        flag = "--" + other.replace("_", "-")
        parser.add_argument(
            flag, dest=f"{PREFIX}:{name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS, type=_reader(name)
        )


def add_lora_flag(parser: Parser) -> None:
    """Adds ``--lora``; see ``read_lora``."""
    parser.add_argument(
        "--lora", metavar="[NAME=]PATH", help="answer with this LoRA adapter: a folder of PEFT, or a GGUF file"
    )


def read_lora(arguments: Arguments) -> LoRARequest | None:
    """The adapter that ``--lora`` names, if it is given; the engine then serves adapters.

    Raises:
        ConfigError: there is no adapter at its path.
    """
    value: str | None = arguments.lora
    if value is None:
        return None
    name, separator, path = value.partition("=")
    if not separator or "/" in name:
        name, path = Path(value).stem if value.endswith(".gguf") else Path(value).name, value
    vars(arguments).setdefault(f"{PREFIX}:enable_lora", True)
    from octavo.loader.adapters.adapter_files import check_adapter_path

    try:
        check_adapter_path(path)
    except AdapterError as e:
        raise ConfigError(f"--lora: {e}") from None
    return LoRARequest(name, 1, path)


def add_verbose_flag(parser: Parser) -> None:
    """Adds ``--verbose``, for commands whose output is an answer; see ``apply_verbosity``."""
    parser.add_argument("--verbose", action="store_true", help="say what model, kernels and memory there are")


def apply_verbosity(arguments: Arguments) -> None:
    """Leaves out what the engine says at its start, unless ``--verbose`` or ``OCTAVO_LOG_LEVEL`` is given."""
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
    """Adds a group of flags, one for each field of a model; ``Arguments.group(prefix)`` returns those that are given.

    Args:
        parser: the flags are added to it.
        prefix: of the names in the arguments, and the title of the group.
        fields: fields of the model, by name.
        renamed: as in ``add_engine_flags``.
        common: fields that help shows, the others are in ``--help all``; default: all of them.
    """
    parser.rare |= {f"{prefix}:{name}" for name in fields if common is not None and name not in common}
    group = parser.add_argument_group(f"{prefix} options")
    for name, field in fields.items():
        flag = (renamed or {}).get(name) or "--" + name.replace("_", "-")
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
    """The model that the command line names: ``--model``, or else the first word, which is removed.

    None if it names none. If the configuration names one, no word does: then all words are the command's, if it takes
    ``more_words``.

    Raises:
        ConfigError: a word is left that the command does not take; or as for ``configured_model``.
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
    return model


def read_engine_config(arguments: Arguments, model: str | None) -> EngineConfig:
    """The engine's options from flags, variables and file.

    Raises:
        ConfigError: see ``resolve_config``.
    """
    overrides = arguments.group(PREFIX)
    if model is not None:
        overrides["model"] = model
    return resolve_config(overrides, config_file=arguments.config)


def take_engine_config(arguments: Arguments, *, more_words: bool = False) -> EngineConfig:
    """The engine's options of a command whose output is an answer, with the model that ``take_model`` finds.

    Raises:
        ConfigError: see ``take_model`` and ``resolve_config``.
    """
    apply_verbosity(arguments)
    return read_engine_config(arguments, take_model(arguments, more_words=more_words))


def refuse_idle_flags(arguments: Arguments, counting: Collection[str], command: str) -> None:
    """Refuses the model and options of the engine that do not count in a command without a model.

    ``command``: the command and why they do not, for the message.

    Raises:
        ConfigError: one is given.
    """
    given = ["model"] if arguments.model is not None else []
    for name in given + list(arguments.group(PREFIX)):
        if name not in counting:
            raise ConfigError(
                f"--{name.replace('_', '-')} does not count in {command}; the engine's options that do: "
                f"{', '.join(sorted(counting))}"
            )


def help_text(description: str, default: object) -> str:
    """A flag's help; descriptions state the meaning of a default of None themselves."""
    text = description if default is None else f"{description} (default: {default})"
    return text.replace("%", "%%")


def value_kind(field: FieldInfo) -> str:
    """Placeholder of a value in help and tables: ``auto|cpu``, ``N``, ``X`` or ``TEXT``."""
    kinds: list[Any] = [field.annotation]
    if typing.get_origin(field.annotation) is not Literal:  # a plain type, or one that may be None
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
