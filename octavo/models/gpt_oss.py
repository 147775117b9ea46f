"""gpt-oss (OpenAI 2025, arXiv 2508.10925): attention sinks, alternating windows, and experts with biases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.kernels.interface import SWIGLU_LIMIT, AttentionSpec, RoutingSpec
from octavo.kernels.weight_rows import QuantizedRows
from octavo.layers.attention import Attention
from octavo.layers.layer import LayerContext, Weight
from octavo.layers.mlp import SparseMoE
from octavo.layers.rope import RotaryRows
from octavo.models.checkpoint import CheckpointEntry, Pairs, Rename, Shapes, Tensor
from octavo.models.config_files import ConfigReader, longest_context, read_rope, read_windows, shape_fields
from octavo.models.llama import LlamaForCausalLM, LlamaLayer


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(ModelConfig):
    """``intermediate_size`` is that of an expert."""

    num_experts: int
    experts_per_token: int

    @property
    def feed_forward_width(self) -> int:
        return self.experts_per_token * (self.hidden_size + 3 * self.intermediate_size)


class SinkAttention(Attention):
    """Attention with the checkpoint's ``sinks`` [heads], see ``AttentionSpec``; each rank has those of its heads."""

    def __init__(
        self, config: ModelConfig, context: LayerContext, spec: AttentionSpec, rotary: RotaryRows | None
    ) -> None:
        super().__init__(config, context, spec, rotary)
        columns = self.qkv.query_columns
        self._own = slice(columns.start // config.head_dim, columns.stop // config.head_dim)
        self.expected["sinks"] = (config.num_heads,)
        self.holds.append(Weight("sinks", (self.heads,), "vector", DType.FLOAT32))
        self._sinks = context.kernels.zeros((self.heads,), DType.FLOAT32)
        self.spec = replace(self.spec, sinks=self._sinks)

    def place(self, shard: str, tensor: np.ndarray) -> None:
        self.kernels.write(self._sinks, np.ascontiguousarray(tensor[self._own], np.float32))


#: A tensor of all experts of a layer, or their biases.
_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(_bias)?")


class UnstackInterleaved:
    """Passes the experts of a layer one by one, and gate and up, whose outputs take turns, apart.

    ``experts.gate_up_proj`` [experts, hidden, 2 * inner] and ``experts.down_proj`` [experts, inner, hidden] have inputs
    before outputs, unlike other matrices; biases are ``gate_up_proj_bias`` and ``down_proj_bias``. The experts of MXFP4
    checkpoints come one by one, as ``experts.0.gate_up_proj.weight`` [2 * inner, hidden] and so on.
    """

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs:
            match = _STACK.fullmatch(name)
            if match and isinstance(tensor, np.ndarray) and tensor.ndim == (2 if match[3] else 3):
                kind = "bias" if match[3] else "weight"
                for index, expert in enumerate(tensor):
                    yield from _gate_and_up(f"{match[1]}.{index}.{match[2]}.{kind}", expert.T)
            else:
                yield from _gate_and_up(name, tensor)


def _gate_and_up(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    before, found, kind = name.rpartition(".gate_up_proj.")
    if not found:
        yield name, tensor
        return
    for first, part in enumerate(("gate_proj", "up_proj")):
        rows = slice(first, None, 2)
        own = tensor.take(rows, slice(None)) if isinstance(tensor, QuantizedRows) else tensor[rows]
        yield f"{before}.{part}.{kind}", own


class GptOssForCausalLM(LlamaForCausalLM):
    checkpoint_map: tuple[CheckpointEntry, ...] = (
        *LlamaForCausalLM.checkpoint_map,
        Rename(r"\.mlp\.router\.", ".mlp.gate."),
        UnstackInterleaved(),
    )

    def __init__(self, config: GptOssConfig, context: LayerContext) -> None:
        self._context_of_experts = context
        # Only the experts of an MXFP4 checkpoint are quantised.
        super().__init__(config, replace(context, quantization=None) if context.quantization == "mxfp4" else context)

    def make_layer(self, index: int, config: ModelConfig, context: LayerContext) -> LlamaLayer:
        assert isinstance(config, GptOssConfig)
        spec = AttentionSpec(config.head_dim**-0.5, config.sliding_windows[index])
        attention = SinkAttention(config, context, spec, self.rotary_table(config, context))
        # The softmax of the chosen experts' logits is that of all, divided by its sum over the chosen ones.
        routing = RoutingSpec(config.experts_per_token, renormalize=True)
        sizes = config.hidden_size, config.intermediate_size, config.num_experts
        experts = SparseMoE(self._context_of_experts, *sizes, routing, bias=True, activation="swiglu_oai")
        return LlamaLayer(config, context, attention, experts)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        reader = reader.with_defaults(**_DEFAULTS, **({} if reader.raw.get("rope_scaling") else _YARN))
        reader.only("hidden_act", "silu")
        reader.only("swiglu_alpha", 1.702)
        reader.only("swiglu_limit", SWIGLU_LIMIT)
        fields, rope = shape_fields(reader), read_rope(reader)
        layers, window = fields["num_layers"], reader.positive("sliding_window")
        windows = read_windows(reader, layers, window)
        experts, chosen = reader.positive("num_local_experts"), reader.positive("num_experts_per_tok")
        if chosen > experts:
            raise ConfigError(f"{reader.file}: num_experts_per_tok ({chosen}) is more than the {experts} experts")
        return GptOssConfig(
            architecture=architecture,
            max_position=longest_context(rope),
            rms_norm_eps=reader.number("rms_norm_eps", 1e-5),
            qkv_bias=reader.flag("attention_bias"),
            o_bias=reader.flag("attention_bias"),
            rope=rope,
            # Unless the file names them, every other layer has a window, from the first one on.
            sliding_windows=windows or tuple(None if layer % 2 else window for layer in range(layers)),
            num_experts=experts,
            experts_per_token=chosen,
            **fields,
        )


#: Values of transformers that config.json may leave out.
_DEFAULTS: dict[str, Any] = {
    **{"head_dim": 64, "attention_bias": True, "sliding_window": 128, "max_position_embeddings": 131072},
    **{"num_local_experts": 128, "num_experts_per_tok": 4, "rope_theta": 150000.0},
}
_YARN: dict[str, Any] = {
    "rope_parameters": {
        **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        "original_max_position_embeddings": 4096,
    }
}
