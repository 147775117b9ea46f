"""Adapters of the tiny model as PEFT saves them, written without it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write_adapter(folder: Path, model: Path, *, rank: int = 4, seed: int = 1) -> Path:
    """A LoRA adapter of random weights, large enough to change answers, on the query and value projections."""
    config = json.loads((model / "config.json").read_text())
    width, head_dim = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    outputs = {"q_proj": width, "v_proj": head_dim * config["num_key_value_heads"]}
    numbers = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, output in outputs.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = numbers.standard_normal((rank, width), np.float32)
            tensors[f"{module}.lora_B.weight"] = numbers.standard_normal((output, rank), np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none",
        "target_modules": list(outputs), "base_model_name_or_path": str(model),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
