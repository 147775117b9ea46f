"""The Llama family: Llama, Mistral, Qwen2 and Qwen3, which differ in biases, head norms and windows only.

A network is a stack of layers; a layer is attention and an MLP, each with a norm before it and a residual around it.
"""

from __future__ import annotations

from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.core.kv_spec import KVSpec
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import AttentionSpec, LayerCache
from octavo.layers.base import Layer
from octavo.layers.context import LayerContext
from octavo.layers.latent_attention import LatentAttention
from octavo.layers.linear import GateUpParallelLinear, QKVParallelLinear, RowParallelLinear
from octavo.layers.moe import SparseMoE
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import extend_rotary_table, rotary_table
from octavo.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding
from octavo.models.checkpoint import Drop, Entry
from octavo.models.config import (
    ConfigReader,
    common_fields,
    longest_context,
    read_layer_types,
    read_rope,
    refuse_activations,
)
from octavo.models.network import Network


class LlamaForCausalLM(Network):
    """A decoder-only transformer with its language-model head."""

    # Old checkpoints hold the rotary table; those with tied embeddings may hold the head too.
    checkpoint_map: tuple[Entry, ...] = (Drop(r"rotary_emb\.inv_freq$"), Drop(r"^lm_head\.weight$"))

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        vocab, hidden, tied = config.vocab_size, config.hidden_size, config.tie_word_embeddings
        stage = context.layers_of(config.num_layers)
        self.is_last = stage.stop == config.num_layers
        if stage.start == 0 or (self.is_last and tied):
            self.embed_tokens = self.attach("model.embed_tokens", VocabParallelEmbedding(context, vocab, hidden))
        cos_sin = rotary_table(config, context.device, context.positions)
        self._cos_sin = cos_sin
        self.layers = [self.attach(f"model.layers.{i}", self.make_layer(i, config, context, cos_sin)) for i in stage]
        self.kv_specs = [layer.attention.kv_spec for layer in self.layers]
        if self.is_last:
            self.norm = self.attach("model.norm", RMSNorm(context, hidden, config.rms_norm_eps))
            head = ParallelLMHead(context, vocab, hidden, self.embed_tokens if tied else None)
            self.head = self.attach("lm_head", head)

    def make_layer(self, index: int, config: ModelConfig, context: LayerContext, cos_sin: Tensor) -> DecoderLayer:
        """Layer ``index`` of the network."""
        windows = config.sliding_windows
        attention = Attention(config, context, cos_sin, windows[index] if windows else None)
        return DecoderLayer(config, context, attention, MLP(config, context))

    def position_bytes(self) -> int:
        """Bytes of a row of the rotary table."""
        return self._cos_sin.shape[1] * self._cos_sin.element_size()

    def extend_positions(self, positions: int) -> None:
        """Computes the rotary table anew if it is shorter."""
        extend_rotary_table(self._cos_sin, self.config, positions)

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
        return self.head(hidden)

    def pool(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """The hidden state of each sequence's last token, after the norm: float32 [S, E]."""
        return hidden.index_select(0, batch.query_start_loc[1:] - 1).float()

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json of any of the four architectures."""
        refuse_activations(reader, "silu", "swish")
        heads, hidden = reader.positive("num_attention_heads"), reader.positive("hidden_size")
        layers = reader.positive("num_hidden_layers")
        kv_heads = reader.positive("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ConfigError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
        head_dim = reader.positive("head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden // heads or 1)
        if head_dim % 2:
            raise ConfigError(f"head_dim must be even, not {head_dim}: rotary positions turn pairs of dimensions")
        rope = read_rope(reader)
        qkv_bias, o_bias = _attention_biases(architecture, reader)
        return ModelConfig(
            architecture=architecture,
            hidden_size=hidden,
            intermediate_size=reader.positive("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position=longest_context(rope),
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and reader.flag("mlp_bias"),
            qk_norm=architecture == "Qwen3ForCausalLM",
            rope=rope,
            sliding_windows=_windows(architecture, reader, layers),
            **common_fields(reader),
        )


class DecoderLayer(Layer):
    """Attention, then the MLP; each has the norm of the residual stream as its input and is added to the stream."""

    def __init__(
        self, config: ModelConfig, context: LayerContext, attention: Attention | LatentAttention, mlp: MLP | SparseMoE
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = self.attach("input_layernorm", RMSNorm(context, hidden, eps))
        self.attention = self.attach("self_attn", attention)
        self.mlp_norm = self.attach("post_attention_layernorm", RMSNorm(context, hidden, eps))
        self.mlp = self.attach("mlp", mlp)

    def __call__(self, residual: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """The residual stream after this layer, float32 [T, E]; the input's memory may be reused."""
        residual = self.attention.add_to(residual, self.attention_norm(residual), cache, batch)
        return self.mlp.add_to(residual, self.mlp_norm(residual))


class Attention(Layer):
    """Grouped-query attention with rotary positions over a paged cache."""

    def __init__(self, config: ModelConfig, context: LayerContext, cos_sin: Tensor, window: int | None) -> None:
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
            self.q_norm = self.attach("q_norm", RMSNorm(context, head_dim, config.rms_norm_eps))
            self.k_norm = self.attach("k_norm", RMSNorm(context, head_dim, config.rms_norm_eps))
        self.head_dim = head_dim
        self.heads = [self.qkv.heads, self.qkv.kv_heads, self.qkv.kv_heads]
        self.kv_spec = KVSpec(
            "full" if window is None else "sliding", self.qkv.kv_heads, head_dim, context.kv_dtype_name, window
        )
        self.spec = AttentionSpec(head_dim**-0.5, window)
        context.kernels.check_attention(self.spec)
        self.cos_sin = cos_sin

    def add_to(self, residual: Tensor, x: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """residual + attention of x, both [T, E]; writes the tokens' keys and values to the cache."""
        tokens, kernels = x.shape[0], self.kernels
        q, k, v = self.qkv(x).view(tokens, -1, self.head_dim).split(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = kernels.rotary_and_cache(q, k, v, batch, self.cos_sin, cache)
        attended = kernels.paged_attention(q, cache, batch, self.spec)
        return self.out.add_to(residual, attended.view(tokens, -1))


class MLP(Layer):
    """The gated feed-forward network, down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = self.attach("", GateUpParallelLinear(context, hidden, inner, bias))
        self.down = self.attach("down_proj", RowParallelLinear(context, inner, hidden, bias))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + the network's output for x, both [T, E]."""
        return self.down.add_to(residual, self.gate_up(x))


def _attention_biases(architecture: str, reader: ConfigReader) -> tuple[bool, bool]:
    """(bias on q, k and v; bias on the output): Qwen2 has the first only, Mistral none, others attention_bias."""
    if architecture == "Qwen2ForCausalLM":
        return True, False
    if architecture == "MistralForCausalLM":
        return False, False
    bias = reader.flag("attention_bias")
    return bias, bias


def _windows(architecture: str, reader: ConfigReader, layers: int) -> tuple[int | None, ...]:
    raw = reader.raw
    if architecture == "MistralForCausalLM":
        # Absent: 4096, as in the first Mistral; null: no window.
        given = "sliding_window" not in raw or raw["sliding_window"] is not None
        return (reader.positive("sliding_window", 4096) if given else None,) * layers
    if architecture == "LlamaForCausalLM" or not reader.flag("use_sliding_window"):
        return (None,) * layers
    if "sliding_window" in raw and raw["sliding_window"] is None:
        return (None,) * layers
    window = reader.positive("sliding_window", 4096)
    types = read_layer_types(reader, layers)
    if types is None:
        first = raw.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise ConfigError(f"{reader.file}: max_window_layers must be an integer, not {first!r}")
        return tuple(window if i >= first else None for i in range(layers))
    return tuple(window if name == "sliding_attention" else None for name in types)
