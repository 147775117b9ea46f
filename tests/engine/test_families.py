"""Each architecture of the family through the whole engine: greedy tokens equal to those of transformers' generate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams

COMMON = {
    "vocab_size": 258,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "llama 2, tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "mistral": ("Mistral", {"sliding_window": 12, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
}
#: One prompt shorter than Mistral's window, others longer, one longer than the budget of a step.
LENGTHS = (1, 7, 30, 75)


@pytest.mark.parametrize("files", ["one file", "several files"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, files: str, tiny_model: Path, tmp_path: Path) -> None:
    import transformers

    name, extra = FAMILIES[family]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **extra})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # far from zero, so that the best two logits are not near each other
        parameter.data.mul_(3)
    model.save_pretrained(tmp_path, max_shard_size="10GB" if files == "one file" else "60KB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (files == "several files")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / file, tmp_path / file)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [f"{name}ForCausalLM"]

    prompts = [torch.randint(2, 258, (n,)).tolist() for n in LENGTHS]
    expected = [
        model.generate(
            torch.tensor([p]),
            attention_mask=torch.ones(1, len(p), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=24,
        )[0].tolist()[len(p) :]
        for p in prompts
    ]
    llm = LLM(str(tmp_path), dtype="float32", max_num_batched_tokens=48, max_num_seqs=8, num_gpu_blocks_override=64)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == expected
