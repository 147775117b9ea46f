"""Llamas of random weights that tests load, small enough to be made anew."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

#: Two layers for the tokens of ``tiny_model``: all bytes, and before them the first and the last token of a text.
SHAPE: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def make_llama(seed: int, **shape: Any) -> LlamaForCausalLM:
    """A network of ``SHAPE`` with other values in places."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | shape))


def save_distinct_llama(folder: Path, **shape: Any) -> Path:
    """Writes a network whose weights are large enough for logits that differ clearly; the folder."""
    import torch

    model = make_llama(0, **shape)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(folder)
    return folder
