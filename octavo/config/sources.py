"""Sources of options of engine and server: defaults < configuration file < ``OCTAVO_*`` variables < explicit arguments.

Commands and the Python interface resolve their options only here, so an option means the same everywhere.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from octavo.config.engine_config import EngineConfig, unknown_option
from octavo.config.server_options import ServerOptions
from octavo.core.errors import ConfigError, did_you_mean
from octavo.core.files import read_text
from octavo.core.request import FOREIGN_OPTIONS, own_name, own_names, own_options, own_value

PREFIX = "OCTAVO_"

#: Variables of Octavo that are no options of the engine, and what they do.
RESERVED_VARIABLES = {
    "OCTAVO_CONFIG": "Path of a configuration file, where no other is given.",
    "OCTAVO_CACHE": "Folder that holds downloaded and converted models.",
    "OCTAVO_API_KEYS": "Keys that octavo serve asks for, with commas between.",
    "OCTAVO_DEBUG": "1 shows the traceback of an error.",
    "OCTAVO_LOG_LEVEL": "Level of the messages that commands write, and log_level of a server.",
    "OCTAVO_CPU_ISA": "Instruction sets of the CPU kernels: FLOATS+INTEGERS, as in avx512+avx512_vnni, or one name.",
    "OCTAVO_ALL_ISAS": "Read by scripts/build_cpu.sh: 1 compiles the CPU kernels for all instruction sets, not only "
    "for the best that this processor has.",
    "OCTAVO_TORCH": "Read by scripts/install.py: cuda or cpu.",
}

MAX_FILE_BYTES = 1 << 20

#: Options of both: one file and one environment serve all commands, and each takes what is its own.
OPTIONS = {**ServerOptions.model_fields, **EngineConfig.model_fields}

T = TypeVar("T", bound=BaseModel)


def resolve_config(
    overrides: Mapping[str, Any], *, config_file: Path | None = None, environ: Mapping[str, str] | None = None
) -> EngineConfig:
    """The engine's options from all sources; a later source wins over an earlier one, option by option.

    Args:
        overrides: explicit arguments (keywords, flags) by option name. ``None`` counts: it resets an option.
            Options of ``FOREIGN_OPTIONS`` may be among them, as in each source.
        config_file: YAML file of options; without it, the file that ``OCTAVO_CONFIG`` names, if any.
        environ: environment variables; by default the process's own.

    Raises:
        ConfigError: a source is unreadable, or an option is unknown, of the wrong type, out of range, or contradicts
            another. The message names the source.

    >>> resolve_config({"model": "smollm2-135m"}, environ={"OCTAVO_MAX_NUM_SEQS": "16"}).max_num_seqs
    16
    """
    values, sources = _gather(EngineConfig, overrides, config_file, environ)
    if values.get("model") is None:
        raise ConfigError("no model given: name one as argument, in OCTAVO_MODEL, or as model: in a configuration file")
    return _validate(EngineConfig, values, sources)


def resolve_server_options(
    overrides: Mapping[str, Any], *, config_file: Path | None = None, environ: Mapping[str, str] | None = None
) -> ServerOptions:
    """The server's options from the same sources as the engine's, in the same order.

    Raises:
        ConfigError: as ``resolve_config``.

    >>> resolve_server_options({}, environ={"OCTAVO_PORT": "9000"}).port
    9000
    """
    return _validate(ServerOptions, *_gather(ServerOptions, overrides, config_file, environ))


def _gather(
    kind: type[BaseModel], overrides: Mapping[str, Any], config_file: Path | None, environ: Mapping[str, str] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The options of this kind that the sources give, and for each the source that won."""
    environ = os.environ if environ is None else environ
    config_file = _chosen_file(config_file, environ)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if config_file is not None:
        from_file = _read_file(config_file)
        values.update(from_file)
        sources.update(dict.fromkeys(from_file, str(config_file)))
    from_environment = _read_environment(environ, kind)
    values.update(from_environment)
    sources.update({name: PREFIX + name.upper() for name in from_environment})
    for name, value in own_names(overrides).items():
        if not _is_option(name, kind):
            raise ConfigError(unknown_option(name, list(kind.model_fields)))
        sources[name] = "argument"
        if value is None and not _may_be_none(name):
            values.pop(name, None)
        else:
            values[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    if kind is EngineConfig:
        values = own_options(values, sources)
    return {name: value for name, value in values.items() if name in kind.model_fields}, sources


def _validate(kind: type[T], values: Mapping[str, Any], sources: Mapping[str, str]) -> T:
    try:
        # Strict: a YAML "yes" is no number. Texts of variables were parsed when they were read.
        return kind.model_validate(values, strict=True)
    except ValidationError as e:
        raise ConfigError("; ".join(_describe(dict(error), sources) for error in e.errors())) from None


def configured_model(config_file: Path | None = None, environ: Mapping[str, str] | None = None) -> str | None:
    """The model that ``resolve_config`` finds in a configuration file or ``OCTAVO_MODEL``; None: neither names one.

    Raises:
        ConfigError: as for ``resolve_config``.
    """
    environ = os.environ if environ is None else environ
    file = _chosen_file(config_file, environ)
    model = (({} if file is None else _read_file(file)) | _read_environment(environ, EngineConfig)).get("model")
    return None if model is None else str(model)


def _chosen_file(config_file: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The configuration file that was named, else the one that ``OCTAVO_CONFIG`` names."""
    named = environ.get("OCTAVO_CONFIG")
    return Path(named) if config_file is None and named else config_file


def parse_option(name: str, text: str) -> Any:
    """The value of option ``name`` from the text of a variable or flag; "none" resets an option that may be unset.

    Raises:
        ValueError: the text is no such value, with what would be right.
    """
    name = own_name(name)
    if text.strip().lower() == "none" and _may_be_none(name):  # else "none" is an ordinary text
        return None
    if name in FOREIGN_OPTIONS:
        return _parse_foreign(text)
    try:
        return _adapter(name).validate_python(own_value(name, text))
    except ValidationError as e:
        error = e.errors()[0]
        raise ValueError(f"{error['msg']}, not {text!r}") from None


def _parse_foreign(text: str) -> Any:
    import yaml  # rarely needed

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _is_option(name: str, kind: type[BaseModel] | None = None) -> bool:
    """Whether it is an option of this kind, by default of any."""
    fields = OPTIONS if kind is None else kind.model_fields
    return name in fields or (kind is not ServerOptions and name in FOREIGN_OPTIONS)


def _may_be_none(name: str) -> bool:
    if name in FOREIGN_OPTIONS:
        return True
    try:
        _adapter(name).validate_python(None, strict=True)
    except ValidationError:
        return False
    return True


@functools.cache
def _adapter(name: str) -> TypeAdapter[Any]:
    field = OPTIONS[name]
    annotated: Any = field.annotation
    for constraint in field.metadata:
        annotated = Annotated[annotated, constraint]
    return TypeAdapter(annotated)


def _read_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"configuration file {path} is larger than {MAX_FILE_BYTES} bytes")
    except OSError as e:
        raise ConfigError(f"cannot read configuration file {path}: {e.strerror}") from None
    try:
        content = yaml.safe_load(read_text(path, "configuration file"))
    except yaml.YAMLError as e:
        raise ConfigError(f"configuration file {path} is not valid YAML: {' '.join(str(e).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"configuration file {path} must map option names to values, not hold a {_kind(content)}")
    options: dict[str, Any] = {}
    for key, value in content.items():
        name = own_name(str(key).replace("-", "_"))
        if not _is_option(name):
            raise ConfigError(f"{path}: {unknown_option(name, list(OPTIONS))}")
        if name in options:
            raise ConfigError(f"{path}: option {name!r} is given twice, in two ways to write it")
        options[name] = value
    return options


def _read_environment(environ: Mapping[str, str], kind: type[BaseModel]) -> dict[str, Any]:
    variables = [PREFIX + name.upper() for name in OPTIONS]
    options: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        name = own_name(variable.removeprefix(PREFIX).lower())
        if (not _is_option(name) or variable != variable.upper()) and variable not in RESERVED_VARIABLES:
            known = f"known: {', '.join(sorted(variables))}"
            hint = did_you_mean(variable, [*variables, *RESERVED_VARIABLES], known, cutoff=0.5, written=str)
            raise ConfigError(f"unknown environment variable {variable}; {hint}")
        if text == "" or not _is_option(name, kind):
            continue  # an empty one is how a shell unsets a variable for one command
        try:
            options[name] = parse_option(name, text)
        except ValueError as e:
            raise ConfigError(f"environment variable {variable}: {e}") from None
    return options


def _describe(error: dict[str, Any], sources: Mapping[str, str]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["loc"]:
        name = str(error["loc"][0])
        return f"{name}: {message}, not {error['input']!r} (from {sources.get(name, 'default')})"
    # A contradiction: say for each option that it names where its value came from.
    named = [name for name in OPTIONS if re.search(rf"\b{name}\b", message)]
    origins = ", ".join(f"{name} from {sources.get(name, 'default')}" for name in named)
    return f"{message} ({origins})" if origins else message


def _kind(value: object) -> str:
    return {"str": "text", "list": "list", "int": "number", "float": "number"}.get(
        type(value).__name__, type(value).__name__
    )
