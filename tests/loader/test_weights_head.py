"""Heads that the files of a checkpoint have or lack, whatever config.json says of them, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from octavo import LLM, ConfigError, InvalidRequestError, PoolingParams, SamplingParams, WeightError
from octavo.core.dtypes import DType
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.loader.weights import check_model, load_model
from octavo.models.config_files import read_model_config
from octavo.models.registry import NETWORKS
from tests.models.conftest import PagedDriver
from tests.models.test_encoders import assert_close
from tests.models.zoo import edit_config

SMALL = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **SMALL,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
GPT2 = {"vocab_size": 101, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 96, "n_inner": 80}
#: By architecture of the registry, the values of a small configuration.
DECODERS: dict[str, dict[str, Any]] = {
    "BloomForCausalLM": {"vocab_size": 101, "hidden_size": 48, "n_layer": 2, "n_head": 6},
    "CohereForCausalLM": GROUPED,
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT,
    "FalconForCausalLM": SMALL,
    "GPT2LMHeadModel": GPT2,
    "GPTBigCodeForCausalLM": GPT2,
    "GPTJForCausalLM": {**GPT2, "rotary_dim": 8},
    "GPTNeoXForCausalLM": SMALL,
    "Gemma2ForCausalLM": {**GROUPED, "head_dim": 8},
    "Gemma3ForCausalLM": {**GROUPED, "head_dim": 8},
    "GemmaForCausalLM": {**GROUPED, "head_dim": 8},
    "LlamaForCausalLM": GROUPED,
    "MistralForCausalLM": GROUPED,
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 4},
    "OPTForCausalLM": {**SMALL, "ffn_dim": 80, "word_embed_proj_dim": 48},
    "Olmo2ForCausalLM": GROUPED,
    "OlmoeForCausalLM": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "Phi3ForCausalLM": GROUPED,
    "PhiForCausalLM": SMALL,
    "Qwen2ForCausalLM": GROUPED,
    "Qwen2MoeForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 8},
    "Qwen3MoeForCausalLM": {**EXPERTS, "head_dim": 8},
    "StableLmForCausalLM": GROUPED,
    "Starcoder2ForCausalLM": GROUPED,
}
PROMPT = [3, 17, 99, 42, 8, 61, 100, 5]


def save(folder: Path, architecture: str, **values: Any) -> Any:
    """Saves a small random language model, and returns it."""
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**DECODERS[architecture], "tie_word_embeddings": True, **values})).eval()
    for tensor in model.parameters():
        tensor.data.normal_(0, 0.15)
    model.save_pretrained(folder)
    return model


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor] | None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = change(tensors)
    kept = tensors if changed is None else changed
    save_file({name: t.contiguous() for name, t in kept.items()}, file, metadata={"format": "pt"})


def theirs(folder: Path) -> torch.Tensor:
    """The logits of transformers, which loads the folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


def ours(folder: Path) -> torch.Tensor:
    kernels = ReferenceKernels()
    network = load_model(folder, read_model_config(folder), LayerContext(kernels, DType.FLOAT32))
    return PagedDriver(network, kernels=kernels).run("a", PROMPT, [len(PROMPT)])


def names_of(model: Any) -> tuple[str, str]:
    """The names of the head's and the embedding's matrix."""
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    found = {id(tensor): name for name, tensor in model.named_parameters(remove_duplicate=False)}
    heads = [name for name, module in model.named_modules() if module is model.get_output_embeddings()]
    assert head is embedding
    embeddings = [name for name, module in model.named_modules() if module is model.get_input_embeddings()]
    assert found
    return f"{heads[0]}.weight", f"{embeddings[0]}.weight"


@pytest.mark.parametrize("architecture", DECODERS)
def test_a_head_in_the_file_counts_if_it_differs_from_the_embedding(architecture: str, tmp_path: Path) -> None:
    model = save(tmp_path, architecture)
    head, embedding = names_of(model)
    tied = theirs(tmp_path)
    assert_close(ours(tmp_path).numpy(), tied.numpy(), 1e-4)

    edit_tensors(tmp_path, lambda tensors: tensors.update({head: tensors[embedding].clone()}))
    assert_close(ours(tmp_path).numpy(), tied.numpy(), 1e-4)

    edit_tensors(tmp_path, lambda tensors: tensors.update({head: tensors[embedding].flip(0).contiguous()}))
    own = theirs(tmp_path)
    assert (own - tied).abs().max() > 0.5 * tied.abs().max()
    assert_close(ours(tmp_path).numpy(), own.numpy(), 1e-4)
    assert check_model(tmp_path, read_model_config(tmp_path)).problems == []

    edit_tensors(tmp_path, lambda tensors: {name: t for name, t in tensors.items() if name != embedding})
    assert_close(ours(tmp_path).numpy(), theirs(tmp_path).numpy(), 1e-4)


SEQ2SEQ: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    "BartForConditionalGeneration": {
        **{"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
        **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64, "decoder_start_token_id": 2},
        **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": None},
    },
}


@pytest.mark.parametrize("architecture", SEQ2SEQ)
def test_the_head_of_an_encoder_decoder(architecture: str, tmp_path: Path) -> None:
    kind: Any = getattr(transformers, architecture)
    values = {"vocab_size": 101, "d_model": 32, **SEQ2SEQ[architecture], "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = kind(kind.config_class(**values))
    for tensor in model.parameters():
        tensor.data.normal_(0, 0.2)
    model.save_pretrained(tmp_path)
    edit_tensors(
        tmp_path,
        lambda tensors: tensors.update(
            {"lm_head.weight": next(t for name, t in tensors.items() if name.endswith("shared.weight")).flip(0)}
        ),
    )
    start = [values["decoder_start_token_id"], 4, 8]
    with torch.inference_mode():
        model = kind.from_pretrained(tmp_path).eval()
        logits = model(input_ids=torch.tensor([PROMPT]), decoder_input_ids=torch.tensor([start])).logits[0, -1]
    scores = logits.log_softmax(-1)
    llm = LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=64)
    prompt: Any = {"encoder_prompt": {"prompt_token_ids": PROMPT}, "decoder_prompt": {"prompt_token_ids": start}}
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=1, detokenize=False, ignore_eos=True)
    output = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids[0] == int(scores.argmax()) and output.logprobs is not None
    assert abs(output.logprobs[0][output.token_ids[0]].logprob - float(scores.max())) < 1e-4


def test_every_decoder_of_the_registry_is_tested() -> None:
    decoders = {name for name in NETWORKS if name.endswith(("ForCausalLM", "LMHeadModel"))}
    assert decoders == set(DECODERS)


@pytest.mark.parametrize("architecture", DECODERS)
def test_a_base_model_under_the_name_of_its_language_model(architecture: str, tmp_path: Path) -> None:
    """Its tensors lack the prefix; with a tied head it generates, too."""
    model = save(tmp_path, architecture)
    if (bias := getattr(model.get_output_embeddings(), "bias", None)) is not None:
        bias.data.zero_()  # a base model has none
        model.save_pretrained(tmp_path)
    right = theirs(tmp_path)
    model.base_model.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=[architecture])
    assert_close(ours(tmp_path).numpy(), right.numpy(), 1e-4)

    with torch.inference_mode():
        states = model.base_model(torch.tensor([PROMPT])).last_hidden_state[0].numpy()
    for tied in (True, False):
        edit_config(tmp_path, tie_word_embeddings=tied)
        for task in ("auto", "embed"):
            llm = LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", num_gpu_blocks_override=64, task=task)
            raw = PoolingParams(use_activation=False)
            output = llm.encode({"prompt_token_ids": PROMPT}, raw, pooling_task="token_embed", use_tqdm=False)[0]
            if architecture == "CohereForCausalLM" and tied:
                continue  # its norm has the scale of the logits
            assert_close(output.outputs.data, states, 1e-4)
    assert "generate" not in llm.front_end.pooling.tasks


def test_without_a_head_nothing_is_generated(tmp_path: Path) -> None:
    save(tmp_path, "LlamaForCausalLM").base_model.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["LlamaForCausalLM"], tie_word_embeddings=False)
    with pytest.raises(InvalidRequestError, match="cannot generate"):
        LLM(str(tmp_path), skip_tokenizer_init=True, num_gpu_blocks_override=64).generate(
            {"prompt_token_ids": PROMPT}, use_tqdm=False
        )
    with pytest.raises(ConfigError):
        LLM(str(tmp_path), skip_tokenizer_init=True, num_gpu_blocks_override=64, task="generate")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightError):
        LLM(str(tmp_path), skip_tokenizer_init=True, num_gpu_blocks_override=64)
