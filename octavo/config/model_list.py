"""The models of a server that has several: words of the command line, a folder, or a YAML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from octavo.config.engine_config import EngineConfig
from octavo.config.server_options import short_name
from octavo.core.errors import ConfigError
from octavo.core.files import read_text

#: Options that several models cannot share, and what to use instead.
_OF_ONE_MODEL = {
    "served_model_name": "give names and aliases in a file (--models)",
    "lora_modules": "give them in a file (--models)",
    "lora_resolver": "serve that model alone",
    "enable_lora_routes": "serve that model alone",
}


class ModelEntry(BaseModel):
    """A model of the file of the option ``models``."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    source: str = Field(min_length=1, description="What the option model takes: a name, a folder or a GGUF file.")
    name: str | None = Field(None, min_length=1, description="Its name in requests; by default that of the source.")
    aliases: list[str] = Field([], description="Further names.")
    keep_alive: float | None = Field(
        None, ge=0, description="Seconds without a request after which it is unloaded; default: model_keep_alive."
    )
    pinned: bool = Field(False, description="Load it at the start and never unload it.")
    options: dict[str, Any] = Field({}, description="The engine's options, where they differ from the common ones.")
    lora_modules: dict[str, str] = Field(
        {}, description="Paths of its adapters by name, for requests by name. Needs the option enable_lora."
    )


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model of a server, with all options of its engine."""

    config: EngineConfig
    #: Its name in requests and responses, then the aliases.
    names: tuple[str, ...]
    #: Seconds without a request after which it is unloaded; None: never.
    keep_alive: float | None = None
    #: Whether it is loaded at the start and stays loaded.
    pinned: bool = False
    #: Paths of its adapters by name.
    lora_modules: Mapping[str, str] = field(default_factory=dict)


def read_entries(path: Path) -> list[ModelEntry]:
    """The entries of a YAML file: a list, or the same below ``models:``; an entry may be a source alone."""
    import yaml

    try:
        content = yaml.safe_load(read_text(path, "file of models"))
    except yaml.YAMLError as e:
        raise ConfigError(f"file of models {path} is not valid YAML: {' '.join(str(e).split())}") from None
    if isinstance(content, dict) and set(content) == {"models"}:
        content = content["models"]
    if not isinstance(content, list) or not content:
        raise ConfigError(f"file of models {path} must be a list of models, each with its source")
    entries = []
    for number, value in enumerate(content):
        try:
            entries.append(ModelEntry.model_validate({"source": value} if isinstance(value, str) else value))
        except ValidationError as e:
            error = e.errors()[0]
            place = ".".join(map(str, error["loc"])) or "entry"
            problem = f"{error['msg']}, not {error['input']!r}"
            raise ConfigError(f"file of models {path}: models[{number}].{place}: {problem}") from None
    return entries


def entries_of_folder(folder: Path) -> list[ModelEntry]:
    """The models in a folder: each folder with a config.json, and each GGUF file, the first of those in parts."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as e:
        raise ConfigError(f"cannot read models_dir {folder}: {e.strerror}") from None
    found = []
    for path in paths:
        if path.suffix == ".gguf" and path.is_file():
            if _is_projector(path):
                continue
            stem, _, part = path.stem.rpartition("-00001-of-")
            if stem or "-of-" not in path.stem:
                found.append(ModelEntry(source=str(path), name=stem if part and stem else path.stem))
        elif (path / "config.json").is_file():
            found.append(ModelEntry(source=str(path), name=path.name))
        elif path.is_dir():  # as downloads of single GGUF files lie: one folder for each
            files = [file for file in sorted(path.glob("*.gguf")) if not _is_projector(file)]
            if files:
                found.append(ModelEntry(source=str(files[0]), name=path.name))
    if not found:
        raise ConfigError(f"models_dir {folder} has neither a folder with a config.json nor a GGUF file")
    return found


def _is_projector(path: Path) -> bool:
    """Whether a GGUF file has the tower of another model's images."""
    return "mmproj" in path.name.lower()


def list_models(
    entries: Sequence[ModelEntry],
    configure: Callable[[Mapping[str, Any]], EngineConfig],
    keep_alive: float | None = None,
    server: Mapping[str, Any] | None = None,
) -> list[ListedModel]:
    """The models of a server; ``configure`` makes an engine's options of those that an entry has.

    ``keep_alive``: of entries that have none. ``server``: the server's options that were set.

    Raises:
        ConfigError: two models have one name, or an option is wrong or cannot be shared.
    """
    for option, advice in _OF_ONE_MODEL.items():
        if (server or {}).get(option):
            raise ConfigError(f"{option} is for a server with one model: {advice}")
    models, owners = [], dict[str, str]()
    for entry in entries:
        if "model" in entry.options:
            raise ConfigError(f"model {entry.source!r}: options.model is not allowed; the model is its source")
        config = configure({**entry.options, "model": entry.source})
        if config.gpu_memory_utilization is not None:
            raise ConfigError(
                "gpu_memory_utilization is for a server with one model: use memory, the bytes of all models together, "
                "or kv_cache_memory_bytes of each"
            )
        if entry.lora_modules and not (config.enable_lora or config.enable_prompt_adapter):
            raise ConfigError(
                f"model {entry.source!r}: lora_modules need its option enable_lora, or enable_prompt_adapter"
            )
        names = (entry.name or short_name(entry.source), *entry.aliases)
        for name in (*names, *entry.lora_modules):
            if name in owners:
                raise ConfigError(
                    f"the name {name!r} is given twice, to {owners[name]} and {entry.source}; set another name"
                )
            owners[name] = entry.source
        idle = keep_alive if entry.keep_alive is None else entry.keep_alive
        idle = None if entry.pinned else idle
        models.append(ListedModel(config, names, idle, entry.pinned, entry.lora_modules))
    return models
