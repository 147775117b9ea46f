"""Reads the pooling of sentence-transformers: modules.json, 1_Pooling, 2_Dense, prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.files import JsonValues, read_object, read_value
from octavo.core.model_config import ModelConfig
from octavo.core.outputs import DenseConfig, PairFormat, PoolerConfig, PoolingKind

if TYPE_CHECKING:
    from octavo.models.config_files import ConfigReader

#: Key in ``sentence_transformers`` of config.json: the text of a pair's prompt, with {query} and {document}.
PAIR_TEMPLATE = "pair_template"
_MAX_MODULES = 16
#: By the flags of 1_Pooling/config.json, and by the newer name.
_KINDS: dict[str, PoolingKind] = {
    **{"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "max": "max", "max_tokens": "max"},
    **{"mean_sqrt_len_tokens": "sqrt_mean", "lasttoken": "last"},
    **{"weightedmean": "weighted_mean", "weightedmean_tokens": "weighted_mean"},
}
#: torch.nn's modules with their default parameters.
_ACTIVATIONS: dict[str, Any] = {
    **{name: name.lower() for name in ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU", "Mish", "ELU", "CELU")},
    **{
        name: name.lower() for name in ("SELU", "ReLU6", "Hardtanh", "Hardswish", "Hardsigmoid", "Softplus", "Softsign")
    },
    **{name: name.lower() for name in ("Tanhshrink", "Softshrink", "Hardshrink", "Softmax", "Softmin")},
    **{"LeakyReLU": "leaky_relu", "LogSigmoid": "log_sigmoid"},
}
#: Kinds of sentence_KIND_config.json, the settings of the Transformer module; the first file counts.
_TRANSFORMER_FILES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
#: Keywords of loading the network that change no result but for rounding.
_HARMLESS = {
    *("add_pooling_layer", "attn_implementation", "cache_dir", "device_map", "dtype", "low_cpu_mem_usage"),
    *("revision", "torch_dtype", "trust_remote_code", "use_safetensors"),
}
#: The output of a Transformer module that is pooled.
_STATES = "last_hidden_state"
#: From this model_max_length on, a tokenizer has no limit.
_NO_LENGTH = 1 << 30
_SIMILARITIES = {name: name for name in ("cosine", "dot", "euclidean", "manhattan")} | {"dot_product": "dot"}


def read_pooler(folder: Path, config: ModelConfig, reader: ConfigReader) -> PoolerConfig:
    """How the model in ``folder`` makes vectors or class scores; ``config.pooler`` where its files say nothing."""
    pooler = replace(config.pooler, dimensions=_matryoshka(reader, config))
    if config.head in ("sequence", "token"):  # a cross-encoder, which may name an activation of its own
        activation = reader.table("sentence_transformers").get("activation_fn")
        activation = activation or reader.raw.get("sbert_ce_default_activation_function")
        if (template := reader.table("sentence_transformers").get(PAIR_TEMPLATE)) is not None:
            pooler = replace(pooler, pairs=PairFormat(str(template)))
        if activation is None:
            return pooler
        name = str(activation).rpartition(".")[2].removesuffix("()")
        if name not in _ACTIVATIONS:
            raise _unsupported(reader.file, "activation_fn", activation, *_ACTIVATIONS)
        return replace(pooler, activation=_ACTIVATIONS[name])
    if (file := folder / "modules.json").is_file():
        modules = read_value(file)
        if not isinstance(modules, list) or len(modules) > _MAX_MODULES:
            raise ConfigError(f"{file} must hold a list of at most {_MAX_MODULES} modules")
        pooler = replace(pooler, normalize=False, is_from_files=True)
        settings = folder / "config_sentence_transformers.json"
        kind = read_object(settings).get("model_type") if settings.is_file() else None
        for module in modules:
            pooler = _add_module(pooler, folder, module)
        supported = "SentenceTransformer" if pooler.pairs is None else "CrossEncoder"
        if kind not in (None, supported):
            raise _unsupported(settings, "model_type", kind, supported)
        if pooler.pairs is not None:
            pooler = replace(pooler, pairs=_with_chat_options(pooler.pairs, folder))
        pooler = replace(pooler, max_seq_length=_read_transformer(folder, scores_pairs=pooler.pairs is not None))
    return _read_prompts(pooler, folder)


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
    if kind == "LogitScore":
        return replace(pooler, pairs=_read_logit_score(folder / path / "config.json"))
    if kind == "Pooling":
        return _read_pooling(pooler, folder / path / "config.json")
    if kind == "Dense":
        dense = replace(_read_dense(folder, path), normalizes=pooler.normalize)
        return replace(pooler, dense=(*pooler.dense, dense), normalize=False)
    supported = ("Transformer", "Pooling", "Dense", "Dropout", "Normalize", "LogitScore")
    raise _unsupported(file, "the module", kind, *supported)


def _unsupported(file: Path, name: str, value: object, *supported: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{file}: {name} {value!r} is not supported; supported: {', '.join(supported)}")


def _refuse_other_features(file: Path) -> None:
    """Refuses a module that works on anything but the vector of a text, such as its hidden states."""
    raw = read_object(file) if file.is_file() else {}
    for name in ("module_input_name", "module_output_name"):
        if raw.get(name) not in (None, "sentence_embedding"):
            raise _unsupported(file, name, raw[name], "sentence_embedding")


def _read_logit_score(file: Path) -> PairFormat:
    """The tokens whose logits score a pair (``LogitScore`` of a CrossEncoder)."""
    reader = JsonValues(read_object(file), file)
    ids = []
    for name in ("false_token_id", "true_token_id"):
        if not isinstance(token := reader.get(name), int) or isinstance(token, bool) or token < 0:
            raise UnsupportedModelError(f"{file}: {name} must be the id of a token, not {token!r}")
        ids.append(token)
    return PairFormat(answer_ids=(ids[0], ids[1]))


def _with_chat_options(pairs: PairFormat, folder: Path) -> PairFormat:
    settings = transformer_settings(folder)
    if settings is None:
        return pairs
    message = JsonValues(settings.table("modality_config"), settings.file).table("message")
    if message.get("format", "flat") != "flat":
        raise _unsupported(settings.file, "modality_config.message.format", message["format"], "flat")
    options = JsonValues(settings.table("processing_kwargs"), settings.file).table("chat_template")
    return replace(pairs, options=options)


def _read_pooling(pooler: PoolerConfig, file: Path) -> PoolerConfig:
    raw = read_object(file)
    named = raw.get("pooling_mode")
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list):
        prefix = "pooling_mode_"
        names = [name.removeprefix(prefix) for name, value in raw.items() if name.startswith(prefix) and value is True]
    if len(names) != 1 or names[0] not in _KINDS:
        raise UnsupportedModelError(f"{file}: one kind of pooling is supported ({', '.join(_KINDS)}), not {names!r}")
    return replace(pooler, kind=_KINDS[names[0]], include_prompt=raw.get("include_prompt", True) is not False)


def _read_dense(folder: Path, path: str) -> DenseConfig:
    file = folder / path / "config.json"
    reader = JsonValues(read_object(file), file)
    name = str(reader.raw.get("activation_function", "Tanh")).rpartition(".")[2].removesuffix("()")
    if name not in _ACTIVATIONS:
        raise _unsupported(file, "activation_function", name, *_ACTIVATIONS)
    if not str(reader.raw.get("activation_function", "torch.")).startswith("torch."):
        raise UnsupportedModelError(f"{file}: activation_function {name!r} is custom code")
    _refuse_other_features(file)
    bias = reader.raw.get("bias", True) is not False
    sizes = reader.positive("in_features"), reader.positive("out_features")
    return DenseConfig(path, *sizes, bias, _ACTIVATIONS[name], reader.flag("use_residual"))


def transformer_settings(folder: Path) -> JsonValues | None:
    """The settings of the Transformer module of a sentence-transformers folder; None if it has none."""
    if not (folder / "modules.json").is_file():
        return None
    for name in _TRANSFORMER_FILES:
        file = folder / f"sentence_{name}_config.json"
        if file.is_file() and (raw := read_object(file)):
            return JsonValues(raw, file)
    return None


def _read_transformer(folder: Path, *, scores_pairs: bool) -> int | None:
    """The length at which texts are cut; refuses settings of the Transformer module that are not computed.

    ``scores_pairs``: its results are logits, for a module LogitScore.
    """
    settings = transformer_settings(folder)
    of_tokenizer = folder / "tokenizer_config.json"
    length = read_object(of_tokenizer).get("model_max_length") if of_tokenizer.is_file() else None
    if settings is not None:
        _refuse_tasks(settings, *(("text-generation", "logits") if scores_pairs else ("feature-extraction", _STATES)))
        called = _refuse_keywords(settings)
        # The library's precedence: the keywords of a call, then the module, then the tokenizer.
        loaded = _loading(settings), "model_max_length"
        for table, name in ((called, "max_length"), (settings, "max_seq_length"), loaded):
            if table.get(name) is not None:
                return table.positive(name)
    is_length = isinstance(length, int) and not isinstance(length, bool) and 0 < length < _NO_LENGTH
    return length if is_length else None


def _refuse_tasks(settings: JsonValues, supported: str, result: str) -> None:
    """Refuses inputs other than text, a task other than the supported one, and other outputs than its ``result``."""
    file = settings.file
    if (task := settings.get("transformer_task", supported)) != supported:
        raise _unsupported(file, "transformer_task", task, supported)
    modalities = settings.table("modality_config")
    # Texts do not go through the template of conversations.
    others = set(modalities) - ({"text", "message"} if "text" in modalities else set())
    if others:
        raise UnsupportedModelError(f"{file}: inputs of {', '.join(sorted(others))} are not supported; supported: text")
    text = modalities.get("text")
    output = text.get("method_output_name", result) if isinstance(text, Mapping) else result
    if output != result:
        raise _unsupported(file, "method_output_name", output, result)


def _loading(settings: JsonValues) -> JsonValues:
    """The keywords with which the tokenizer is loaded."""
    return JsonValues({**settings.table("tokenizer_args"), **settings.table("processor_kwargs")}, settings.file)


def _refuse_keywords(settings: JsonValues) -> JsonValues:
    """Refuses keywords that change the result, but for the length; returns the tokenizer's keywords."""
    file, keywords = settings.file, dict[str, Any]()
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
        keywords |= processing.table(name)
    harmless = {"padding", "padding_side", "pad_to_multiple_of", "return_tensors"}
    others = set(keywords) - {"max_length", "truncation", *harmless}
    if others or keywords.get("truncation", True) not in (True, "longest_first", "only_first"):
        names = ", ".join(sorted(others or {"truncation"}))
        raise UnsupportedModelError(f"{file}: processing_kwargs with {names} is not supported")
    return JsonValues(keywords, file)


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


def _matryoshka(reader: ConfigReader, config: ModelConfig) -> tuple[int, ...] | None:
    """Sizes of shorter vectors that config.json allows; empty: none, None: any.

    Models that were not trained for it are refused shorter vectors, as in vLLM; ``hf_overrides={"is_matryoshka":
    true}`` allows any size.
    """
    sizes = reader.raw.get("matryoshka_dimensions")
    if sizes is None:
        return None if reader.raw.get("is_matryoshka") is True else ()
    if not isinstance(sizes, list) or not all(isinstance(n, int) and 0 < n <= config.hidden_size for n in sizes):
        raise ConfigError(
            f"{reader.file}: matryoshka_dimensions must be a list of numbers up to {config.hidden_size}, not {sizes!r}"
        )
    return tuple(sizes)
