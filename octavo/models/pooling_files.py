"""Reads how sentence-transformers and its like make vectors: modules.json, 1_Pooling, 2_Dense, prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.json_values import JsonValues, read_object, read_value
from octavo.core.model_config import ModelConfig
from octavo.core.pooler_config import DenseConfig, PoolerActivation, PoolerConfig, PoolingKind
from octavo.models.config_reader import ConfigReader

_MAX_MODULES = 16
#: By the flags of 1_Pooling/config.json, and by the newer name.
_KINDS: dict[str, PoolingKind] = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "max": "max",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "sqrt_mean",
    "weightedmean": "weighted_mean",
    "weightedmean_tokens": "weighted_mean",
    "lasttoken": "last",
}
_ACTIVATIONS: dict[str, PoolerActivation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
}
_SIMILARITIES = {
    "cosine": "cosine",
    "dot": "dot",
    "dot_product": "dot",
    "euclidean": "euclidean",
    "manhattan": "manhattan",
}


def read_pooler(folder: Path, config: ModelConfig, reader: ConfigReader) -> PoolerConfig:
    """How the model in ``folder`` makes vectors or class scores; ``config.pooler`` where its files say nothing.

    Raises:
        ConfigError: a file is unreadable, or a value is missing or impossible.
        UnsupportedModelError: a module does what is not supported.
    """
    pooler = replace(config.pooler, dimensions=_matryoshka(reader, config))
    if config.head in ("sequence", "token"):
        return _read_activation(pooler, reader)
    if (file := folder / "modules.json").is_file():
        modules = read_value(file)
        if not isinstance(modules, list) or len(modules) > _MAX_MODULES:
            raise ConfigError(f"{file} must hold a list of at most {_MAX_MODULES} modules")
        pooler = replace(pooler, normalize=False, is_from_files=True)
        for module in modules:
            pooler = _add_module(pooler, folder, module)
    return _read_prompts(_read_lengths(pooler, folder), folder)


def _add_module(pooler: PoolerConfig, folder: Path, module: Any) -> PoolerConfig:
    kind = str(module.get("type")).rpartition(".")[2] if isinstance(module, Mapping) else None
    if kind is None or not isinstance(path := module.get("path", ""), str) or ".." in Path(path).parts:
        raise ConfigError(f"{folder / 'modules.json'}: a module must have a type and a path within it, not {module!r}")
    if kind == "Transformer":
        return pooler
    if kind == "Normalize":
        return replace(pooler, normalize=True)
    if kind == "Pooling":
        return _read_pooling(pooler, folder / path / "config.json")
    if kind == "Dense":
        return replace(pooler, dense=(*pooler.dense, _read_dense(folder, path)))
    raise UnsupportedModelError(
        f"{folder / 'modules.json'}: modules of type {kind!r} are not supported; supported: Transformer, Pooling, "
        "Dense, Normalize"
    )


def _read_pooling(pooler: PoolerConfig, file: Path) -> PoolerConfig:
    raw = read_object(file)
    named = raw.get("pooling_mode")
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list):
        prefix = "pooling_mode_"
        names = [name.removeprefix(prefix) for name, value in raw.items() if name.startswith(prefix) and value is True]
    if len(names) != 1 or names[0] not in _KINDS:
        raise UnsupportedModelError(
            f"{file}: one kind of pooling is supported ({', '.join(sorted(_KINDS))}), not {names!r}"
        )
    return replace(pooler, kind=_KINDS[names[0]], include_prompt=raw.get("include_prompt", True) is not False)


def _read_dense(folder: Path, path: str) -> DenseConfig:
    file = folder / path / "config.json"
    reader = JsonValues(read_object(file), file)
    name = str(reader.raw.get("activation_function", "Tanh")).rpartition(".")[2].removesuffix("()")
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"{file}: activation_function {name!r} is not supported: {', '.join(_ACTIVATIONS)}")
    bias = reader.raw.get("bias", True) is not False
    sizes = reader.positive("in_features"), reader.positive("out_features")
    return DenseConfig(path, *sizes, bias, _ACTIVATIONS[name])


def _read_lengths(pooler: PoolerConfig, folder: Path) -> PoolerConfig:
    for name in ("bert", "roberta", "distilbert", "camembert", "xlm-roberta", "xlnet", "albert"):
        file = folder / f"sentence_{name}_config.json"
        if file.is_file() and (values := JsonValues(read_object(file), file)).get("max_seq_length") is not None:
            return replace(pooler, max_seq_length=values.positive("max_seq_length"))
    return pooler


def _read_prompts(pooler: PoolerConfig, folder: Path) -> PoolerConfig:
    file = folder / "config_sentence_transformers.json"
    if not file.is_file():
        return pooler
    raw = read_object(file)
    prompts, default = raw.get("prompts") or {}, raw.get("default_prompt_name")
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"{file}: prompts must be texts by name, not {prompts!r}")
    if default is not None and default not in prompts:
        raise ConfigError(f"{file}: default_prompt_name must be one of the prompts, not {default!r}")
    similarity = raw.get("similarity_fn_name") or "cosine"
    if similarity not in _SIMILARITIES:
        raise ConfigError(f"{file}: similarity_fn_name must be one of {', '.join(_SIMILARITIES)}, not {similarity!r}")
    kept: Any = _SIMILARITIES[similarity]
    return replace(pooler, prompts=dict(prompts), default_prompt_name=default, similarity=kept)


def _read_activation(pooler: PoolerConfig, reader: ConfigReader) -> PoolerConfig:
    """That of a cross-encoder, which may name its own."""
    named = reader.table("sentence_transformers").get("activation_fn") or reader.raw.get(
        "sbert_ce_default_activation_function"
    )
    if named is None:
        return pooler
    name = str(named).rpartition(".")[2].removesuffix("()")
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{reader.file}: activation_fn {named!r} is not supported: {', '.join(_ACTIVATIONS)}"
        )
    return replace(pooler, activation=_ACTIVATIONS[name])


def _matryoshka(reader: ConfigReader, config: ModelConfig) -> tuple[int, ...] | None:
    """Sizes of shorter vectors that config.json allows, as other engines read it; none where it says nothing.

    A model that was not trained for it gives shorter vectors that mean little, so they are refused (as vLLM does).
    ``hf_overrides={"is_matryoshka": true}`` allows any size.
    """
    sizes = reader.raw.get("matryoshka_dimensions")
    if sizes is None:
        return None if reader.raw.get("is_matryoshka") is True else ()
    if not isinstance(sizes, list) or not all(isinstance(n, int) and 0 < n <= config.hidden_size for n in sizes):
        raise ConfigError(
            f"{reader.file}: matryoshka_dimensions must be a list of numbers up to {config.hidden_size}, not {sizes!r}"
        )
    return tuple(sizes)
