"""Resolves options of engine and server: defaults < configuration file < ``OCTAVO_*`` variables < arguments.

Commands and the Python interface resolve options only here, so that an option means the same everywhere.
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
from octavo.core.foreign import FOREIGN_OPTIONS, own_name, own_names, own_options, own_value

PREFIX = "OCTAVO_"

#: Variables that are not options.
RESERVED_VARIABLES = {
    "OCTAVO_CONFIG": "Default path of the configuration file.",
    "OCTAVO_CACHE": "Folder of downloaded and converted models.",
    "OCTAVO_API_KEYS": "API keys of octavo serve, separated by commas.",
    "OCTAVO_KV_STORE_PASSWORD": "Password of kv_store, if neither its URL nor a password_file has it.",
    "OCTAVO_DEBUG": "1 shows tracebacks of errors.",
    "OCTAVO_LOG_LEVEL": "Log level of commands, and option log_level of a server.",
    "OCTAVO_CPU_ISA": "Instruction sets of the CPU kernels: FLOATS+INTEGERS, as in avx512+avx512_vnni, or one name.",
    "OCTAVO_ALL_ISAS": "Read by scripts/build_cpu.sh: 1 compiles the CPU kernels for all instruction sets, not only "
    "this processor's best.",
    "OCTAVO_TORCH": "Read by scripts/install.py: cuda or cpu.",
}

MAX_FILE_BYTES = 1 << 20

#: Options of both: each command takes its own from a shared file and environment.
OPTIONS = {**ServerOptions.model_fields, **EngineConfig.model_fields}

T = TypeVar("T", bound=BaseModel)


def resolve_config(
    overrides: Mapping[str, Any], *, config_file: Path | None = None, environ: Mapping[str, str] | None = None
) -> EngineConfig:
    """The engine's options from all sources.

    ``overrides``: explicit arguments by option name; None resets an option. ``config_file``: YAML; default:
    ``OCTAVO_CONFIG``. ``environ``: default: the process's own. Raises ConfigError, which names the source.

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
    """The server's options; see ``resolve_config``.

    >>> resolve_server_options({}, environ={"OCTAVO_PORT": "9000"}).port
    9000
    """
    return _validate(ServerOptions, *_gather(ServerOptions, overrides, config_file, environ))


def _gather(
    kind: type[BaseModel], overrides: Mapping[str, Any], config_file: Path | None, environ: Mapping[str, str] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The options of this kind, and the source of each."""
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
        # Strict: a YAML "yes" is no number. Variables were parsed when they were read.
        return kind.model_validate(values, strict=True)
    except ValidationError as e:
        raise ConfigError("; ".join(_describe(dict(error), sources) for error in e.errors())) from None


def configured_model(config_file: Path | None = None, environ: Mapping[str, str] | None = None) -> str | None:
    """The model in the configuration file or ``OCTAVO_MODEL``, or None; raises as ``resolve_config``."""
    environ = os.environ if environ is None else environ
    file = _chosen_file(config_file, environ)
    model = (({} if file is None else _read_file(file)) | _read_environment(environ, EngineConfig)).get("model")
    return None if model is None else str(model)


def _chosen_file(config_file: Path | None, environ: Mapping[str, str]) -> Path | None:
    named = environ.get("OCTAVO_CONFIG")
    return Path(named) if config_file is None and named else config_file


def parse_option(name: str, text: str) -> Any:
    """An option's value from a variable or flag; "none" resets an optional one. Raises ValueError."""
    name = own_name(name)
    if text.strip().lower() == "none" and _may_be_none(name):  # else "none" is an ordinary text
        return None
    if name in FOREIGN_OPTIONS:
        import yaml  # rarely needed

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text
    try:
        return _adapter(name).validate_python(own_value(name, text))
    except ValidationError as e:
        raise ValueError(f"{e.errors()[0]['msg']}, not {text!r}") from None


def _is_option(name: str, kind: type[BaseModel] | None = None) -> bool:
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
        kind = type(content).__name__
        kind = {"str": "text", "int": "number", "float": "number"}.get(kind, kind)
        raise ConfigError(f"configuration file {path} must map option names to values, not hold a {kind}")
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
            all_names = f"known: {', '.join(sorted(variables))}"
            hint = did_you_mean(variable, [*variables, *RESERVED_VARIABLES], all_names, cutoff=0.5, written=str)
            raise ConfigError(f"unknown environment variable {variable}; {hint}")
        if text == "" or not _is_option(name, kind):
            continue  # shells unset a variable for one command by an empty text
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
    # A contradiction: add the source of each option that the message names.
    named = [name for name in OPTIONS if re.search(rf"\b{name}\b", message)]
    origins = ", ".join(f"{name} from {sources.get(name, 'default')}" for name in named)
    return f"{message} ({origins})" if origins else message
