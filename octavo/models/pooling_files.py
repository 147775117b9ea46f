"""Reads how sentence-transformers and its like make vectors: modules.json, 1_Pooling, 2_Dense, prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.files import JsonValues, read_object, read_value
from octavo.core.model_config import ModelConfig
from octavo.core.outputs import DenseConfig, PoolerActivation, PoolerConfig, PoolingKind

if TYPE_CHECKING:
    from octavo.models.config_files import ConfigReader

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
#: By the names of torch.nn's modules, which are made with their default parameters.
_ACTIVATIONS: dict[str, PoolerActivation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
    "Mish": "mish",
    "LeakyReLU": "leaky_relu",
    "ELU": "elu",
    "CELU": "celu",
    "SELU": "selu",
    "ReLU6": "relu6",
    "Hardtanh": "hardtanh",
    "Hardswish": "hardswish",
    "Hardsigmoid": "hardsigmoid",
    "Softplus": "softplus",
    "Softsign": "softsign",
    "LogSigmoid": "log_sigmoid",
    "Tanhshrink": "tanhshrink",
    "Softshrink": "softshrink",
    "Hardshrink": "hardshrink",
    "Softmax": "softmax",
    "Softmin": "softmin",
}
#: Files in which the Transformer module says what it does, the first that there is, by what they are called for.
_TRANSFORMER_FILES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
#: Of the keywords with which the network is loaded: those that change no result, but for the rounding of numbers.
_HARMLESS = {
    "add_pooling_layer",
    "attn_implementation",
    "cache_dir",
    "device_map",
    "dtype",
    "low_cpu_mem_usage",
    "revision",
    "torch_dtype",
    "trust_remote_code",
    "use_safetensors",
}
#: Lengths of a tokenizer that stand for none.
_NO_LENGTH = 1 << 30
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
        _refuse_other_models(folder)
        for module in modules:
            pooler = _add_module(pooler, folder, module)
        pooler = replace(pooler, max_seq_length=_read_transformer(folder))
    return _read_prompts(pooler, folder)


def _refuse_other_models(folder: Path) -> None:
    """Refuses what is saved for another purpose than one vector a text."""
    file = folder / "config_sentence_transformers.json"
    kind = read_object(file).get("model_type") if file.is_file() else None
    if kind not in (None, "SentenceTransformer"):
        raise UnsupportedModelError(f"{file}: model_type {kind!r} is not supported; supported: SentenceTransformer")


def _add_module(pooler: PoolerConfig, folder: Path, module: Any) -> PoolerConfig:
    file = folder / "modules.json"
    name = str(module.get("type")) if isinstance(module, Mapping) else None
    if name is None or not isinstance(path := module.get("path", ""), str) or ".." in Path(path).parts:
        raise ConfigError(f"{file}: a module must have a type and a path within it, not {module!r}")
    kind = name.rpartition(".")[2]
    if not name.startswith("sentence_transformers."):
        raise UnsupportedModelError(f"{file}: the module {name!r} is code of its own, which is not supported")
    if kind in ("Transformer", "Dropout"):  # nothing is dropped but in training
        return pooler
    if kind == "Normalize":
        _refuse_other_features(folder / path / "config.json")
        return replace(pooler, normalize=True)
    if kind == "Pooling":
        return _read_pooling(pooler, folder / path / "config.json")
    if kind == "Dense":
        dense = replace(_read_dense(folder, path), normalizes=pooler.normalize)
        return replace(pooler, dense=(*pooler.dense, dense), normalize=False)
    raise UnsupportedModelError(
        f"{file}: modules of type {kind!r} are not supported; supported: Transformer, Pooling, Dense, Dropout, "
        "Normalize"
    )


def _refuse_other_features(file: Path) -> None:
    """Refuses a module that works on anything but the vector of a text, such as the states of its tokens."""
    raw = read_object(file) if file.is_file() else {}
    for name in ("module_input_name", "module_output_name"):
        if raw.get(name) not in (None, "sentence_embedding"):
            raise UnsupportedModelError(f"{file}: {name} {raw[name]!r} is not supported; supported: sentence_embedding")


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
    if not str(reader.raw.get("activation_function", "torch.")).startswith("torch."):
        raise UnsupportedModelError(
            f"{file}: activation_function {reader.raw['activation_function']!r} is code of its own"
        )
    _refuse_other_features(file)
    bias = reader.raw.get("bias", True) is not False
    sizes = reader.positive("in_features"), reader.positive("out_features")
    return DenseConfig(path, *sizes, bias, _ACTIVATIONS[name], reader.flag("use_residual"))


def transformer_settings(folder: Path) -> JsonValues | None:
    """What the Transformer module of a folder of sentence-transformers says of itself; None if nothing.

    Raises:
        ConfigError: a file is unreadable.
    """
    if not (folder / "modules.json").is_file():
        return None
    for name in _TRANSFORMER_FILES:
        file = folder / f"sentence_{name}_config.json"
        if file.is_file() and (raw := read_object(file)):
            return JsonValues(raw, file)
    return None


def _read_transformer(folder: Path) -> int | None:
    """Tokens after which texts are cut; refuses settings of the Transformer module that are not computed here."""
    settings = transformer_settings(folder)
    of_tokenizer = folder / "tokenizer_config.json"
    length = read_object(of_tokenizer).get("model_max_length") if of_tokenizer.is_file() else None
    if settings is not None:
        _refuse_tasks(settings)
        called = _refuse_keywords(settings)
        # As the library has it: what each call says, then the module, then the tokenizer.
        for table, name in (
            (called, "max_length"),
            (settings, "max_seq_length"),
            (_loading(settings), "model_max_length"),
        ):
            if table.get(name) is not None:
                return table.positive(name)
    is_length = isinstance(length, int) and not isinstance(length, bool) and 0 < length < _NO_LENGTH
    return length if is_length else None


def _refuse_tasks(settings: JsonValues) -> None:
    """Refuses inputs other than texts, and anything but the last hidden states of their tokens."""
    file = settings.file
    if (task := settings.get("transformer_task", "feature-extraction")) != "feature-extraction":
        raise UnsupportedModelError(
            f"{file}: transformer_task {task!r} is not supported; supported: feature-extraction"
        )
    modalities = settings.table("modality_config")
    # A template of conversations is for inputs that are such; texts do not go through it.
    others = set(modalities) - ({"text", "message"} if "text" in modalities else set())
    if others:
        raise UnsupportedModelError(f"{file}: inputs of {', '.join(sorted(others))} are not supported; supported: text")
    text = modalities.get("text")
    output = text.get("method_output_name", "last_hidden_state") if isinstance(text, Mapping) else "last_hidden_state"
    if output != "last_hidden_state":
        raise UnsupportedModelError(
            f"{file}: method_output_name {output!r} is not supported; supported: last_hidden_state"
        )


def _loading(settings: JsonValues) -> JsonValues:
    """Keywords with which the tokenizer is loaded."""
    return JsonValues({**settings.table("tokenizer_args"), **settings.table("processor_kwargs")}, settings.file)


def _refuse_keywords(settings: JsonValues) -> JsonValues:
    """Refuses keywords that change what is computed, but the length; those with which texts are made tokens."""
    file, given = settings.file, dict[str, Any]()
    for name in ("query_length", "document_length", "query_expansion"):
        if settings.get(name) is not None:
            raise UnsupportedModelError(f"{file}: {name} is not supported")
    for name in ("model_args", "model_kwargs", "config_args", "config_kwargs"):
        if others := set(settings.table(name)) - _HARMLESS:
            raise UnsupportedModelError(f"{file}: {name} with {', '.join(sorted(others))} is not supported")
    others = set(_loading(settings).raw) - {*_HARMLESS, "model_max_length", "padding_side", "use_fast"}
    if others:
        raise UnsupportedModelError(f"{file}: processor_kwargs with {', '.join(sorted(others))} is not supported")
    processing = JsonValues(settings.table("processing_kwargs"), file)
    for name in ("common", "text"):
        given |= processing.table(name)
    others = set(given) - {
        "max_length",
        "padding",
        "padding_side",
        "pad_to_multiple_of",
        "return_tensors",
        "truncation",
    }
    if others or given.get("truncation", True) not in (True, "longest_first", "only_first"):
        names = ", ".join(sorted(others or {"truncation"}))
        raise UnsupportedModelError(f"{file}: processing_kwargs with {names} is not supported")
    return JsonValues(given, file)


def _read_prompts(pooler: PoolerConfig, folder: Path) -> PoolerConfig:
    file = folder / "config_sentence_transformers.json"
    if not file.is_file():
        return pooler
    raw = read_object(file)
    prompts, default = raw.get("prompts") or {}, raw.get("default_prompt_name") or None
    if isinstance(prompts, Mapping):
        prompts = {name: text for name, text in prompts.items() if text is not None}
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
