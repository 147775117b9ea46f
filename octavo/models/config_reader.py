"""Readers of the values of a config.json, in the spellings of transformers 4 and 5, for ``Network.read_config``.

What several families have is read here, as fields of ``ModelConfig``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.json_values import JsonValues
from octavo.core.model_config import ROPE_TYPES, RopeConfig

if TYPE_CHECKING:
    from octavo.kernels.packed_weight import Activation

_DTYPES = ("float32", "bfloat16", "float16")
#: Names of activations in config.json; several approximate gelu by the same tanh.
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True)
class ConfigReader(JsonValues):
    """The values of a config.json."""

    raw: dict[str, Any]
    #: The content of generation_config.json.
    generation: dict[str, Any] = field(default_factory=dict)

    def with_defaults(self, **values: Any) -> ConfigReader:
        """The same object, with these values where it has none."""
        given = {name: value for name, value in self.raw.items() if value is not None}
        return replace(self, raw={**values, **given})

    def named(self, *names: str) -> str:
        """The first of several names of one value that the object has; the last one if it has none of them."""
        return next((name for name in names if self.raw.get(name) is not None), names[-1])


def common_fields(reader: ConfigReader) -> dict[str, Any]:
    """Fields of ``ModelConfig`` that all decoders name alike: vocabulary, special tokens, dtype."""
    return {
        "vocab_size": reader.positive("vocab_size"),
        "tie_word_embeddings": reader.flag("tie_word_embeddings"),
        "checkpoint_dtype": _dtype(reader.raw),
        "eos_token_ids": _merged_ids("eos_token_id", reader.generation, reader.raw),
        "bos_token_id": next(iter(_merged_ids("bos_token_id", reader.generation, reader.raw)), None),
    }


def shape_fields(reader: ConfigReader, head_dim: int | None = None) -> dict[str, Any]:
    """Fields of ``ModelConfig`` that Llama and its like have, whose heads may have a size of their own.

    Where config.json does not give it, it is ``head_dim``, or by default that of heads that are as wide as the network.

    Raises:
        ConfigError: a value is missing, of the wrong type or impossible.
    """
    fields = _common_shape(reader, "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    head_dim = reader.positive("head_dim", head_dim or fields["hidden_size"] // fields["num_heads"] or 1)
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
) -> dict[str, Any]:
    """Fields of ``ModelConfig`` that all families have; the arguments are their names in config.json.

    Without ``kv_heads``, or where config.json lacks it, there are as many KV heads as query heads. Without
    ``head_dim``, heads are together as wide as the network.

    Raises:
        ConfigError: a value is missing, of the wrong type or impossible.
    """
    fields = _common_shape(reader, hidden, layers, heads, kv_heads)
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
    return {
        "hidden_size": reader.positive(hidden),
        "num_layers": reader.positive(layers),
        "num_heads": count,
        "num_kv_heads": kv_count,
        **common_fields(reader),
    }


def refuse_activations(reader: ConfigReader, *supported: str) -> None:
    """Raises UnsupportedModelError if hidden_act is not in ``supported``; the first entry is the default."""
    activation = reader.raw.get("hidden_act", supported[0])
    if activation not in supported:
        raise UnsupportedModelError(f"activation hidden_act={activation!r} is not supported; supported: {supported[0]}")


def read_activation(reader: ConfigReader, name: str, default: str) -> Activation:
    """The activation that config.json names under ``name``.

    Raises:
        UnsupportedModelError: there is no such activation here.
    """
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
    """``rope`` and ``max_position`` of families that rotate a share of each head.

    Raises:
        ConfigError: a value is impossible; the rotated dimensions are no pairs.
        UnsupportedModelError: the rope type is not supported.
    """
    rope = read_rope(reader)
    rotated = int(head_dim * rope.partial_rotary_factor)
    if rotated % 2 or not rotated:
        raise ConfigError(
            f"{reader.file}: the rotated share of a head, partial_rotary_factor ({rope.partial_rotary_factor}) of "
            f"{head_dim} dimensions, must be an even number of them, not {rotated}"
        )
    return {"rope": rope, "max_position": longest_context(rope)}


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
    """Longest context in tokens that a model supports.

    That is max_position_embeddings, or more if the scaling (linear, dynamic, yarn) extends it.
    """
    configured: int = rope.scaling["max_position_embeddings"]
    factor = rope.scaling.get("factor")
    if rope.rope_type not in ("linear", "dynamic", "yarn") or not isinstance(factor, int | float):
        return configured
    original = rope.scaling.get("original_max_position_embeddings") or configured
    return max(configured, int(original * factor))


def _dtype(raw: dict[str, Any]) -> str:
    """The dtype of the saved weights; float32 if the file does not name one, as in transformers 4."""
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UnsupportedModelError(f"weights of type {dtype!r} are not supported; supported: {', '.join(_DTYPES)}")
    return dtype


def read_token_ids(reader: ConfigReader, name: str) -> tuple[int, ...]:
    """Token ids of generation_config.json, then those of config.json; none where neither has any."""
    return _merged_ids(name, reader.generation, reader.raw)


def _merged_ids(name: str, *sources: dict[str, Any]) -> tuple[int, ...]:
    """The ids of all sources without duplicates, those of the first source first."""
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
