"""LoRA adapters of random weights for the model of a chaos run, as PEFT saves them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from octavo.core.model_config import ModelConfig

_RANK = 4


def write_adapter(folder: Path, model: ModelConfig, seed: int) -> None:
    """Writes an adapter of the query and value projections into a new folder, large enough to change answers."""
    outputs = {"q_proj": model.head_dim * model.num_heads, "v_proj": model.head_dim * model.num_kv_heads}
    numbers = np.random.default_rng(seed)
    tensors = {}
    for layer in range(model.num_layers):
        for name, output in outputs.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            first = numbers.standard_normal((_RANK, model.hidden_size), np.float32)
            tensors[f"{module}.lora_A.weight"] = first / np.float32(model.hidden_size**0.5)
            tensors[f"{module}.lora_B.weight"] = numbers.standard_normal((output, _RANK), np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _RANK,
        "bias": "none",
        "target_modules": list(outputs),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
