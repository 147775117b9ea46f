"""The Llama family: Llama, Mistral, Qwen2 and Qwen3 differ in biases, head norms and windows only.

Reads top down: a network is layers; a layer is attention and an MLP, with a norm before each and a residual around it.
"""

from __future__ import annotations

from torch import Tensor

from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import AttentionSpec, LayerCache
from octavo.layers.base import Layer
from octavo.layers.context import LayerContext
from octavo.layers.linear import GateUpParallelLinear, QKVParallelLinear, RowParallelLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import rotary_table
from octavo.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding


class LlamaForCausalLM(Layer):
    """A decoder-only transformer with its language-model head."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        self.config = config
        vocab, hidden = config.vocab_size, config.hidden_size
        cos_sin = rotary_table(config, context.device)
        self.embed = self.attach("model.embed_tokens", VocabParallelEmbedding(context, vocab, hidden))
        self.layers = [
            self.attach(f"model.layers.{i}", DecoderLayer(config, context, cos_sin, window))
            for i, window in enumerate(config.sliding_windows or (None,) * config.num_layers)
        ]
        self.norm = self.attach("model.norm", RMSNorm(context, hidden, config.rms_norm_eps))
        tied = self.embed if config.tie_word_embeddings else None
        self.head = self.attach("lm_head", ParallelLMHead(context, vocab, hidden, tied))
        #: KV heads that this rank's cache holds.
        self.num_kv_heads = self.layers[0].attention.qkv.kv_heads

    def forward(self, batch: ForwardBatch, kv_caches: list[LayerCache]) -> Tensor:
        """The batch's tokens to hidden states [T, E] after the last norm; writes their keys and values."""
        residual = self.embed(batch.token_ids)
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            residual = layer(residual, cache, batch)
        return self.norm(residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, E] to logits float32 [n, vocab]."""
        return self.head(hidden)


class DecoderLayer(Layer):
    """Attention, then the MLP, each of them added to the residual stream, of which it sees the norm."""

    def __init__(self, config: ModelConfig, context: LayerContext, cos_sin: Tensor, window: int | None) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = self.attach("input_layernorm", RMSNorm(context, hidden, eps))
        self.attention = self.attach("self_attn", Attention(config, context, cos_sin, window))
        self.mlp_norm = self.attach("post_attention_layernorm", RMSNorm(context, hidden, eps))
        self.mlp = self.attach("mlp", MLP(config, context))

    def __call__(self, residual: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """The residual stream after this layer, float32 [T, E]; the memory of the one before may be reused."""
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
        self.out = self.attach("o_proj", RowParallelLinear(context, heads * head_dim, hidden, config.o_bias))
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = self.attach("q_norm", RMSNorm(context, head_dim, config.rms_norm_eps))
            self.k_norm = self.attach("k_norm", RMSNorm(context, head_dim, config.rms_norm_eps))
        self.head_dim = head_dim
        self.heads = [self.qkv.heads, self.qkv.kv_heads, self.qkv.kv_heads]
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
