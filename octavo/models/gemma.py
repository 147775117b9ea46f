"""The Gemma family: Gemma (arXiv 2403.08295), Gemma 2 (arXiv 2408.00118), the text part of Gemma 3 (arXiv 2503.19786).

All scale the embeddings by the root of their size, hold norm weights as their difference from one, and gate the MLP by
gelu. Gemma 2 also norms what attention and MLP add to the residual stream, caps scores and logits, and gives a window
to every other layer. Gemma 3 has norms on queries and keys instead of caps, five layers with a window for each global
one, and rotates the two kinds by bases of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.kv_spec import KVSpec
from octavo.core.model_config import ModelConfig, RopeConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import AttentionSpec, LayerCache
from octavo.layers.base import Layer
from octavo.layers.context import LayerContext
from octavo.layers.linear import GateUpParallelLinear, QKVParallelLinear, RowParallelLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import extend_rotary_table, rotary_table
from octavo.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding
from octavo.models.checkpoint import Drop, Rename
from octavo.models.config import ConfigReader, common_fields, read_layer_types, read_rope, refuse_activations
from octavo.models.network import Network


@dataclass(frozen=True)
class GemmaConfig(ModelConfig):
    """A ``ModelConfig`` whose ``rope`` is that of the global layers."""

    #: Of the layers with a window.
    local_rope: RopeConfig = field(default_factory=RopeConfig)
    #: Scores are query * key * query_scale.
    query_scale: float = 0.0625
    #: Caps of attention scores and of logits: ``cap * tanh(x / cap)``.
    score_cap: float | None = None
    logit_cap: float | None = None
    #: Whether norms stand also after attention and MLP.
    post_norms: bool = False


class GemmaForCausalLM(Network):
    """A decoder-only transformer with its language-model head."""

    # Checkpoints that also see images hold this network as their language model.
    checkpoint_map = (
        Rename(r"^(model\.)?language_model\.(model\.)?", "model."),
        Rename(r"^model\.lm_head\.", "lm_head."),
        Drop(r"^(model\.)?(vision_tower|multi_modal_projector)\."),
        Drop(r"rotary_emb\.inv_freq$"),
        Drop(r"^lm_head\.weight$"),
    )

    def __init__(self, config: GemmaConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        vocab, hidden, tied = config.vocab_size, config.hidden_size, config.tie_word_embeddings
        stage = context.layers_of(config.num_layers)
        self.is_last = stage.stop == config.num_layers
        if stage.start == 0 or (self.is_last and tied):
            # As it was trained: the factor is rounded to the type of the embeddings.
            scale = torch.tensor(hidden**0.5, dtype=context.dtype).item()
            embedding = VocabParallelEmbedding(context, vocab, hidden, scale)
            self.embed_tokens = self.attach("model.embed_tokens", embedding)
        configs = [config, replace(config, rope=config.local_rope)]
        self._tables = [(of, rotary_table(of, context.device, context.positions)) for of in configs]
        (_, full), (_, local) = self._tables
        kind = PostNormLayer if config.post_norms else PreNormLayer
        self.layers = [
            self.attach(f"model.layers.{i}", kind(config, context, local if window else full, window))
            for i, window in enumerate(config.sliding_windows)
            if i in stage
        ]
        self.kv_specs = [layer.attention.kv_spec for layer in self.layers]
        if self.is_last:
            self.norm = self.attach("model.norm", _norm(config, context, hidden))
            head = ParallelLMHead(context, vocab, hidden, self.embed_tokens if tied else None)
            self.head = self.attach("lm_head", head)
        self.kernels, self.logit_cap = context.kernels, config.logit_cap

    def position_bytes(self) -> int:
        """Bytes of a row of both rotary tables."""
        return sum(table.shape[1] * table.element_size() for _, table in self._tables)

    def extend_positions(self, positions: int) -> None:
        """Computes the rotary tables anew if they are shorter."""
        for config, table in self._tables:
            extend_rotary_table(table, config, positions)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids int64 [T] to the residual stream float32 [T, E]."""
        return self.embed_tokens(token_ids)

    def forward_layers(self, residual: Tensor, batch: ForwardBatch, kv_caches: list[LayerCache]) -> Tensor:
        """The residual stream through the layers of this stage, and on the last one the norm after them."""
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            residual = layer(residual, cache, batch)
        return self.norm(residual) if self.is_last else residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, E] to logits float32 [n, vocab]."""
        logits = self.head(hidden)
        return logits if self.logit_cap is None else self.kernels.soft_cap(logits, self.logit_cap)

    def pool(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """The hidden state of each sequence's last token, after the norm: float32 [S, E]."""
        return hidden.index_select(0, batch.query_start_loc[1:] - 1).float()

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json of any of the architectures; of one that sees images, of its text part."""
        given = reader.raw | reader.table("text_config")
        given["hidden_act"] = given.get("hidden_activation") or given.get("hidden_act") or "gelu_pytorch_tanh"
        reader = replace(reader, raw=_DEFAULTS[architecture] | given)
        # "gelu" in the first Gemma's files means what it was trained with, which is by tanh.
        refuse_activations(reader, "gelu_pytorch_tanh", *(["gelu"] if architecture == "GemmaForCausalLM" else []))
        if reader.flag("use_bidirectional_attention"):
            raise UnsupportedModelError("use_bidirectional_attention=true is not supported: attention is causal")
        heads, kv_heads = reader.positive("num_attention_heads"), reader.positive("num_key_value_heads")
        if heads % kv_heads:
            raise ConfigError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
        head_dim, layers = reader.positive("head_dim"), reader.positive("num_hidden_layers")
        if head_dim % 2:
            raise ConfigError(f"head_dim must be even, not {head_dim}: rotary positions turn pairs of dimensions")
        rope, local_rope = _ropes(reader)
        return GemmaConfig(
            architecture=architecture,
            hidden_size=reader.positive("hidden_size"),
            intermediate_size=reader.positive("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position=reader.positive("max_position_embeddings"),  # a scaled rope is part of it
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            qkv_bias=reader.flag("attention_bias"),
            o_bias=reader.flag("attention_bias"),
            qk_norm=architecture.startswith("Gemma3"),
            rope=rope,
            local_rope=local_rope,
            sliding_windows=_windows(reader, layers),
            query_scale=reader.number("query_pre_attn_scalar", head_dim) ** -0.5,
            score_cap=_cap(reader, "attn_logit_softcapping"),
            logit_cap=_cap(reader, "final_logit_softcapping"),
            post_norms=architecture != "GemmaForCausalLM",
            **common_fields(reader),
        )


class PostNormLayer(Layer):
    """A layer of Gemma 2 and 3: norms before attention and MLP, and on what they add to the residual stream."""

    def __init__(self, config: GemmaConfig, context: LayerContext, cos_sin: Tensor, window: int | None) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.attention_norm = self.attach("input_layernorm", _norm(config, context, hidden))
        self.attention = self.attach("self_attn", Attention(config, context, cos_sin, window))
        self.attention_post_norm = self.attach("post_attention_layernorm", _norm(config, context, hidden))
        self.mlp_norm = self.attach("pre_feedforward_layernorm", _norm(config, context, hidden))
        self.mlp = self.attach("mlp", MLP(config, context))
        self.mlp_post_norm = self.attach("post_feedforward_layernorm", _norm(config, context, hidden))

    def __call__(self, residual: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """The residual stream after this layer, float32 [T, E]; the input's memory may be reused."""
        attended = self.attention(self.attention_norm(residual), cache, batch)
        residual = self.attention_post_norm.add_to(residual, self.attention.out(attended))
        inner = self.mlp.gate_up(self.mlp_norm(residual))
        return self.mlp_post_norm.add_to(residual, self.mlp.down(inner))


class PreNormLayer(Layer):
    """A layer of the first Gemma: norms before attention and MLP only."""

    def __init__(self, config: GemmaConfig, context: LayerContext, cos_sin: Tensor, window: int | None) -> None:
        super().__init__()
        self.attention_norm = self.attach("input_layernorm", _norm(config, context, config.hidden_size))
        self.attention = self.attach("self_attn", Attention(config, context, cos_sin, window))
        self.mlp_norm = self.attach("post_attention_layernorm", _norm(config, context, config.hidden_size))
        self.mlp = self.attach("mlp", MLP(config, context))

    def __call__(self, residual: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """The residual stream after this layer, float32 [T, E]; the input's memory may be reused."""
        attended = self.attention(self.attention_norm(residual), cache, batch)
        residual = self.attention.out.add_to(residual, attended)
        return self.mlp.down.add_to(residual, self.mlp.gate_up(self.mlp_norm(residual)))


class Attention(Layer):
    """Grouped-query attention with rotary positions over a paged cache, and the projection ``out`` after it."""

    def __init__(self, config: GemmaConfig, context: LayerContext, cos_sin: Tensor, window: int | None) -> None:
        super().__init__()
        heads, head_dim, hidden = config.num_heads, config.head_dim, config.hidden_size
        self.kernels = context.kernels
        self.qkv = self.attach(
            "", QKVParallelLinear(context, hidden, heads, config.num_kv_heads, head_dim, config.qkv_bias)
        )
        out = RowParallelLinear(context, heads * head_dim, hidden, config.o_bias, self.qkv.query_columns)
        self.out = self.attach("o_proj", out)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = self.attach("q_norm", _norm(config, context, head_dim))
            self.k_norm = self.attach("k_norm", _norm(config, context, head_dim))
        self.head_dim = head_dim
        self.heads = [self.qkv.heads, self.qkv.kv_heads, self.qkv.kv_heads]
        self.kv_spec = KVSpec(
            "full" if window is None else "sliding", self.qkv.kv_heads, head_dim, context.kv_dtype_name, window
        )
        self.spec = AttentionSpec(config.query_scale, window, config.score_cap)
        context.kernels.check_attention(self.spec)
        self.cos_sin = cos_sin

    def __call__(self, x: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """Attention of x [T, E], the input of ``out``; writes the tokens' keys and values to the cache."""
        tokens, kernels = x.shape[0], self.kernels
        q, k, v = self.qkv(x).view(tokens, -1, self.head_dim).split(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = kernels.rotary_and_cache(q, k, v, batch, self.cos_sin, cache)
        return kernels.paged_attention(q, cache, batch, self.spec).view(tokens, -1)


class MLP(Layer):
    """The gated feed-forward network, down(gelu(gate(x)) * up(x))."""

    def __init__(self, config: GemmaConfig, context: LayerContext) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = self.attach("", GateUpParallelLinear(context, hidden, inner, False, "gelu_tanh"))
        self.down = self.attach("down_proj", RowParallelLinear(context, inner, hidden, False))


def _norm(config: GemmaConfig, context: LayerContext, size: int) -> RMSNorm:
    return RMSNorm(context, size, config.rms_norm_eps, unit_offset=True)


#: What config.json leaves out if it is the default of transformers; files of Gemma 3 leave out much.
_COMMON: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_GEMMA2 = _COMMON | {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = _GEMMA2 | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_DEFAULTS = {
    "GemmaForCausalLM": _COMMON
    | {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
}


def _ropes(reader: ConfigReader) -> tuple[RopeConfig, RopeConfig]:
    """The rope of global layers and of those with a window: ``rope_parameters`` by layer type, or the older spelling.

    In that one Gemma 3 has ``rope_theta`` and ``rope_scaling`` for the former, ``rope_local_base_freq`` for the latter.
    """
    raw = reader.raw
    if "rope_local_base_freq" not in raw:  # before Gemma 3 all layers rotate alike
        rope = read_rope(reader)
        return rope, rope
    by_type = replace(reader, raw=reader.table("rope_parameters"))
    full = {"rope_theta": raw["rope_theta"]} | reader.table("rope_scaling") | by_type.table("full_attention")
    local = {"rope_theta": raw["rope_local_base_freq"]} | by_type.table("sliding_attention")
    read = [read_rope(replace(reader, raw=raw | {"rope_parameters": given})) for given in (full, local)]
    return read[0], read[1]


def _windows(reader: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """The window of each layer: by ``layer_types``, or the last of each ``sliding_window_pattern`` layers has none."""
    if "sliding_window_pattern" not in reader.raw:
        return (None,) * layers
    window, types = reader.positive("sliding_window"), read_layer_types(reader, layers)
    if types is None:
        pattern = reader.positive("sliding_window_pattern")
        return tuple(window if (i + 1) % pattern else None for i in range(layers))
    return tuple(window if name == "sliding_attention" else None for name in types)


def _cap(reader: ConfigReader, name: str) -> float | None:
    return None if reader.raw.get(name) is None else reader.number(name, 1.0)
