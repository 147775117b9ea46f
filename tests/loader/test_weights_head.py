"""Heads that the files of a checkpoint have or lack, whatever config.json says of them, against transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from octavo import LLM, InvalidRequestError, PoolingParams, SamplingParams, WeightError
from octavo.core.dtypes import DType
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.loader.weights import check_model, load_model
from octavo.models.config_files import read_model_config
from octavo.models.registry import NETWORKS
from tests.models.conftest import PagedDriver
from tests.models.test_encoders import assert_close
from tests.models.zoo import edit_config, rename_tensors

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
ROUTED = {
    **{**GROUPED, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": None},
}
HYBRID = {
    **{**GROUPED, "num_attention_heads": 4, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
MIXER = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 16, "mamba_chunk_size": 8}
SCAN = {name: value for name, value in SMALL.items() if name in ("vocab_size", "hidden_size", "num_hidden_layers")}
GPT2 = {"vocab_size": 101, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 96, "n_inner": 80}
#: By architecture of the registry, the values of a small configuration.
DECODERS: dict[str, dict[str, Any]] = {
    "ApertusForCausalLM": GROUPED,
    "ArceeForCausalLM": GROUPED,
    "BambaForCausalLM": {**GROUPED, **MIXER, "attn_layer_indices": [1]},
    "BloomForCausalLM": {"vocab_size": 101, "hidden_size": 48, "n_layer": 2, "n_head": 6},
    "Cohere2ForCausalLM": GROUPED,
    "CohereForCausalLM": GROUPED,
    "CwmForCausalLM": {**GROUPED, "head_dim": 8},
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV32ForCausalLM": {**LATENT, "index_topk": 96, "index_head_dim": 8, "index_n_heads": 2},
    "DeepseekV3ForCausalLM": LATENT,
    "Dots1ForCausalLM": ROUTED,
    "Ernie4_5ForCausalLM": {**GROUPED, "head_dim": 8},
    "Ernie4_5_MoeForCausalLM": {**GROUPED, "moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2},
    "Exaone4ForCausalLM": GROUPED,
    "FalconForCausalLM": SMALL,
    "FalconH1ForCausalLM": {**GROUPED, **MIXER, "mamba_d_ssm": 96},
    "FalconMambaForCausalLM": SCAN,
    "FlexOlmoForCausalLM": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "GPT2LMHeadModel": GPT2,
    "GPTBigCodeForCausalLM": GPT2,
    "GPTJForCausalLM": {**GPT2, "rotary_dim": 8},
    "GPTNeoXForCausalLM": SMALL,
    "Gemma2ForCausalLM": {**GROUPED, "head_dim": 8},
    "Gemma3ForCausalLM": {**GROUPED, "head_dim": 8},
    "Gemma4ForCausalLM": {
        **{**GROUPED, "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 8},
        **{"vocab_size_per_layer_input": 101, "layer_types": ["sliding_attention", "full_attention"]},
    },
    "Gemma4UnifiedForCausalLM": {
        **{**GROUPED, "head_dim": 8, "global_head_dim": 16},
        **{"layer_types": ["sliding_attention", "full_attention"]},
    },
    "GemmaForCausalLM": {**GROUPED, "head_dim": 8},
    "Glm4ForCausalLM": {**GROUPED, "head_dim": 8},
    "Glm4MoeForCausalLM": {**ROUTED, "head_dim": 16},
    "Glm4MoeLiteForCausalLM": {**LATENT, "num_key_value_heads": 6},
    "GlmForCausalLM": {**GROUPED, "head_dim": 8},
    "GlmMoeDsaForCausalLM": {**LATENT, "index_topk": 96, "index_head_dim": 8, "index_n_heads": 2},
    "GptOssForCausalLM": {**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GraniteForCausalLM": GROUPED,
    "GraniteMoeForCausalLM": {**GROUPED, "num_local_experts": 4},
    "GraniteMoeHybridForCausalLM": {
        **{**GROUPED, **MIXER, "layer_types": ["linear_attention", "full_attention"]},
        **{"num_local_experts": 4, "shared_intermediate_size": 32},
    },
    "GraniteMoeSharedForCausalLM": {**GROUPED, "num_local_experts": 4, "shared_intermediate_size": 32},
    "HeliumForCausalLM": {**GROUPED, "head_dim": 8},
    "HunYuanDenseV1ForCausalLM": {**GROUPED, "head_dim": 8},
    "HunYuanMoEV1ForCausalLM": {**GROUPED, "num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "HyperCLOVAXForCausalLM": GROUPED,
    "Jais2ForCausalLM": GROUPED,
    "JambaForCausalLM": {**GROUPED, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2ForCausalLM": {**GROUPED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "Lfm2MoeForCausalLM": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Llama4ForCausalLM": {**GROUPED, "num_local_experts": 4, "intermediate_size_mlp": 64, "head_dim": 8},
    "LlamaForCausalLM": GROUPED,
    "Mamba2ForCausalLM": {**SCAN, "num_heads": 4, "head_dim": 24, "n_groups": 2, "state_size": 16, "chunk_size": 8},
    "MambaForCausalLM": SCAN,
    "MiniMaxM2ForCausalLM": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "Ministral3ForCausalLM": {**GROUPED, "head_dim": 8},
    "MinistralForCausalLM": {**GROUPED, "head_dim": 8},
    "MistralForCausalLM": GROUPED,
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 4},
    "NemotronForCausalLM": GROUPED,
    "OPTForCausalLM": {**SMALL, "ffn_dim": 80, "word_embed_proj_dim": 48},
    "Olmo2ForCausalLM": GROUPED,
    "Olmo3ForCausalLM": GROUPED,
    "OlmoForCausalLM": GROUPED,
    "OlmoHybridForCausalLM": {name: value for name, value in HYBRID.items() if name != "head_dim"},
    "OlmoeForCausalLM": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "Phi3ForCausalLM": GROUPED,
    "PhiForCausalLM": SMALL,
    "PhimoeForCausalLM": {**GROUPED, "num_local_experts": 4},
    "Qwen2ForCausalLM": GROUPED,
    "Qwen2MoeForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 8},
    "Qwen3MoeForCausalLM": {**EXPERTS, "head_dim": 8},
    "Qwen3NextForCausalLM": {**HYBRID, **SHARED},
    "Qwen3_5ForCausalLM": HYBRID,
    "Qwen3_5MoeForCausalLM": {
        **{name: value for name, value in HYBRID.items() if name != "intermediate_size"},
        **SHARED,
    },
    "SeedOssForCausalLM": {**GROUPED, "head_dim": 8},
    "SmolLM3ForCausalLM": GROUPED,
    "SolarOpenForCausalLM": {**ROUTED, "head_dim": 8},
    "StableLmForCausalLM": GROUPED,
    "Starcoder2ForCausalLM": GROUPED,
}
#: Decoders whose heads transformers never ties.
UNTIED = {"KimiLinearForCausalLM", "NemotronHForCausalLM"}
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


def engine(folder: Path, **options: Any) -> LLM:
    small = {"num_gpu_blocks_override": 64, "max_model_len": 64}
    return LLM(str(folder), dtype="float32", skip_tokenizer_init=True, **{**small, **options})


def greedy(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def with_own_head(folder: Path) -> list[int]:
    """Saves a model with a head of its own although config.json says that it is tied; returns its greedy tokens."""
    save(folder, "Qwen3ForCausalLM")
    name = "model.embed_tokens.weight"
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[name].flip(0)}))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        for _ in range(8):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(PROMPT) :].tolist()


def test_a_head_that_differs_is_told_once_and_shared_if_it_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    right = with_own_head(tmp_path)
    llm = engine(tmp_path)
    assert not llm.front_end.files.model_config.tie_word_embeddings
    assert greedy(llm) == right
    engine(tmp_path)
    told = [record for record in caplog.records if "differs from the embedding" in record.getMessage()]
    assert len(told) == 1 and str(tmp_path) in told[0].getMessage()
    name = "model.embed_tokens.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[name].clone()}))
    caplog.clear()
    assert engine(tmp_path).front_end.files.model_config.tie_word_embeddings
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[name][1:].clone()}))
    with pytest.raises(WeightError, match=r"'lm_head\.weight' does not fit: its shape is \[100, 48\]"):
        engine(tmp_path)


@pytest.mark.slow  # processes of two workers
@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_and_stages_have_the_head_of_the_file(option: str, tmp_path: Path) -> None:
    right = with_own_head(tmp_path)
    assert greedy(engine(tmp_path, **{option: 2})) == right


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
    names = (name for name in NETWORKS if name.endswith(("ForCausalLM", "LMHeadModel")))
    decoders = {name for name in names if hasattr(transformers, name)}
    assert decoders == set(DECODERS) | UNTIED
    assert not any(getattr(transformers, name)._tied_weights_keys for name in UNTIED)


@pytest.mark.parametrize("architecture", DECODERS)
def test_a_base_model_under_the_name_of_its_language_model(architecture: str, tmp_path: Path) -> None:
    """Its tensors lack the prefix; with a tied head it generates, too."""
    model = save(tmp_path, architecture)
    if (bias := getattr(model.get_output_embeddings(), "bias", None)) is not None:
        bias.data.zero_()  # a base model has none
        model.save_pretrained(tmp_path)
    right = theirs(tmp_path)
    base = model.model if architecture == "Llama4ForCausalLM" else model.base_model  # else the whole model
    base.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=[architecture])
    assert_close(ours(tmp_path).numpy(), right.numpy(), 1e-4)

    with torch.inference_mode():
        states = base(torch.tensor([PROMPT])).last_hidden_state[0].numpy()
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
    wrong = r"lacks the language-model head 'lm_head\.weight', and config\.json has tie_word_embeddings=false"
    with pytest.raises(WeightError, match=wrong):
        LLM(str(tmp_path), skip_tokenizer_init=True, num_gpu_blocks_override=64, task="generate")
    # The names of a language model's tensors: a part of it is missing.
    rename_tensors(tmp_path, lambda name: f"model.{name}")
    with pytest.raises(WeightError, match=wrong):
        LLM(str(tmp_path), skip_tokenizer_init=True, num_gpu_blocks_override=64)
    vectors = LLM(str(tmp_path), skip_tokenizer_init=True, num_gpu_blocks_override=64, task="embed")
    assert "embed" in vectors.front_end.pooling.tasks
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightError):
        LLM(str(tmp_path), skip_tokenizer_init=True, num_gpu_blocks_override=64)
