"""GPT-2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.models.config_files import read_model_config
from tests.models.zoo import PROMPT, Zoo, edit_config, logits_of, prompts_of, rename_tensors

SHAPE = {
    "vocab_size": 101,
    "n_embd": 48,
    "n_head": 6,
    "n_layer": 3,
    "n_positions": 96,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def config(**values: Any) -> Any:
    from transformers import GPT2Config

    return GPT2Config(**SHAPE, **values)


def test_gpt2(zoo: Zoo) -> None:
    zoo(config())


def test_gpt2_with_other_scales_as_first_published(zoo: Zoo) -> None:
    """Without the prefix, and with the buffers of causal masks, as in the hub's gpt2."""
    model = zoo.save(config(scale_attn_by_inverse_layer_idx=True, n_inner=80, activation_function="relu"))
    rename_tensors(zoo.folder, lambda name: name.removeprefix("transformer."))
    file = zoo.folder / "model.safetensors"
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 96, 96).tril() for i in range(3)}
    save_file({**load_file(file), **masks}, file, metadata={"format": "pt"})
    zoo.check_network(model)


def test_learned_positions_limit_the_context(zoo: Zoo) -> None:
    model = zoo.save(config())
    llm = LLM(str(zoo.folder), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=200)
    prompts = prompts_of([(PROMPT * 4)[:90], PROMPT * 4])
    last, beyond = llm.generate(prompts, SamplingParams(temperature=0.0, ignore_eos=True), use_tqdm=False)
    tokens = list(last.outputs[0].token_ids)
    assert len(tokens) == 6
    scores = logits_of(model, (PROMPT * 4)[:90] + tokens)[89:-1]
    assert (scores.max(-1).values - scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]).max() < 1e-3
    assert beyond.outputs[0].finish_reason == "error"
    assert "96" in str(beyond.outputs[0].error)
    with pytest.raises(ConfigError, match=r"max_model_len \(97\) is longer than the model's context length \(96"):
        LLM(str(zoo.folder), skip_tokenizer_init=True, max_model_len=97)


def test_cross_attention_is_refused(zoo: Zoo) -> None:
    zoo.save(config())
    edit_config(zoo.folder, add_cross_attention=True)
    with pytest.raises(UnsupportedModelError, match="add_cross_attention is not supported"):
        read_model_config(zoo.folder)
