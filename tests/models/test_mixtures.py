"""The families of ``octavo.models.mixtures`` beside those of ``test_llama_mixtures``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo import LoRARequest
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.kernels.cpu.backend import CpuKernels
from octavo.layers.layer import LayerContext
from octavo.layers.rope import RotaryTable
from octavo.loader.weights import load_model
from octavo.models.config_files import read_model_config
from octavo.models.mixtures import MixtureConfig
from tests.models.test_network import tensor_parallel_logits
from tests.models.zoo import (
    PARAMS,
    PROMPT,
    SMALL,
    TOLERANCE,
    Zoo,
    answer_of,
    assert_same,
    edit_config,
    logits_of,
    prompts_of,
)

ROPE = {"rope_type": "default", "rope_theta": 500.0}
#: Names of DeepSeek-V3, whose routing several families have.
DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "routed_scaling_factor": 1.7}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
GRANITE = {
    **{"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4},
    **{"logits_scaling": 0.7, "attention_bias": True},
}

#: Class of transformers' configuration without "Config", and values that differ from ``SMALL``.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dots": ("Dots1", DEEPSEEK | {"n_shared_experts": 2, "first_k_dense_replace": 1, "attention_bias": True}),
    "ernie": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "use_bias": True, "moe_layer_end_index": 1},
    ),
    "flex": ("FlexOlmo", {"num_experts": 5, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "glm": (
        "Glm4Moe",
        DEEPSEEK | {"use_qk_norm": True, "attention_bias": True, "n_group": 4, "topk_group": 2, "head_dim": 16},
    ),
    "granite": ("GraniteMoe", EXPERTS | GRANITE),
    "granite shared": ("GraniteMoeShared", EXPERTS | GRANITE | {"shared_intermediate_size": 24}),
    "hunyuan": (
        "HunYuanMoEV1",
        {
            **{"num_experts": 5, "moe_topk": 2, "head_dim": 16},
            "rope_parameters": {**ROPE, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
        },
    ),
    "llama4": (
        "Llama4Text",
        {
            **{"num_local_experts": 5, "num_experts_per_tok": 1, "head_dim": 16, "intermediate_size_mlp": 56},
            **{"interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "attention_chunk_size": 9},
            **{"floor_scale": 4, "attn_scale": 0.3, "rope_parameters": ROPE},
        },
    ),
    "minimax": ("MiniMaxM2", EXPERTS | {"head_dim": 16, "rotary_dim": 8}),
    "phimoe": ("Phimoe", EXPERTS | {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.3}),
    "solar": ("SolarOpen", DEEPSEEK | {"head_dim": 16, "attention_bias": True}),
}


def config(case: str, **values: Any) -> Any:
    import transformers

    kind, facts = CASES[case]
    return getattr(transformers, f"{kind}Config")(**{**SMALL, **facts, **values})


def with_biases(model: Any) -> None:
    """Biases of the experts that change the choice."""
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(tensor.data, std=0.3)


#: Relatives of these: logits alone are compared.
RELATIVES = ("dots", "flex", "granite", "solar")


@pytest.mark.parametrize("case", [case for case in CASES if case not in RELATIVES])
def test_families(zoo: Zoo, case: str) -> None:
    # A chunk is all that most layers hold.
    tight = {"num_gpu_blocks_override": 13, "block_size": 4} if case == "llama4" else None
    zoo(config(case), tight=tight, change=with_biases)


@pytest.mark.parametrize("case", RELATIVES)
def test_relatives(zoo: Zoo, case: str) -> None:
    zoo.check_network(zoo.save(config(case), change=with_biases))


def test_the_language_model_of_llama4(zoo: Zoo) -> None:
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    size = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    projections = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
    vision = {**size, **projections, "image_size": 28, "pixel_shuffle_ratio": 0.5}
    text = {**SMALL, **CASES["llama4"][1]}
    model = Llama4ForConditionalGeneration._from_config(
        Llama4Config(text_config=text, vision_config=vision), attn_implementation="eager"
    ).eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.2)
    model.save_pretrained(zoo.folder)
    zoo.check_network(model.language_model)


@pytest.mark.parametrize("case", ["llama4", "minimax"])
def test_1_2_and_4_tensor_parallel_workers_give_the_same_bits(case: str, zoo: Zoo, driver: Any) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    more = {"intermediate_size_mlp": 512} if case == "llama4" else {}
    zoo.save(config(case, **sizes, **more), change=with_biases)
    alone = tensor_parallel_logits(zoo.folder, driver, 1, DType.BFLOAT16)
    for size in (2, 4):
        assert torch.equal(tensor_parallel_logits(zoo.folder, driver, size, DType.BFLOAT16), alone)


#: Cases that together have every fact.
MIXED = ("ernie", "granite shared", "hunyuan", "llama4", "phimoe")


@pytest.mark.parametrize("case", MIXED)
def test_ranks_matrices_of_8_bits_and_adapters(case: str, zoo: Zoo, driver: Any, tmp_path: Path) -> None:
    """Adapters of attention, against a model whose weights have their products added."""
    model = zoo.save(config(case), change=with_biases)
    expected = logits_of(model, PROMPT)
    assert_same(tensor_parallel_logits(zoo.folder, driver, 2, DType.FLOAT32), expected)
    context = LayerContext(CpuKernels(), DType.FLOAT32, quantization="int8")
    network = load_model(zoo.folder, read_model_config(zoo.folder), context)
    rounded = driver(network, kernels=context.kernels).run("s", PROMPT, [13, 1])
    assert 0 < (rounded - expected).square().mean().sqrt() < 0.2 * expected.std()
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".self_attn." in name:
            down = torch.randn((2, module.in_features), generator=generator) * 0.1
            up = torch.randn((module.out_features, 2), generator=generator) * 0.2
            tensors |= {f"base_model.model.{name}.lora_{part}.weight": x for part, x in (("A", down), ("B", up))}
            module.weight.data += up @ down
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in tensors})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 2, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": targets}))
    llm = zoo.engine(enable_lora=True, max_lora_rank=8)
    request = LoRARequest("a", 1, str(folder))
    (output,) = llm.generate(prompts_of([PROMPT]), PARAMS, lora_request=request, use_tqdm=False)
    tokens, logprobs = answer_of(output)
    scores = logits_of(model, PROMPT + tokens)[len(PROMPT) - 1 : -1].log_softmax(-1)
    chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (scores.max(-1).values - chosen).max() < TOLERANCE
    assert (chosen - torch.tensor(logprobs)).abs().max() < TOLERANCE


def test_layers_for_further_tokens_are_left_out(zoo: Zoo) -> None:
    from safetensors.torch import load_file

    model = zoo.save(config("glm"), change=with_biases)
    file = zoo.folder / "model.safetensors"
    save_file({**load_file(file), "model.layers.3.eh_proj.weight": torch.ones(48, 96)}, file)
    edit_config(zoo.folder, num_nextn_predict_layers=1)
    zoo.check_network(model)


def test_the_scale_of_longrope_differs_with_the_length(zoo: Zoo) -> None:
    """Phi-3.5-MoE has two; the longer one is that of contexts beyond the original length."""
    factors = {"long_factor": [4.0] * 4, "short_factor": [1.0] * 4, "long_mscale": 1.5, "short_mscale": 1.25}
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 24, **factors}
    config("phimoe", rope_parameters=rope).save_pretrained(zoo.folder)
    edit_config(zoo.folder, architectures=["PhimoeForCausalLM"])
    read = read_model_config(zoo.folder)
    for length, scale, factor in ((24, 1.25, 1.0), (96, 1.5, 4.0)):
        table = RotaryTable(replace(read, max_position=length), CpuKernels())
        angle = torch.tensor(500.0 ** (-0.25)) / factor
        assert CpuKernels().to_numpy(table.array)[1, 1] == pytest.approx(scale * torch.cos(angle).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("case", "values", "error", "says"),
    [
        ("dots", {"scoring_func": "softmax"}, UnsupportedModelError, 'scoring_func="softmax" is not supported'),
        ("dots", {"num_experts_per_tok": 9}, ConfigError, r"num_experts_per_tok \(9\) is more than the 8 experts"),
        ("dots", {"mlp_layer_types": ["dense"]}, ConfigError, "mlp_layer_types must be a list of 3"),
        ("ernie", {"moe_layer_interval": 0}, ConfigError, "moe_layer_interval must be a positive integer, not 0"),
        ("hunyuan", {"moe_topk": [2, 1, 2]}, UnsupportedModelError, "moe_topk that differs between layers"),
        ("hunyuan", {"use_cla": True}, UnsupportedModelError, "use_cla=true is not supported"),
        (
            "llama4",
            {"no_rope_layers": [1, 2, 0]},
            ConfigError,
            "no_rope_layers must have a 0 or 1 for each of 3 layers",
        ),
        ("llama4", {"layer_types": ["sliding_attention"] * 3}, ConfigError, "chunked_attention or full_attention"),
        ("llama4", {"moe_layers": "all"}, ConfigError, "moe_layers must be a list of layers, not 'all'"),
        ("minimax", {"attn_type_list": [1, 0, 1]}, UnsupportedModelError, "linear attention"),
        ("phimoe", {"num_experts_per_tok": 3}, UnsupportedModelError, "num_experts_per_tok=3 is not supported"),
    ],
)
def test_values_that_are_refused(
    case: str, values: dict[str, Any], error: type[Exception], says: str, zoo: Zoo
) -> None:
    config(case).save_pretrained(zoo.folder)
    name = CASES[case][0].replace("Llama4Text", "Llama4")
    edit_config(zoo.folder, architectures=[f"{name}ForCausalLM"])
    assert isinstance(read_model_config(zoo.folder), MixtureConfig)
    edit_config(zoo.folder, **values)
    with pytest.raises(error, match=says):
        read_model_config(zoo.folder)
