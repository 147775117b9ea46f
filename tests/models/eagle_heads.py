"""EAGLE heads with random weights, in the published layout, and what they compute, in plain torch and float64.

The reference has no cache: it runs over the whole context for every token that it drafts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

#: A target for transformers with enough layers for the three that EAGLE-3 reads by default.
TARGET = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass
class Head:
    """The files of a head, as they are written."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def save(self, folder: Path) -> Path:
        """Writes config.json and model.safetensors."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({name: t.contiguous() for name, t in self.tensors.items()}, folder / "model.safetensors")
        return folder

    def of(self, name: str) -> Tensor:
        """A tensor in float64."""
        return self.tensors[name].double()


def _config(architecture: str, **values: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": TARGET["hidden_size"],
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8,  # less than contexts, as of published heads
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "vocab_size": TARGET["vocab_size"],
        "torch_dtype": "float32",
        **values,
    }


def _random(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        if len(shape) == 1:
            return 1 + 0.2 * torch.randn(shape, generator=generator)
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    return make


def _layer(make: Any, config: dict[str, Any], prefix: str, inputs: int) -> dict[str, Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    heads, kv_heads = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    return {
        f"{prefix}.self_attn.q_proj.weight": make(heads, inputs),
        f"{prefix}.self_attn.k_proj.weight": make(kv_heads, inputs),
        f"{prefix}.self_attn.v_proj.weight": make(kv_heads, inputs),
        f"{prefix}.self_attn.o_proj.weight": make(hidden, heads),
        f"{prefix}.mlp.gate_proj.weight": make(inner, hidden),
        f"{prefix}.mlp.up_proj.weight": make(inner, hidden),
        f"{prefix}.mlp.down_proj.weight": make(hidden, inner),
        f"{prefix}.post_attention_layernorm.weight": make(hidden),
    }


def eagle1(seed: int = 0, *, bias: bool = False, layers: int = 1, **values: Any) -> Head:
    """A random head of EAGLE-1."""
    config, make = _config("EagleLlamaForCausalLM", num_hidden_layers=layers, **values), _random(seed)
    hidden = config["hidden_size"]
    tensors = {"fc.weight": 2 * make(hidden, 2 * hidden), "embed_tokens.weight": make(config["vocab_size"], hidden)}
    if bias:
        tensors["fc.bias"] = make(hidden)
    for index in range(layers):
        tensors |= _layer(make, config, f"layers.{index}", hidden)
        if index:
            tensors[f"layers.{index}.input_layernorm.weight"] = make(hidden)
    return Head(config, tensors)


def eagle3(seed: int = 0, *, features: int = 3, own_embedding: bool = False, **values: Any) -> Head:
    """A random head of EAGLE-3; with ``draft_vocab_size`` it drafts that many tokens, spread over the vocabulary."""
    config, make = _config("LlamaForCausalLMEagle3", **values), _random(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    drafts, target = config.get("draft_vocab_size", vocab), config.get("target_hidden_size", hidden)
    tensors = {
        "fc.weight": make(hidden, features * target),
        "lm_head.weight": 3 * make(drafts, hidden),
        "norm.weight": make(hidden),
        "midlayer.hidden_norm.weight": make(hidden),
        "midlayer.input_layernorm.weight": make(hidden),
        **_layer(make, config, "midlayer", 2 * hidden),
    }
    if drafts < vocab:
        chosen = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:drafts].sort().values
        tensors["d2t"] = chosen - torch.arange(drafts)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, value=True)
    if own_embedding:
        tensors["embed_tokens.weight"] = make(vocab, hidden)
    return Head(config, tensors)


class Reference:
    """What a head makes of a target's hidden states, in float64."""

    def __init__(self, head: Head, target: Any) -> None:
        """``target``: a model of transformers; it becomes float64."""
        self.head, self.target = head, target.double()
        self.is_eagle3 = "midlayer.hidden_norm.weight" in head.tensors

    def features(self, tokens: list[int]) -> Tensor:
        """What the head reads of the target, for each token: [T, E]."""
        with torch.inference_mode():
            states = self.target.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        if not self.is_eagle3:
            return states[-1][0].clone()  # after the final norm
        count = len(states) - 1
        given = self.head.config.get("eagle_aux_hidden_state_layer_ids")
        layers = sorted(given or (2, count // 2, count - 3))
        assert max(layers) < count, "transformers has the last layer's output after the norm only"
        return torch.cat([states[i][0] for i in layers], dim=-1) @ self.head.of("fc.weight").T

    def outputs(self, tokens: list[int], features: Tensor) -> Tensor:
        """What follows features [T, E] and the T tokens that come one after them: [T, E]."""
        head, own = self.head, self.head.tensors.get("embed_tokens.weight")
        table = own.double() if self.is_eagle3 and own is not None else self.target.model.embed_tokens.weight
        embedding = table[torch.tensor(tokens)].detach()
        if self.is_eagle3:
            first = self._norm(embedding, "midlayer.input_layernorm.weight")
            normed = self._norm(features, "midlayer.hidden_norm.weight")
            x = normed if head.config.get("norm_before_residual") else features
            x = x + self._attention(torch.cat([first, normed], -1), "midlayer")
            return x + self._mlp(self._norm(x, "midlayer.post_attention_layernorm.weight"), "midlayer")
        x = torch.cat([embedding, features], -1) @ head.of("fc.weight").T
        if "fc.bias" in head.tensors:
            x = x + head.of("fc.bias")
        for index in range(head.config["num_hidden_layers"]):
            prefix = f"layers.{index}"
            x = x + self._attention(self._norm(x, f"{prefix}.input_layernorm.weight") if index else x, prefix)
            x = x + self._mlp(self._norm(x, f"{prefix}.post_attention_layernorm.weight"), prefix)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, draft vocabulary]."""
        if self.is_eagle3:
            return self._norm(hidden, "norm.weight") @ self.head.of("lm_head.weight").T
        with torch.inference_mode():
            logits: Tensor = self.target.lm_head(hidden)
        return logits

    def draft(self, tokens: list[int], count: int) -> tuple[list[int], list[float]]:
        """The most likely drafts after ``tokens``, of which the last has not been computed, and by how much each is."""
        features, tokens = self.features(tokens[:-1]), tokens[1:]
        drafts, margins = [], []
        for _ in range(count):
            hidden = self.outputs(tokens, features)[-1:]
            best = self.logits(hidden)[0].topk(2)
            draft = int(best.indices[0])
            if "d2t" in self.head.tensors:
                draft += int(self.head.tensors["d2t"][draft])
            drafts.append(draft)
            margins.append(float(best.values[0] - best.values[1]))
            tokens, features = [*tokens, draft], torch.cat([features, hidden])
        return drafts, margins

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.head.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.head.of(name)

    def _mlp(self, x: Tensor, prefix: str) -> Tensor:
        gate, up, down = (self.head.of(f"{prefix}.mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _attention(self, x: Tensor, prefix: str) -> Tensor:
        heads, kv_heads = self.head.config["num_attention_heads"], self.head.config["num_key_value_heads"]
        q, k, v, out = (self.head.of(f"{prefix}.self_attn.{name}_proj.weight") for name in "qkvo")
        length, head_dim = len(x), q.shape[0] // heads
        query, key = (self._rotated((x @ w.T).view(length, -1, head_dim)) for w in (q, k))
        key = key.repeat_interleave(heads // kv_heads, 1)
        value = (x @ v.T).view(length, -1, head_dim).repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * head_dim**-0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(length, -1) @ out.T

    def _rotated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequencies = self.head.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
