"""Small random Gemma 4 models with assistants, and what transformers makes of both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tests.models.test_gemma4 import LARGE_MODEL, SMALL_MODEL, scale_layers

EMPTY: Mapping[str, Any] = MappingProxyType({})
#: A number of tokens that is divisible into clusters.
VOCAB = 100
_TOKENS = {"vocab_size": VOCAB, "max_position_embeddings": 256}
_SMALL: dict[str, Any] = {**SMALL_MODEL, **_TOKENS, "vocab_size_per_layer_input": VOCAB}
_LARGE: dict[str, Any] = {**LARGE_MODEL, **_TOKENS}
#: As published: three layers with a window, then one without.
LAYERS = ["sliding_attention"] * 3 + ["full_attention"]
_FEW_KEYS = {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 10, "centroid_intermediate_top_k": 3}
#: By kind: the model's shape, what differs in that of its assistant, and the fields beside ``text_config``.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "shared KV, clusters": (_SMALL, {}, CLUSTERS),
    "values are keys": (_LARGE, _FEW_KEYS, {}),
    "unified, an untied head": (_LARGE, _FEW_KEYS, {"tie_word_embeddings": False}),
}


class Reference:
    """What a model's assistant computes, by transformers, float32."""

    def __init__(self, target: Any, assistant: Any) -> None:
        self.target, self.assistant = target, assistant

    def inputs(self, tokens: list[int]) -> tuple[Tensor, dict[str, Any]]:
        """The hidden states [1, T, E] of all tokens but the last, and the keys and values that are read."""
        with torch.inference_mode():
            output = self.target.model(torch.tensor([tokens[:-1]]), use_cache=False, return_shared_kv_states=True)
        shared = dict(output.shared_kv_states)
        # The last token, which is not computed, is in the window.
        kept = self.target.config.get_text_config().sliding_window - 1
        shared["sliding_attention"] = tuple(each[:, :, -kept:] for each in shared["sliding_attention"])
        return output.last_hidden_state, shared

    def logits(self, tokens: list[int], drafts: list[int]) -> Tensor:
        """Of the token after ``tokens``, whose last one is not computed, and after each of the drafts: [n, vocab]."""
        hidden, shared = self.inputs(tokens)
        hidden, place = hidden[:, -1:], torch.tensor([[len(tokens) - 1]])
        logits = []
        with torch.inference_mode():
            for token in [tokens[-1], *drafts]:
                embedding = self.target.get_input_embeddings()(torch.tensor([[token]]))
                output = self.assistant(
                    inputs_embeds=torch.cat([embedding, hidden], -1), position_ids=place, shared_kv_states=shared
                )
                hidden = output.last_hidden_state
                logits.append(output.logits[0, 0])
        return torch.stack(logits)

    def draft(self, tokens: list[int], count: int) -> list[int]:
        """The most likely drafts."""
        drafts: list[int] = []
        for _ in range(count):
            drafts.append(int(self.logits(tokens, drafts)[-1].argmax()))
        return drafts


def save_assisted(kind: str, folder: Path, vocab_size: int = VOCAB, **values: Any) -> Reference:
    """Writes a model to ``folder``/model and its assistant to ``folder``/assistant; ``values``: of its config.json."""
    import transformers

    shape, text, own = KINDS[kind]
    shape = json.loads(json.dumps({**shape, "vocab_size": vocab_size}))
    if "vocab_size_per_layer_input" in shape:
        shape["vocab_size_per_layer_input"] = vocab_size
    name = "Gemma4Unified" if kind.startswith("unified") else "Gemma4"
    if name == "Gemma4Unified":
        shape.pop("hidden_size_per_layer_input")
    torch.manual_seed(0)
    target = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}TextConfig")(**shape)).eval()
    _randomise(target)
    scale_layers(target)
    target.save_pretrained(folder / "model")
    assistant = save_assistant(folder / "assistant", shape, name, text, **{**own, **values})
    return Reference(target, assistant)


def save_assistant(
    folder: Path, shape: Mapping[str, Any], name: str = "Gemma4", text: Mapping[str, Any] = EMPTY, **values: Any
) -> Any:
    """Writes an assistant of a model of this ``shape``, and returns transformers'; ``values``: of its config.json."""
    import transformers

    named = ("vocab_size", "max_position_embeddings", "num_key_value_heads", "head_dim", "global_head_dim")
    sizes = {field: shape[field] for field in (*named, "sliding_window", "rope_parameters") if field in shape}
    sizes |= {"hidden_size": 32, "intermediate_size": 56, "num_attention_heads": 4, "num_hidden_layers": len(LAYERS)}
    sizes |= {"layer_types": LAYERS, "num_kv_shared_layers": len(LAYERS), **text}
    if name == "Gemma4":
        sizes |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    text_config = getattr(transformers, f"{name}TextConfig")(**json.loads(json.dumps(sizes)))
    config = getattr(transformers, f"{name}AssistantConfig")(
        text_config=text_config, backbone_hidden_size=shape["hidden_size"], **values
    )
    assistant = getattr(transformers, f"{name}AssistantForCausalLM")(config).eval()
    _randomise(assistant)
    scale_layers(assistant)
    if assistant.masked_embedding is not None:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(config.get_text_config().vocab_size))
    assistant.save_pretrained(folder)
    return assistant


def _randomise(model: Any) -> None:
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1 and not name.endswith("bias")
        torch.nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=0.2)
