"""config.json and generation_config.json of a Hugging Face folder, in their transformers 4 and 5 spellings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ROPE_TYPES, ModelConfig, RopeConfig
from octavo.models.registry import supported_architectures

#: Largest JSON file that is read, in bytes.
_MAX_JSON_BYTES = 16 << 20
#: For config.json files that name no architecture.
_ARCHITECTURE_OF_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DTYPES = ("float32", "bfloat16", "float16")


def read_model_config(folder: Path) -> ModelConfig:
    """The facts of ``folder``/config.json, and the end-of-sequence ids of generation_config.json too.

    ``max_position`` is the length up to which the model is meant to work: max_position_embeddings, or more where the
    rope scaling (linear, dynamic, yarn) extends it.

    Raises:
        ConfigError: config.json is missing, is no JSON object, or a value is missing, of the wrong type or impossible.
        UnsupportedModelError: the architecture, activation, rope type or quantization is not supported.
    """
    raw = _read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else {}
    reader = _Reader(raw, folder / "config.json")
    architecture = _architecture(raw)
    _refuse_unsupported(raw)
    heads, hidden = reader.positive("num_attention_heads"), reader.positive("hidden_size")
    layers = reader.positive("num_hidden_layers")
    kv_heads = reader.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    head_dim = reader.positive("head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden // heads or 1)
    if head_dim % 2:
        raise ConfigError(f"head_dim must be even, not {head_dim}: rotary positions turn pairs of dimensions")
    rope = _rope(reader)
    qkv_bias, o_bias = _attention_biases(architecture, reader)
    return ModelConfig(
        architecture=architecture,
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.positive("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=_longest(rope),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and reader.flag("mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        rope=rope,
        sliding_windows=_windows(architecture, reader, layers),
        checkpoint_dtype=_dtype(raw),
        eos_token_ids=_merged_ids("eos_token_id", generation, raw),
        bos_token_id=next(iter(_merged_ids("bos_token_id", generation, raw)), None),
    )


class _Reader:
    """Typed access to the values of one JSON object; null counts as absent."""

    def __init__(self, raw: dict[str, Any], file: Path) -> None:
        self.raw = raw
        self.file = file

    def positive(self, name: str, default: int | None = None) -> int:
        """A positive integer; without a default it must be there."""
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.file}: {name} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self.file}: {name} must be a positive integer, not {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number above zero."""
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ConfigError(f"{self.file}: {name} must be a number above 0, not {value!r}")
        return float(value)

    def flag(self, name: str) -> bool:
        """A boolean; false when absent."""
        value = self.raw.get(name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{self.file}: {name} must be true or false, not {value!r}")
        return bool(value)

    def table(self, name: str) -> dict[str, Any]:
        """An object; empty when absent."""
        value = self.raw.get(name)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{self.file}: {name} must be an object, not {value!r}")
        return dict(value or {})


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"{file} is missing; a model folder holds config.json, tokenizer.json and *.safetensors")
    if file.stat().st_size > _MAX_JSON_BYTES:
        raise ConfigError(f"{file} has {file.stat().st_size} bytes; at most {_MAX_JSON_BYTES} are read")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{file} is not readable JSON: {e}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object, not {type(value).__name__}")
    return value


def _architecture(raw: dict[str, Any]) -> str:
    supported = supported_architectures()
    named = raw.get("architectures")
    names = named if isinstance(named, list) and named else [_ARCHITECTURE_OF_TYPE.get(str(raw.get("model_type")))]
    for name in names:
        if name in supported:
            return str(name)
    what = f"architecture {named[0]!r}" if isinstance(named, list) and named else f"type {raw.get('model_type')!r}"
    raise UnsupportedModelError(f"model {what} is not supported; supported: {', '.join(supported)}")


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"activation hidden_act={activation!r} is not supported; supported: silu")
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"the checkpoint is quantized with {method!r}, which cannot be read; "
            "use the float16, bfloat16 or float32 checkpoint"
        )


def _attention_biases(architecture: str, reader: _Reader) -> tuple[bool, bool]:
    """Bias on q, k and v; on the output. Qwen2 has the first always, Mistral none, the others as they say."""
    if architecture == "Qwen2ForCausalLM":
        return True, False
    if architecture == "MistralForCausalLM":
        return False, False
    bias = reader.flag("attention_bias")
    return bias, bias


def _windows(architecture: str, reader: _Reader, layers: int) -> tuple[int | None, ...]:
    raw = reader.raw
    if architecture == "MistralForCausalLM":
        # Absent means the 4096 of the first Mistral; null means none.
        given = "sliding_window" not in raw or raw["sliding_window"] is not None
        return (reader.positive("sliding_window", 4096) if given else None,) * layers
    if architecture == "LlamaForCausalLM" or not reader.flag("use_sliding_window"):
        return (None,) * layers
    if "sliding_window" in raw and raw["sliding_window"] is None:
        return (None,) * layers
    window = reader.positive("sliding_window", 4096)
    types = raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise ConfigError(f"{reader.file}: max_window_layers must be an integer, not {first!r}")
        return tuple(window if i >= first else None for i in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise ConfigError(f"{reader.file}: layer_types must be a list of {layers} names, one a layer, not {types!r}")
    unknown = {str(name) for name in types} - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(
            f"layer type {min(unknown)!r} is not supported; supported: full_attention, sliding_attention"
        )
    return tuple(window if name == "sliding_attention" else None for name in types)


def _rope(reader: _Reader) -> RopeConfig:
    """rope_parameters (transformers 5) or rope_theta with rope_scaling (transformers 4)."""
    scaling = reader.table("rope_parameters") or reader.table("rope_scaling")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise UnsupportedModelError("rope parameters that differ between layer types are not supported")
    # "type" is the older name; a file that has both means rope_type.
    old_name = scaling.pop("type", None)
    rope_type = scaling.pop("rope_type", None) or old_name or "default"
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    inside = _Reader(
        {**{k: reader.raw.get(k) for k in ("rope_theta", "partial_rotary_factor")}, **scaling}, reader.file
    )
    theta, partial = inside.number("rope_theta", 10000.0), inside.number("partial_rotary_factor", 1.0)
    if partial > 1:
        raise ConfigError(f"{reader.file}: partial_rotary_factor must be at most 1, not {partial}")
    scaling = {k: v for k, v in scaling.items() if k not in ("rope_theta", "partial_rotary_factor")}
    scaling["max_position_embeddings"] = reader.positive("max_position_embeddings")
    if rope_type in ("llama3", "longrope", "yarn") and reader.raw.get("original_max_position_embeddings"):
        # Phi-3 and its kin keep it outside, where it takes precedence.
        scaling["original_max_position_embeddings"] = reader.positive("original_max_position_embeddings")
    return RopeConfig(theta=theta, rope_type=rope_type, partial_rotary_factor=partial, scaling=scaling)


def _longest(rope: RopeConfig) -> int:
    configured: int = rope.scaling["max_position_embeddings"]
    factor = rope.scaling.get("factor")
    if rope.rope_type not in ("linear", "dynamic", "yarn") or not isinstance(factor, int | float):
        return configured
    original = rope.scaling.get("original_max_position_embeddings") or configured
    return max(configured, int(original * factor))


def _dtype(raw: dict[str, Any]) -> str:
    """What the weights are saved as; files that do not say are taken for float32, as transformers 4 did."""
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UnsupportedModelError(f"weights of type {dtype!r} are not supported; supported: {', '.join(_DTYPES)}")
    return dtype


def _merged_ids(name: str, *sources: dict[str, Any]) -> tuple[int, ...]:
    """The ids of all sources without doubles, those of the first source first."""
    ids: list[int] = []
    for source in sources:
        value = source.get(name)
        for token in value if isinstance(value, list) else [value]:
            if token is None or token in ids:
                continue
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise ConfigError(f"{name} must be a token id or a list of them, not {value!r}")
            ids.append(token)
    return tuple(ids)
