"""Reads config.json and generation_config.json of a model; the values of the former are ``Network.read_config``'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.json_values import read_object
from octavo.core.model_config import ModelConfig
from octavo.core.sampling_params import MODEL_DEFAULTS, DefaultMaxTokens, SamplingParams
from octavo.models.config_reader import ConfigReader
from octavo.models.heads import with_head
from octavo.models.pooling_files import read_pooler
from octavo.models.quantization import read_quantization
from octavo.models.registry import architecture_of_type, find_base, network_class, supported_architectures, unsupported

_GENERATION_FILE = "generation_config.json"
#: Fields of ``SamplingParams`` that generation_config.json may set, by their names there.
_SAMPLING_FIELDS = {name: name for name in MODEL_DEFAULTS if name != "max_tokens"} | {"max_new_tokens": "max_tokens"}
#: Values of the option ``generation_config`` that read no file.
_NO_FILE = ("none", "vllm")


def read_model_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The model configuration of ``folder``/config.json, with the special token ids of generation_config.json.

    Values of ``overrides`` take the place of those of config.json; objects are merged.

    Raises:
        ConfigError: config.json is missing, is no JSON object, or a value is missing, of the wrong type or impossible.
        UnsupportedModelError: the architecture, activation, rope type or quantization is not supported.
    """
    raw = _merged(read_json(folder / "config.json"), overrides or {})
    generation_file = folder / _GENERATION_FILE
    generation = read_json(generation_file) if generation_file.exists() else {}
    architecture = _architecture(raw)
    reader = ConfigReader(raw, folder / "config.json", generation)
    base = find_base(architecture)
    config = network_class(architecture).read_config(base or architecture, reader)
    if base != architecture or config.is_encoder:
        config = with_head(config, architecture, reader)
    config = replace(config, pooler=read_pooler(folder, config, reader))
    return replace(config, quantization=read_quantization(_quantization_fields(raw, folder)))


def _merged(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if both else value
    return merged


def check_architecture(folder: Path) -> None:
    """Refuses a model without a network here, from ``folder``/config.json alone and without importing torch.

    Raises:
        ConfigError: config.json is missing or no JSON object.
        UnsupportedModelError: the architecture is not supported.
    """
    _architecture(read_json(folder / "config.json"))


def default_sampling(source: str, folder: Path) -> dict[str, Any]:
    """The model's own defaults of sampling: the fields of ``SamplingParams`` that a generation_config.json sets.

    Every surface takes these before its own. The folders of GGUF files and built-in models have the file too
    (``gguf_config``).

    Args:
        source: the engine's option ``generation_config``: "auto" (the file of ``folder``, if there is one), "none" (or
            "vllm", as vLLM calls its own defaults), or another folder, which must have the file.
        folder: of the model.

    Raises:
        ConfigError: the file is missing or no JSON object, or one of the fields has an impossible value.
    """
    if source in _NO_FILE:
        return {}
    file = (folder if source == "auto" else Path(source).expanduser()) / _GENERATION_FILE
    if not file.is_file():
        if source == "auto":
            return {}
        raise ConfigError(
            f"generation_config={source!r}: there is no {file}; expected a folder that has it, 'auto' (the model's "
            "own) or 'none'"
        )
    raw = read_json(file)
    found = {ours: raw[theirs] for theirs, ours in _SAMPLING_FIELDS.items() if raw.get(theirs) is not None}
    try:
        SamplingParams(**found)
    except InvalidRequestError as e:
        raise ConfigError(f"{file}: {e}; with generation_config='none' its sampling parameters are not read") from None
    if "max_tokens" in found:
        found["max_tokens"] = DefaultMaxTokens(found["max_tokens"])
    return found


def read_json(file: Path) -> dict[str, Any]:
    """The object of a model folder's JSON file.

    Raises:
        ConfigError: it is missing, too large, not readable or no object.
    """
    if not file.is_file():
        raise ConfigError(f"{file} is missing; a model folder holds config.json, tokenizer.json and *.safetensors")
    return read_object(file)


def _architecture(raw: dict[str, Any]) -> str:
    supported = supported_architectures()
    named = raw.get("architectures")
    names = named if isinstance(named, list) and named else [architecture_of_type(str(raw.get("model_type")))]
    for name in names:
        if find_base(str(name)) in supported:
            return str(name)
    if isinstance(named, list) and named:
        raise unsupported("model architecture", str(named[0]), supported)
    raise unsupported("model type", str(raw.get("model_type")), supported)


def _quantization_fields(raw: dict[str, Any], folder: Path) -> ConfigReader:
    """What config.json, or of older checkpoints a file beside it, says about quantisation; empty if nothing."""
    reader = ConfigReader(raw, folder / "config.json")
    for name in ("quantization_config", "compression_config"):
        if fields := reader.table(name):
            return ConfigReader(fields, reader.file)
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (folder / name).exists():
            return ConfigReader({"quant_method": method, **read_json(folder / name)}, folder / name)
    return ConfigReader({}, reader.file)
