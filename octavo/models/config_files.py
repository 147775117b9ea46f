"""Reads config.json and generation_config.json of a model; the values of the former are ``Network.read_config``'s."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from octavo.core.files import JsonValues, read_object
from octavo.core.model_config import ROPE_TYPES, CheckpointQuantization, ModelConfig, QuantizationScheme, RopeConfig
from octavo.core.plugins import how_to_install
from octavo.core.sampling_params import MODEL_DEFAULTS, DefaultMaxTokens, SamplingParams
from octavo.models.pooling_files import read_pooler
from octavo.models.registry import (
    architecture_of_type,
    find_base,
    network_class,
    supported_architectures,
    unsupported,
    with_head,
)

if TYPE_CHECKING:
    from octavo.kernels.interface import Activation


_GENERATION_FILE = "generation_config.json"
#: With the packages of models that transformers computes.
_EXTRA = "transformers"
#: Fields of ``SamplingParams`` that generation_config.json may set, by their names there.
_SAMPLING_FIELDS = {name: name for name in MODEL_DEFAULTS if name != "max_tokens"} | {"max_new_tokens": "max_tokens"}
#: Values of the option ``generation_config`` that read no file.
_NO_FILE = ("none", "vllm")


def read_model_config(
    folder: Path,
    overrides: Mapping[str, Any] | None = None,
    model_impl: str = "auto",
    trust_remote_code: bool = False,
) -> ModelConfig:
    """The model configuration of ``folder``/config.json, with the special token ids of generation_config.json.

    Values of ``overrides`` take the place of those of config.json; objects are merged. ``model_impl`` and
    ``trust_remote_code`` are the engine's options.
    """
    raw = _merged(read_json(folder / "config.json"), overrides or {})
    _refuse_nan(raw, folder / "config.json")
    generation_file = folder / _GENERATION_FILE
    generation = read_json(generation_file) if generation_file.exists() else {}
    if (why := why_transformers(raw, model_impl)) is not None:
        transformers_model = importlib.import_module("octavo.models.transformers_model")
        replaced = {name: raw[name] for name in overrides or {}}
        try:
            config: ModelConfig = transformers_model.read_transformers_config(
                folder, replaced, generation, trust_remote_code
            )
            return config
        except UnsupportedModelError as e:
            raise UnsupportedModelError("; ".join(filter(None, (why, str(e))))) from None
    architecture = _architecture(raw)
    reader = ConfigReader(raw, folder / "config.json", generation)
    base = find_base(architecture)
    config = network_class(architecture).read_config(base or architecture, reader)
    if is_bidirectional(reader) and not config.is_encoder and config.encoder_facts is None:
        name = "is_causal=false" if raw.get("is_causal") is False else "use_bidirectional_attention=true"
        raise UnsupportedModelError(f"{reader.file}: {name} is not supported for {architecture}")
    if base != architecture or config.is_encoder:
        config = with_head(config, architecture, reader)
    config = replace(config, pooler=read_pooler(folder, config, reader))
    fields = reader.table("quantization_config") or reader.table("compression_config")
    quantization = ConfigReader(fields, reader.file)
    if not fields:  # older checkpoints have a file beside config.json
        for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
            if (folder / name).exists():
                quantization = ConfigReader({"quant_method": method, **read_json(folder / name)}, folder / name)
                break
    return replace(config, quantization=read_quantization(quantization))


def _merged(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if both else value
    return merged


def check_architecture(folder: Path, model_impl: str = "auto") -> None:
    """Refuses a model without a network here or in transformers, by its config.json and without importing torch."""
    raw = read_json(folder / "config.json")
    if why_transformers(raw, model_impl) is None:
        _architecture(raw)


def why_transformers(raw: dict[str, Any], model_impl: str) -> str | None:
    """Why transformers' code is to compute a model; empty: the option says so; None: a network here does.

    Raises:
        ConfigError: the option says so, and a package is missing.
        UnsupportedModelError: there is no network here, and a package is missing.
    """
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if model_impl == "transformers":
        if missing:
            raise ConfigError(f"model_impl='transformers' needs {' and '.join(missing)}: {how_to_install(_EXTRA)}")
        return ""
    try:
        _architecture(raw)
    except UnsupportedModelError as e:
        if model_impl == "octavo":
            raise
        if missing:
            raise UnsupportedModelError(
                f"{e}. Its code in transformers may run here with {' and '.join(missing)}: {how_to_install(_EXTRA)}"
            ) from None
        if not _is_in_transformers(raw):
            raise UnsupportedModelError(f"{e}; nor does the installed transformers have it") from None
        return str(e)
    return None


def _refuse_nan(value: Any, file: Path, path: str = "") -> None:
    if isinstance(value, Mapping):
        for name, inside in value.items():
            _refuse_nan(inside, file, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for index, inside in enumerate(value):
            _refuse_nan(inside, file, f"{path}[{index}]")
    elif value != value:
        raise ConfigError(f"{path} must be a number, not NaN", file=file)


def _is_in_transformers(raw: dict[str, Any]) -> bool:
    """Whether transformers' table of language models names the architecture, or the model has code of its own.

    The table's source is read: importing it takes seconds.
    """
    if raw.get("auto_map"):
        return True
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    table = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    names = raw.get("architectures") or [raw.get("model_type")]
    return not table.is_file() or f'"{names[0]}"' in table.read_text(encoding="utf-8")


def _architecture(raw: dict[str, Any]) -> str:
    supported = supported_architectures()
    named = raw.get("architectures")
    names = named if isinstance(named, list) and named else [architecture_of_type(str(raw.get("model_type")))]
    for name in names:
        if find_base(str(name)) in supported:
            return str(name)
    if isinstance(named, list) and named:
        raise unsupported("model architecture", str(named[0]), supported)
    if raw.get("model_type") is None:
        raise ConfigError(
            'config.json names no network: it has neither architectures, such as ["LlamaForCausalLM"], nor '
            'model_type, such as "llama"; hf_overrides can add one'
        )
    raise unsupported("model type", str(raw.get("model_type")), supported)


def default_sampling(source: str, folder: Path) -> dict[str, Any]:
    """The default sampling parameters of a model: the fields of ``SamplingParams`` in generation_config.json.

    Every server and command applies these before its own defaults. ``source`` is the engine's option
    ``generation_config``: "auto" (the file in ``folder``, if there is one), "none" or "vllm" (no file), or another
    folder, which must have the file. The folders of GGUF files and built-in models have the file too (``gguf_config``).
    """
    if source in _NO_FILE:
        return {}
    file = (folder if source == "auto" else Path(source).expanduser()) / _GENERATION_FILE
    if not file.is_file():
        if source == "auto":
            return {}
        raise ConfigError(f"generation_config={source!r}: there is no {file}; expected its folder, 'auto' or 'none'")
    raw = read_json(file)
    fields = {ours: raw[theirs] for theirs, ours in _SAMPLING_FIELDS.items() if raw.get(theirs) is not None}
    try:
        SamplingParams(**fields)
    except InvalidRequestError as e:
        raise ConfigError(f"{file}: {e}; with generation_config='none' its sampling parameters are not read") from None
    if "max_tokens" in fields:
        fields["max_tokens"] = DefaultMaxTokens(fields["max_tokens"])
    return fields


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder."""
    if not file.is_file():
        raise ConfigError(f"{file} is missing; a model folder holds config.json, tokenizer.json and *.safetensors")
    return read_object(file)


_DTYPES = ("float32", "bfloat16", "float16")
#: Far more layers than any network has.
_MAX_LAYERS = 1 << 16
#: Names of activations in config.json; several approximate gelu by the same tanh.
_ACTIVATIONS: dict[str, Activation] = {
    **{"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
    **{"quick_gelu": "quick_gelu", "relu": "relu", "relu2": "relu2", "silu": "silu", "swish": "silu"},
}


@dataclass(frozen=True)
class ConfigReader(JsonValues):
    """The values of a config.json."""

    raw: dict[str, Any]
    #: The content of generation_config.json.
    generation: dict[str, Any] = field(default_factory=dict)

    def with_defaults(self, **values: Any) -> ConfigReader:
        """The same object with these values where it has none."""
        present = {name: value for name, value in self.raw.items() if value is not None}
        return replace(self, raw={**values, **present})

    def only(self, name: str, *supported: Any) -> Any:
        """A value that must be one of these, by default the first; raises UnsupportedModelError for others."""
        value = self.get(name, supported[0])
        if value not in supported:
            listed = ", ".join(json.dumps(one) for one in supported)
            raise UnsupportedModelError(
                f"{self.file}: {name}={json.dumps(value)} is not supported; supported: {listed}"
            )
        return value

    def named(self, *names: str) -> str:
        """The first of several names of one value that the object has, else the last name."""
        return next((name for name in names if self.raw.get(name) is not None), names[-1])


def common_fields(reader: ConfigReader) -> dict[str, Any]:
    """Fields of ``ModelConfig`` that all decoders name alike: vocabulary, special tokens, dtype."""
    # Without a name it is float32, as in transformers 4.
    dtype = str(reader.raw.get("dtype") or reader.raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UnsupportedModelError(f"weights of type {dtype!r} are not supported; supported: {', '.join(_DTYPES)}")
    return {
        "vocab_size": reader.positive("vocab_size"),
        "tie_word_embeddings": reader.flag("tie_word_embeddings"),
        "checkpoint_dtype": dtype,
        "eos_token_ids": read_token_ids(reader, "eos_token_id"),
        "bos_token_id": next(iter(read_token_ids(reader, "bos_token_id")), None),
    }


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """The fields of a configuration by name, to make a family's configuration from it."""
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def shape_fields(reader: ConfigReader, head_dim: int | None = None) -> dict[str, Any]:
    """Fields of ``ModelConfig`` of Llama and its relatives, whose heads may have a size of their own.

    Without one in config.json, the size is ``head_dim``, by default hidden_size / num_attention_heads.
    """
    fields = _common_shape(reader, "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    size, count = fields["hidden_size"], fields["num_heads"]
    if reader.get("head_dim", head_dim) is None and size % count:
        raise ConfigError(
            f"{reader.file}: hidden_size ({size}) must be a multiple of num_attention_heads ({count}) without head_dim"
        )
    head_dim = reader.positive("head_dim", head_dim or size // count or 1)
    if head_dim % 2:
        raise ConfigError(f"head_dim must be even, not {head_dim}: rotary positions turn pairs of dimensions")
    return {"intermediate_size": reader.positive("intermediate_size"), "head_dim": head_dim, **fields}


def decoder_fields(
    reader: ConfigReader,
    *,
    hidden: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    kv_heads: str | None = None,
    head_dim: str | None = None,
    bias: bool | None = None,
) -> dict[str, Any]:
    """Fields of ``ModelConfig`` that all families have; the arguments are their names in config.json.

    Without ``kv_heads``, or where config.json lacks it, every query head has its own KV head. Without ``head_dim``, the
    heads together are as wide as the network. ``bias`` is the value of all biases of matrices.
    """
    fields = _common_shape(reader, hidden, layers, heads, kv_heads)
    if bias is not None:
        fields |= {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias}
    size, count = fields["hidden_size"], fields["num_heads"]
    if head_dim is not None:
        return {"head_dim": reader.positive(head_dim), **fields}
    if size % count:
        raise ConfigError(f"{reader.file}: {hidden} ({size}) must be a multiple of {heads} ({count})")
    return {"head_dim": size // count, **fields}


def _common_shape(reader: ConfigReader, hidden: str, layers: str, heads: str, kv_heads: str | None) -> dict[str, Any]:
    count = reader.positive(heads)
    kv_count = reader.positive(kv_heads, count) if kv_heads else count
    if count % kv_count:
        raise ConfigError(f"{reader.file}: {heads} ({count}) must be a multiple of {kv_heads} ({kv_count})")
    shape = {"hidden_size": reader.positive(hidden), "num_layers": reader.positive(layers)}
    if shape["num_layers"] > _MAX_LAYERS:
        raise ConfigError(f"{reader.file}: {layers} must be at most {_MAX_LAYERS}, not {shape['num_layers']}")
    return shape | {"num_heads": count, "num_kv_heads": kv_count, **common_fields(reader)}


def read_activation(reader: ConfigReader, name: str, default: str) -> Activation:
    """The activation that config.json names under ``name``."""
    value = reader.raw.get(name) or default
    if value not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        raise UnsupportedModelError(f"activation {name}={value!r} is not supported; supported: {supported}")
    return _ACTIVATIONS[value]


def read_rope(reader: ConfigReader) -> RopeConfig:
    """rope_parameters (transformers 5) or rope_theta with rope_scaling (transformers 4)."""
    scaling = reader.table("rope_parameters") or reader.table("rope_scaling")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise UnsupportedModelError("rope parameters that differ between layer types are not supported")
    # "type" is the older name; rope_type takes precedence.
    old_name = scaling.pop("type", None)
    rope_type = scaling.pop("rope_type", None) or old_name or "default"
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    inside = ConfigReader(
        {**{k: reader.raw.get(k) for k in ("rope_theta", "partial_rotary_factor")}, **scaling}, reader.file
    )
    theta, partial = inside.number("rope_theta", 10000.0), inside.number("partial_rotary_factor", 1.0)
    if partial > 1:
        raise ConfigError(f"{reader.file}: partial_rotary_factor must be at most 1, not {partial}")
    scaling = {k: v for k, v in scaling.items() if k not in ("rope_theta", "partial_rotary_factor")}
    scaling["max_position_embeddings"] = reader.positive("max_position_embeddings")
    if rope_type in ("llama3", "longrope", "yarn") and reader.raw.get("original_max_position_embeddings"):
        # Phi-3 and similar models have it at the top level, where it takes precedence.
        scaling["original_max_position_embeddings"] = reader.positive("original_max_position_embeddings")
    return RopeConfig(theta=theta, rope_type=rope_type, partial_rotary_factor=partial, scaling=scaling)


def rotary_fields(reader: ConfigReader, head_dim: int) -> dict[str, Any]:
    """``rope`` and ``max_position`` of families that rotate a share of each head."""
    rope = read_rope(reader)
    rotated = int(head_dim * rope.partial_rotary_factor)
    if rotated % 2 or not rotated:
        raise ConfigError(
            f"{reader.file}: partial_rotary_factor ({rope.partial_rotary_factor}) rotates {rotated} of {head_dim} "
            "dimensions of a head: the number must be even"
        )
    return {"rope": rope, "max_position": longest_context(rope)}


def is_bidirectional(reader: ConfigReader) -> bool:
    """Whether a decoder attends to later tokens, too, as config.json of some embedding models says."""
    return reader.raw.get("is_causal") is False or reader.raw.get("use_bidirectional_attention") is True


def read_windows(reader: ConfigReader, layers: int, window: int) -> tuple[int | None, ...] | None:
    """The window of each layer, by layer_types; None when absent."""
    types = reader.raw.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers:
        raise ConfigError(f"{reader.file}: layer_types must be a list of {layers} names, one a layer, not {types!r}")
    unknown = {str(name) for name in types} - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(
            f"layer type {min(unknown)!r} is not supported; supported: full_attention, sliding_attention"
        )
    return tuple(window if name == "sliding_attention" else None for name in types)


def longest_context(rope: RopeConfig) -> int:
    """The longest supported context in tokens: max_position_embeddings, or more if the RoPE scaling extends it."""
    configured: int = rope.scaling["max_position_embeddings"]
    factor = rope.scaling.get("factor")
    if rope.rope_type not in ("linear", "dynamic", "yarn") or not isinstance(factor, int | float):
        return configured
    original = rope.scaling.get("original_max_position_embeddings") or configured
    return max(configured, int(original * factor))


def read_token_ids(reader: ConfigReader, name: str) -> tuple[int, ...]:
    """Token ids of generation_config.json, then those of config.json, without duplicates."""
    ids: list[int] = []
    for source in (reader.generation, reader.raw):
        value = source.get(name)
        for token in value if isinstance(value, list) else [value]:
            if token is None or token in ids:
                continue
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise ConfigError(f"{name} must be a token id or a list of them, not {value!r}")
            ids.append(token)
    return tuple(ids)


# quantization_config

_COMPRESSED_FORMATS = (
    *("dense", "mixed-precision"),  # no formats of matrices
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
)


def read_quantization(reader: ConfigReader) -> CheckpointQuantization | None:
    """The checkpoint's quantisation by its ``quantization_config``; None if that is empty."""
    if not reader.raw:
        return None
    method = reader.raw.get("quant_method")
    if method in _METHODS:
        return _METHODS[method](reader)
    if method == "bitsandbytes" or (method is None and (reader.flag("load_in_4bit") or reader.flag("load_in_8bit"))):
        raise UnsupportedModelError(
            "the checkpoint is quantized with 'bitsandbytes', which cannot be read: use the original checkpoint with "
            "quantization='int8' or 'int4', which quantises it as it is loaded"
        )
    raise UnsupportedModelError(
        f"the checkpoint is quantized with {method!r}, which cannot be read; supported: {', '.join(_METHODS)}; "
        "or use the float16, bfloat16 or float32 checkpoint"
    )


def _gptq(reader: ConfigReader) -> CheckpointQuantization:
    bits, group = _bits(reader, "bits", (4, 8)), _group(reader, "group_size")
    checkpoint_format = reader.only(reader.named("checkpoint_format", "format"), "gptq", "gptq_v2")
    for name, value in (("pack_dtype", "int32"), ("is_marlin_format", False), ("dynamic", {})):
        reader.only(name, value)
    reordered = reader.flag("desc_act") and not reader.flag("static_groups") and group is not None
    schemes = (QuantizationScheme(f"int{bits}", group, symmetric=False),)
    is_v1 = checkpoint_format == "gptq"
    return CheckpointQuantization("gptq", schemes, zeros_minus_one=is_v1, reordered=reordered)


def _awq(reader: ConfigReader) -> CheckpointQuantization:
    reader.only("version", "gemm", "GEMM")
    _bits(reader, "w_bit" if "w_bit" in reader.raw else "bits", (4,))
    group = _group(reader, "q_group_size" if "q_group_size" in reader.raw else "group_size")
    return CheckpointQuantization("awq", (QuantizationScheme("int4", group, symmetric=False),))


def _compressed_tensors(reader: ConfigReader) -> CheckpointQuantization:
    ConfigReader(reader.table("sparsity_config"), reader.file).only("format", "dense")
    reader.with_defaults(format="none").only("format", *_COMPRESSED_FORMATS)
    schemes = []
    for name, group in reader.table("config_groups").items():
        if not isinstance(group, dict):
            raise ConfigError(f"{reader.file}: config_groups.{name} must be an object, not {group!r}")
        inside = ConfigReader(group, reader.file)
        inside.only("format", *_COMPRESSED_FORMATS)
        if not (weights := inside.table("weights")):
            continue
        inside = ConfigReader(weights, reader.file)
        kind = inside.only("type", "int", "float")
        bits = _bits(inside, "num_bits", (4, 8) if kind == "int" else (8,))
        strategies = ("tensor", "channel", "group", "block")
        strategy = inside.only("strategy", "group" if weights.get("group_size") else "tensor", *strategies)
        size = _group(inside, "group_size") if strategy == "group" else None
        block = _block(inside, "block_structure") if strategy == "block" else None
        number = f"int{bits}" if kind == "int" else "fp8"
        schemes.append(QuantizationScheme(number, size, block, weights.get("symmetric") is not False))
    return CheckpointQuantization("compressed-tensors", tuple(schemes))


def _fp8(reader: ConfigReader) -> CheckpointQuantization:
    reader.only("fmt", "e4m3", "float8_e4m3fn")
    block = None if reader.raw.get("weight_block_size") is None else _block(reader, "weight_block_size")
    return CheckpointQuantization("fp8", (QuantizationScheme("fp8", block=block),))


def _mxfp4(_: ConfigReader) -> CheckpointQuantization:
    return CheckpointQuantization("mxfp4", (QuantizationScheme("mxfp4", 32),))


_METHODS: dict[Any, Callable[[ConfigReader], CheckpointQuantization]] = {
    **{"awq": _awq, "compressed-tensors": _compressed_tensors, "fp8": _fp8, "gptq": _gptq, "mxfp4": _mxfp4}
}


def _bits(reader: ConfigReader, name: str, supported: tuple[int, ...]) -> int:
    bits = reader.positive(name)
    if bits not in supported:
        raise UnsupportedModelError(
            f"{reader.file}: weights of {bits} bits are not supported; supported: {', '.join(map(str, supported))}"
        )
    return bits


def _group(reader: ConfigReader, name: str) -> int | None:
    """The number of values that share a scale; None (-1 in the file) is the whole row."""
    return None if reader.raw.get(name) == -1 else reader.positive(name)


def _block(reader: ConfigReader, name: str) -> tuple[int, int]:
    value = reader.raw.get(name)
    if not isinstance(value, list) or len(value) != 2 or any(type(size) is not int or size < 1 for size in value):
        raise ConfigError(f"{reader.file}: {name} must be a list of two positive integers, not {value!r}")
    return value[0], value[1]
