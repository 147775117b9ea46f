"""Folders as models of the first years were published: config.json, weights, vocab.json and merges.txt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from octavo import LLM, SamplingParams

MERGES = ["Ġ w", "o r", "l d", "Ġw or", "Ġwor ld", "h e", "l l", "he ll", "hell o"]
PROMPT = "hello world, it's é日本"


def published(folder: Path, model: Any, special: list[str]) -> Path:
    model.save_pretrained(folder)
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES]))
    return folder


def gpt2(folder: Path) -> Path:
    config = transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    config.bos_token_id = config.eos_token_id = 0
    return published(folder, transformers.GPT2LMHeadModel(config), ["<|endoftext|>"])


def opt(folder: Path) -> Path:
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2}
    config = transformers.OPTConfig(vocab_size=300, num_attention_heads=4, max_position_embeddings=64, **sizes)
    return published(folder, transformers.OPTForCausalLM(config), ["<s>", "<pad>", "</s>", "<unk>"])


@pytest.mark.parametrize(("family", "beginning"), [(gpt2, []), (opt, ["</s>"])])
def test_a_folder_generates_what_transformers_does(tmp_path: Path, family: Any, beginning: list[str]) -> None:
    torch.manual_seed(0)
    folder = family(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = [*tokenizer.convert_tokens_to_ids(beginning), *tokenizer(PROMPT)["input_ids"]]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    llm = LLM(str(folder), dtype="float32", kernels="reference", num_gpu_blocks_override=16)
    [output] = llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0.0))
    assert output.prompt_token_ids == prompt
    assert output.outputs[0].token_ids == whole[0, len(prompt) :].tolist()
    assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
