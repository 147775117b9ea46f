"""Mixtures of experts of the Llama family: Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE.

They are Llama with a ``SparseMoE`` instead of the MLP in all or some layers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.kernels.experts import RoutingSpec
from octavo.layers.attention import Attention
from octavo.layers.context import LayerContext
from octavo.layers.moe import SparseMoE
from octavo.models.checkpoint import CheckpointEntry, Rename, Unstack
from octavo.models.config_reader import ConfigReader, read_windows
from octavo.models.llama import LlamaForCausalLM, LlamaLayer, make_mlp
from octavo.models.olmo2 import norm_over_heads


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(ModelConfig):
    """``intermediate_size`` is that of layers without experts."""

    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    #: Inner size of an expert that every token has; 0: none.
    shared_intermediate_size: int
    #: Whether the weights of a token's experts are divided by their sum.
    renormalize: bool
    #: For each layer, whether it has experts.
    sparse_layers: tuple[bool, ...]

    @property
    def feed_forward_width(self) -> int:
        """That of a layer without experts, or of the experts of a token and the shared one."""
        chosen = self.experts_per_token * (self.hidden_size + 3 * self.expert_intermediate_size)
        return max(3 * self.intermediate_size, chosen + 3 * self.shared_intermediate_size)


class MixtureForCausalLM(LlamaForCausalLM):
    """A decoder-only transformer with mixtures of experts."""

    # Mixtral's names, and those of checkpoints with stacked experts.
    checkpoint_map: tuple[CheckpointEntry, ...] = (
        *LlamaForCausalLM.checkpoint_map,
        Rename(r"\.block_sparse_moe\.", ".mlp."),
        Rename(r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        Rename(r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
        Rename(r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
        Unstack("gate_up_proj", ("gate_proj", "up_proj")),
        Unstack("down_proj", ("down_proj",)),
    )

    def make_layer(self, index: int, config: ModelConfig, context: LayerContext) -> LlamaLayer:
        """A layer with experts, or without."""
        assert isinstance(config, MixtureConfig)
        mlp = _experts(config, context) if config.sparse_layers[index] else make_mlp(config, context)
        return LlamaLayer(config, context, self.make_attention(index, config, context), mlp)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json of any of the four architectures."""
        base = super().read_config("LlamaForCausalLM", reader)
        values = {field.name: getattr(base, field.name) for field in fields(ModelConfig)}
        qwen, qwen2 = architecture.startswith("Qwen"), architecture == "Qwen2MoeForCausalLM"
        if reader.raw.get("clip_qkv") is not None:
            raise UnsupportedModelError(f"clip_qkv={reader.raw['clip_qkv']!r} is not supported; supported: null")
        experts = reader.positive("num_local_experts" if "num_local_experts" in reader.raw else "num_experts")
        chosen = reader.positive("num_experts_per_tok")
        if chosen > experts:
            raise ConfigError(f"{reader.file}: num_experts_per_tok ({chosen}) is more than the {experts} experts")
        values |= {
            "architecture": architecture,
            "qkv_bias": base.qkv_bias or (qwen2 and (reader.raw.get("qkv_bias") is None or reader.flag("qkv_bias"))),
            "qk_norm": architecture == "Qwen3MoeForCausalLM",
            "sliding_windows": _windows(architecture, reader, base.num_layers),
        }
        return MixtureConfig(
            **values,
            num_experts=experts,
            experts_per_token=chosen,
            expert_intermediate_size=reader.positive("moe_intermediate_size") if qwen else base.intermediate_size,
            shared_intermediate_size=reader.positive("shared_expert_intermediate_size") if qwen2 else 0,
            renormalize=architecture == "MixtralForCausalLM" or reader.flag("norm_topk_prob"),
            sparse_layers=_sparse_layers(reader, base.num_layers) if qwen else (True,) * base.num_layers,
        )


class OlmoeForCausalLM(MixtureForCausalLM):
    """OLMoE: norms over all heads of q and over all of k, before the rotation."""

    def make_attention(self, index: int, config: ModelConfig, context: LayerContext) -> Attention:
        """Attention with these norms."""
        return norm_over_heads(super().make_attention(index, config, context), config, context)


def _experts(config: MixtureConfig, context: LayerContext) -> SparseMoE:
    shared = config.shared_intermediate_size
    routing = RoutingSpec(config.experts_per_token, renormalize=config.renormalize, shared=int(shared > 0))
    hidden, inner = config.hidden_size, config.expert_intermediate_size
    return SparseMoE(context, hidden, inner, config.num_experts, routing, shared_inner=shared)


def _windows(architecture: str, reader: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """Mixtral's and Qwen3-MoE's window is that of all layers; Qwen2-MoE names the layers that have it."""
    given = architecture == "MixtralForCausalLM" or reader.flag("use_sliding_window")
    if not given or not reader.raw.get("sliding_window"):
        return (None,) * layers
    window = reader.positive("sliding_window")
    if architecture != "Qwen2MoeForCausalLM":
        return (window,) * layers
    windows = read_windows(reader, layers, window)
    if windows is None:
        raise ConfigError(f"{reader.file}: with use_sliding_window, layer_types must name the layers that have it")
    return windows


def _sparse_layers(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Every decoder_sparse_step-th layer has experts, except those of mlp_only_layers."""
    step, dense = reader.positive("decoder_sparse_step", 1), reader.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise ConfigError(f"{reader.file}: mlp_only_layers must be a list of layers, not {dense!r}")
    return tuple((index + 1) % step == 0 and index not in dense for index in range(layers))
