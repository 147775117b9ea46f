"""Small random models with layers for multi-token prediction, as their families' checkpoints have them.

The reference of the extra layers is transformers' own layer of the family, over the whole context, with the parts
around it in plain torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.zoo import SMALL, edit_config

#: Layers of the model.
LAYERS = 3
SIZES = {**SMALL, "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 256}
EXPERTS = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2},
    **{"routed_scaling_factor": 1.7, "first_k_dense_replace": 1, "n_shared_experts": 1},
}
DELTA = {
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_conv_kernel_dim": 4},
}
QWEN_EXPERTS = {
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "shared_expert_intermediate_size": 40,
}


def deepseek(layers: int) -> Any:
    from transformers import DeepseekV3Config

    sizes = {**{name: value for name, value in SIZES.items() if name != "head_dim"}, "num_key_value_heads": 4}
    latent = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": 20}
    return DeepseekV3Config(**{**sizes, **latent, **EXPERTS, "num_hidden_layers": layers})


def glm(layers: int) -> Any:
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        **{**SIZES, **EXPERTS, "use_qk_norm": True, "attention_bias": True, "num_hidden_layers": layers}
    )


def _types(layers: int) -> list[str]:
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    return kinds + ["full_attention"] * (layers - len(kinds))


def qwen3_next(layers: int) -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **{**SIZES, **DELTA, **QWEN_EXPERTS, "num_hidden_layers": layers, "layer_types": _types(layers)}
    )


def qwen3_5(layers: int) -> Any:
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(**{**SIZES, **DELTA, "num_hidden_layers": layers, "layer_types": _types(layers)})


def mimo(layers: int) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**{**SIZES, "num_hidden_layers": layers})


@dataclass(frozen=True)
class MTPFamily:
    config: Callable[[int], Any]
    #: Names of layer k, and of the parts around it, in the checkpoint.
    layer: str
    parts: str
    #: Of the projection, the norms of embedding and hidden state, and the final norm.
    names: tuple[str, str, str, str]
    is_shared: bool = False
    #: Whether norms have weights less 1.
    less_1: bool = False
    hidden_first: bool = False
    changes: tuple[tuple[str, Any], ...] = ()


_DEEPSEEK = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
_QWEN = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
_BEHIND = ("model.layers.{layer}.", "model.layers.{layer}.", _DEEPSEEK)
_BESIDE = ("mtp.layers.{module}.", "mtp.", _QWEN)
FAMILIES = {
    "deepseek": MTPFamily(deepseek, *_BEHIND, changes=(("num_nextn_predict_layers", 0),)),
    "glm": MTPFamily(glm, *_BEHIND, changes=(("num_nextn_predict_layers", 0),)),
    "mimo": MTPFamily(
        mimo,
        "model.mtp_layers.{module}.",
        "model.mtp_layers.{module}.",
        ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
        hidden_first=True,
        changes=(("architectures", ["MiMoForCausalLM"]), ("model_type", "mimo"), ("layer_types", None)),
    ),
    "qwen3_5": MTPFamily(qwen3_5, *_BESIDE, is_shared=True, less_1=True),
    "qwen3_next": MTPFamily(qwen3_next, *_BESIDE, is_shared=True, less_1=True),
}


def randomise(model: Any, std: float = 0.12) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5 if "embed_tokens" in name else std)
        elif "norm" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
        elif "bias" in name and "dt_bias" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            torch.nn.init.normal_(buffer, std=0.1)


class Reference:
    """What the modules compute, float32, without caches."""

    def __init__(self, family: MTPFamily, model: Any, parts: list[dict[str, Tensor]]) -> None:
        """``model``: of transformers, whose last layers are the modules'; ``parts``: of each module by its names."""
        self.family, self.depth, self.parts = family, len(model.model.layers) - LAYERS, parts
        self.head, self.embedding = model.lm_head, model.model.embed_tokens
        self._model = self._with_layers(model.model, model.model.layers[:LAYERS])
        self._layers = []
        for module in range(self.depth):
            layer = self._with_layers(model.model, [model.model.layers[LAYERS + module]])
            layer.norm.weight.data = self._part(module, 3)
            self._layers.append(layer)

    @staticmethod
    def _with_layers(base: Any, layers: Any) -> Any:
        base = copy.deepcopy(base)
        base.layers = torch.nn.ModuleList([copy.deepcopy(layer) for layer in layers])
        base.config.num_hidden_layers = len(layers)
        if len(layers) == 1 and hasattr(base.config, "layer_types"):
            base.config.layer_types = ["full_attention"]
        return base.eval()

    def _part(self, module: int, index: int) -> Tensor:
        return self.parts[0 if self.family.is_shared else module][self.family.names[index]]

    def features(self, tokens: list[int]) -> Tensor:
        """The model's hidden states after its norm, [T, E]."""
        with torch.inference_mode():
            hidden: Tensor = self._model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return hidden

    def outputs(self, module: int, tokens: list[int], features: Tensor) -> Tensor:
        """Of features [T, E] and T tokens: [T, E]."""
        with torch.inference_mode():
            embedding = self.embedding(torch.tensor(tokens))
            joined = [self._norm(embedding, self._part(module, 1)), self._norm(features, self._part(module, 2))]
            if self.family.hidden_first:
                joined.reverse()
            x = torch.cat(joined, -1) @ self._part(module, 0).T
            hidden: Tensor = self._layers[module](inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        return hidden

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = self._model.config.rms_norm_eps
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + self.family.less_1)

    def logits(self, hidden: Tensor) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.head(hidden)
        return logits

    def draft(self, tokens: list[int], count: int) -> tuple[list[int], list[float]]:
        """The most likely drafts after ``tokens``, of which the last has not been computed, and by how much each is."""
        features, drafts, margins = self.features(tokens[:-1]), list[int](), list[float]()
        for step in range(count):
            known = tokens + drafts
            if step < self.depth:
                hidden = self.outputs(step, known[1 + step :], features)
                inputs = features
                features = hidden
            else:  # the last module goes on from its own results
                inputs = torch.cat([inputs, hidden[-1:]])
                hidden = self.outputs(self.depth - 1, known[self.depth :], inputs)
            best = self.logits(hidden[-1:])[0].topk(2)
            drafts.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
        return drafts, margins


def save_mtp(name: str, folder: Path, depth: int = 1, vocab_size: int | None = None) -> Reference:
    """Writes a random model of the family with ``depth`` modules."""
    from transformers import AutoModelForCausalLM

    family = FAMILIES[name]
    torch.manual_seed(0)
    config = family.config(LAYERS + depth)
    config.vocab_size = vocab_size or config.vocab_size
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        randomise(model)
    model.save_pretrained(folder)
    width, parts = SIZES["hidden_size"], list[dict[str, Tensor]]()
    for _ in range(1 if family.is_shared else depth):
        norms = [(0.0 if family.less_1 else 1.0) + 0.2 * torch.randn(width) for _ in range(3)]
        projection = torch.randn(width, 2 * width) * (2 * width) ** -0.5
        parts.append(dict(zip(family.names, [projection, *norms], strict=True)))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for module in range(depth):
        layer = LAYERS + module
        old, new = f"model.layers.{layer}.", family.layer.format(layer=layer, module=module)
        tensors = {
            new + key.removeprefix(old) if key.startswith(old) else key: tensor for key, tensor in tensors.items()
        }
    for module, part in enumerate(parts):
        prefix = family.parts.format(layer=LAYERS + module, module=module)
        tensors |= {f"{prefix}{key}.weight": tensor.clone() for key, tensor in part.items()}
        if name == "deepseek":  # published files have copies
            tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    changes = {key: depth if value == 0 else value for key, value in family.changes}
    types = {"layer_types": _types(LAYERS)} if name.startswith("qwen") else {}
    edit_config(folder, **{"num_hidden_layers": LAYERS, **types, **changes})
    return Reference(family, model, parts)
