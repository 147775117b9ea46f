"""Explains how the tensors of a checkpoint contradict its configuration: which fields, which tensor, both values.

Shapes come from a few fields: ``_DIMENSIONS`` says from which, by the network's names of tensors. Errors call a field
as its file does: config.json has ``n_embd`` or ``hidden_size``, GGUF files have ``embedding_length``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.core.model_config import ModelConfig
from octavo.models.checkpoint import Shapes

#: Field -> its names in config.json of older families, and the key of a GGUF file.
_NAMES: dict[str, tuple[tuple[str, ...], str]] = {
    "vocab_size": ((), "vocab_size"),
    "hidden_size": (("n_embd", "d_model", "dim"), "embedding_length"),
    "intermediate_size": (("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "hidden_dim"), "feed_forward_length"),
    "moe_intermediate_size": (("intermediate_size",), "expert_feed_forward_length"),
    "num_hidden_layers": (("n_layer", "n_layers", "num_layers"), "block_count"),
    "num_attention_heads": (("n_head", "n_heads", "num_heads"), "attention.head_count"),
    "num_key_value_heads": (("num_kv_heads", "n_head_kv"), "attention.head_count_kv"),
    "head_dim": (("d_kv",), "attention.key_length"),
    "max_position_embeddings": (("n_positions",), "context_length"),
    "type_vocab_size": ((), "type_vocab_size"),
    "hidden_size_per_layer_input": ((), "embedding_length_per_layer_input"),
    "id2label": (("num_labels",), "classifier.output_labels"),
    "linear_num_key_heads": ((), "ssm.group_count"),
    "linear_num_value_heads": ((), "ssm.time_step_rank"),
    "linear_key_head_dim": ((), "ssm.state_size"),
    "linear_value_head_dim": ((), "ssm.inner_size / ssm.time_step_rank"),
    "mamba_n_heads": (("num_heads", "mamba_num_heads"), "ssm.time_step_rank"),
    "mamba_d_head": (("head_dim", "mamba_head_dim"), "ssm.inner_size / ssm.time_step_rank"),
    "mamba_n_groups": (("n_groups",), "ssm.group_count"),
    "mamba_d_state": (("state_size", "ssm_state_size"), "ssm.state_size"),
    "mamba_dt_rank": (("time_step_rank",), "ssm.time_step_rank"),
    "backbone_hidden_size": ((), ""),
    "num_centroids": ((), ""),
}
_QUERIES, _KEYS = ("num_attention_heads", "head_dim"), ("num_key_value_heads", "head_dim")
_WIDTH, _INNER = ("hidden_size",), ("intermediate_size",)
_DELTA_KEYS = ("linear_num_key_heads", "linear_key_head_dim")
_DELTA_VALUES = ("linear_num_value_heads", "linear_value_head_dim")
_SCANNED, _SCAN_KEYS = ("mamba_n_heads", "mamba_d_head"), ("mamba_n_groups", "mamba_d_state")
#: Pattern in a tensor's name -> for each dimension, the fields whose product it is. The first that matches counts.
_DIMENSIONS: tuple[tuple[re.Pattern[str], tuple[tuple[str, ...], ...]], ...] = tuple(
    (re.compile(pattern), fields)
    for pattern, fields in (
        (r"\b(embed_tokens|lm_head)\.", (("vocab_size",), _WIDTH)),
        (r"\bpre_projection\.", (_WIDTH, ())),
        (r"\bpost_projection\.", (("backbone_hidden_size",), _WIDTH)),
        (r"\bmasked_embedding\.centroids\.", (("num_centroids",), _WIDTH)),
        (r"\bembed_positions\.", (("max_position_embeddings",), _WIDTH)),
        (r"\bper_layer_input_gate\.", (("hidden_size_per_layer_input",), _WIDTH)),
        (r"\blayers\.\d+\.per_layer_projection\.", (_WIDTH, ("hidden_size_per_layer_input",))),
        (r"\bper_layer_projection_norm\.", (("hidden_size_per_layer_input",),)),
        (r"\bembed_types\.", (("type_vocab_size",), _WIDTH)),
        (r"\b(score|head)\.out\.", (("id2label",), _WIDTH)),
        (r"\blinear_attn\.in_proj_[qk]\.", (_DELTA_KEYS, _WIDTH)),
        (r"\blinear_attn\.in_proj_[vz]\.", (_DELTA_VALUES, _WIDTH)),
        (r"\blinear_attn\.(in_proj_[ba]\.|A_log$|dt_bias$)", (("linear_num_value_heads",), _WIDTH)),
        (r"\blinear_attn\.norm\.", (("linear_value_head_dim",),)),
        (r"\blinear_attn\.out_proj\.", (_WIDTH, _DELTA_VALUES)),
        (r"\bq_proj\.", (_QUERIES, _WIDTH)),
        (r"\b[kv]_proj\.", (_KEYS, _WIDTH)),
        (r"\bo_proj\.", (_WIDTH, _QUERIES)),
        (r"\b[qk]_norm\.", (("head_dim",),)),
        (r"\bexperts\.\d+\.(gate|up)_proj\.", (("moe_intermediate_size",), _WIDTH)),
        (r"\bexperts\.\d+\.down_proj\.", (_WIDTH, ("moe_intermediate_size",))),
        (r"\b(gate_proj|up_proj|fc1)\.", (_INNER, _WIDTH)),
        (r"\b(down_proj|fc2)\.", (_WIDTH, _INNER)),
        (r"\bin_proj_[zx]\.", (_SCANNED, _WIDTH)),
        (r"\bin_proj_[bc]\.", (_SCAN_KEYS, _WIDTH)),
        (r"\bin_proj_dt\.", (("mamba_n_heads",), _WIDTH)),
        (r"\bmamba\.norm\.|\bmixer\.norm\.", (_SCANNED,)),
        (r"\bdt_proj\.", ((), ("mamba_dt_rank",))),
        (r"\bdt_layernorm\.", (("mamba_dt_rank",),)),
        (r"\b[bc]_layernorm\.", (("mamba_d_state",),)),
        (r"\bA_log$", (("mamba_n_heads",), ("mamba_d_state",))),
        (r"\b(D|dt_bias)$", (("mamba_n_heads",),)),
        (r"norm\w*\.(weight|bias)$", (_WIDTH,)),
    )
)
_LAYER = re.compile(r"^(.*?\blayers)\.(\d+)\.")


class Fields:
    """The fields of one file's configuration that make the shapes of tensors."""

    def __init__(self, config: ModelConfig, source: str, names: Mapping[str, str]) -> None:
        """``source``: the file, such as config.json. ``names``: what it calls the fields that are called otherwise."""
        self._config, self.source, self._names = config, source, names

    @classmethod
    def of_json(cls, config: ModelConfig, raw: Mapping[str, Any]) -> Fields:
        """For a config.json, whose fields may be inside an object such as text_config."""
        held = set(raw).union(*(value for value in raw.values() if isinstance(value, Mapping)))
        names = {}
        for name, (others, _) in _NAMES.items():
            if name not in held and (used := next((other for other in others if other in held), None)) is not None:
                names[name] = used
        return cls(config, "config.json", names)

    @classmethod
    def of_gguf(cls, config: ModelConfig, arch: str) -> Fields:
        return cls(config, "its metadata", {name: f"{arch}.{key}" for name, (_, key) in _NAMES.items()})

    def name(self, field: str) -> str:
        return self._names.get(field, field)

    def explain(self, tensor: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
        """For each dimension that differs, the fields that make the expected one, and the tensor's; "": unknown."""
        fields = _dimensions(tensor)
        if fields is None or len(shape) != len(expected):
            return ""
        told = []
        for names, ours, theirs in zip(fields, expected, shape, strict=False):
            product, text = self._product(names, tensor)
            if ours != theirs and product == ours:
                told.append(f"{self.source} has {text}, the tensor {theirs}")
        return "".join(f": {text}" if not i else f"; {text}" for i, text in enumerate(told))

    def explain_rows(self, tensors: Iterable[str]) -> str:
        """The fields that make the numbers of rows of some tensors; "": unknown."""
        told = dict.fromkeys(
            self._product(fields[0], tensor)[1] for tensor in tensors if (fields := _dimensions(tensor)) is not None
        )
        return f": {self.source} has {', '.join(told)}" if told else ""

    def _product(self, names: tuple[str, ...], tensor: str) -> tuple[int, str]:
        """The product of fields, and what they and it are: ``num_attention_heads * head_dim = 6 * 8 = 48``."""
        values = [self._value(name, tensor) for name in names]
        product = math.prod(values)
        factors = f"{' * '.join(map(str, values))} = " if len(values) > 1 else ""
        return product, f"{' * '.join(map(self.name, names))} = {factors}{product}"

    def _value(self, field: str, tensor: str) -> int:
        """The field's value for a tensor; 0: the configuration has none."""
        config: Any = self._config
        if tensor.startswith("encoder.") and hasattr(config, "encoder"):
            config = config.encoder
        scan = getattr(config, "mamba2", None) or getattr(config, "mamba1", None)
        delta = getattr(config, "delta", None)
        values = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "moe_intermediate_size": getattr(getattr(config, "mixture", getattr(config, "experts", None)), "inner", 0),
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": getattr(config, "position_rows", 0),
            "type_vocab_size": getattr(config, "type_rows", 0),
            "hidden_size_per_layer_input": getattr(config, "per_layer_size", 0),
            "id2label": len(config.labels),
            "linear_num_key_heads": getattr(delta, "key_heads", 0),
            "linear_num_value_heads": getattr(delta, "value_heads", 0),
            "linear_key_head_dim": getattr(delta, "key_dim", 0),
            "linear_value_head_dim": getattr(delta, "value_dim", 0),
            "mamba_n_heads": getattr(scan, "heads", 0),
            "mamba_d_head": getattr(scan, "head_dim", 0),
            "mamba_n_groups": getattr(scan, "groups", 0),
            "mamba_d_state": getattr(scan, "state_size", 0),
            "mamba_dt_rank": getattr(scan, "dt_rank", 0),
            "backbone_hidden_size": getattr(config, "backbone_hidden_size", 0),
            "num_centroids": getattr(config, "centroids", 0),
        }
        return values[field]

    def layers(self, names: Iterable[str], shapes: Shapes) -> str:
        """What the configuration and the tensors say of the number of layers; "": they agree.

        ``names`` are the network's names of the file's tensors, whole or fused.
        """
        held, expected = (_layers_of(each) for each in (names, shapes))
        for stack, indices in expected.items():
            stored = held.get(stack, set())
            if not stored or stored == indices or stored != set(range(len(stored))):
                continue  # all are missing, or one in the middle: this is not about their number
            last = f"the last is {stack}.{max(stored)}"
            field = self.name("num_hidden_layers")
            return f"{self.source} has {field} = {len(indices)}, but the checkpoint has {len(stored)} layers ({last})"
        return ""


def _dimensions(tensor: str) -> tuple[tuple[str, ...], ...] | None:
    """The fields of each dimension of a tensor; None: unknown."""
    if tensor.startswith("tower."):
        return None
    return next((fields for pattern, fields in _DIMENSIONS if pattern.search(tensor)), None)


def _layers_of(names: Iterable[str]) -> dict[str, set[int]]:
    """The numbers of layers by the name before them."""
    layers: dict[str, set[int]] = {}
    for name in names:
        if (match := _LAYER.match(name)) is not None:
            layers.setdefault(match[1], set()).add(int(match[2]))
    return layers
