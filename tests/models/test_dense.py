"""The families of ``octavo.models.dense``."""

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
from octavo.loader.weights import load_model, make_dummy_model
from octavo.models.config_files import read_model_config
from tests.models.test_network import tensor_parallel_logits
from tests.models.test_pipeline_stages import WHOLE, Chain
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
YARN = {
    **{"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 24},
    **{"beta_fast": 32.0, "beta_slow": 1.0},
}

#: Class of transformers' configuration without "Config", and values that differ from ``SMALL``.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee", {"mlp_bias": True, "head_dim": 8}),
    "ernie": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "exaone": ("Exaone4", {"sliding_window": 7, "sliding_window_pattern": 2, "num_hidden_layers": 4}),
    "glm": ("Glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "granite": (
        "Granite",
        {
            **{"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4},
            **{"logits_scaling": 0.7, "attention_bias": True},
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        {"head_dim": 16, "rope_parameters": {**ROPE, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "ministral": (
        "Ministral3",
        {
            "head_dim": 16,
            "pad_token_id": 0,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        },
    ),
    "nemotron": ("Nemotron", {"attention_bias": True, "mlp_bias": True}),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "rope_parameters": {"full_attention": YARN, "sliding_attention": ROPE},
        },
    ),
    "seed": ("SeedOss", {"head_dim": 16, "attention_out_bias": True}),
    "smollm3": ("SmolLM3", {"pad_token_id": 0, "no_rope_layer_interval": 2}),
}


def config(case: str, **values: Any) -> Any:
    import transformers

    kind, facts = (CASES | RELATIVES)[case]
    return getattr(transformers, f"{kind}Config")(**{**SMALL, **facts, **values})


#: Relatives of these and of Llama: logits alone are compared.
RELATIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "cwm": ("Cwm", {"head_dim": 16, "sliding_window": 7, "pad_token_id": 0, "rope_parameters": ROPE}),
    "helium": ("Helium", {"head_dim": 8, "attention_bias": True}),
    "hyperclovax": ("HyperCLOVAX", {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 0.5}),
    "jais": ("Jais2", {}),
    "olmo": ("Olmo", {"clip_qkv": 0.7}),
    "ministral 8b": ("Ministral", {"head_dim": 16, "sliding_window": 7}),
}


@pytest.mark.parametrize("case", CASES)
def test_families(zoo: Zoo, case: str) -> None:
    zoo(config(case))


@pytest.mark.parametrize("case", RELATIVES)
def test_relatives(zoo: Zoo, case: str) -> None:
    zoo.check_network(zoo.save(config(case)))


@pytest.mark.parametrize("kind", ["mistral", "ministral3"])
def test_the_language_model_of_mistral3(kind: str, zoo: Zoo) -> None:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text = {**SMALL, "head_dim": 16, "model_type": kind, "sliding_window": None}
    if kind == "ministral3":
        text |= CASES["ministral"][1]
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 16,
    }
    model = Mistral3ForConditionalGeneration._from_config(
        Mistral3Config(text_config=text, vision_config={**vision, "model_type": "pixtral"}, tie_word_embeddings=False),
        attn_implementation="eager",
    ).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    model.save_pretrained(zoo.folder)
    zoo.check_network(model)


@pytest.mark.parametrize("case", ["olmo3", "granite"])
def test_1_2_and_4_tensor_parallel_workers_give_the_same_bits(case: str, zoo: Zoo, driver: Any) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    zoo.save(config(case, hidden_size=256, intermediate_size=512, **heads))
    alone = tensor_parallel_logits(zoo.folder, driver, 1, DType.BFLOAT16)
    for size in (2, 4):
        assert torch.equal(tensor_parallel_logits(zoo.folder, driver, size, DType.BFLOAT16), alone)


#: Cases that together have every fact.
MIXED = ("apertus", "glm4", "granite", "hunyuan", "nemotron")


@pytest.mark.parametrize("case", MIXED)
def test_ranks_together_compute_the_network(case: str, zoo: Zoo, driver: Any) -> None:
    expected = logits_of(zoo.save(config(case)), PROMPT)
    assert_same(tensor_parallel_logits(zoo.folder, driver, 2, DType.FLOAT32), expected)


@pytest.mark.parametrize("case", ["granite", "olmo3", "smollm3"])
def test_stages_together_are_the_whole_bit_for_bit(case: str, zoo: Zoo, driver: Any) -> None:
    zoo.save(config(case))
    read = read_model_config(zoo.folder)
    stages = [load_model(zoo.folder, read, replace(WHOLE, layers=range(*cut))) for cut in ((0, 1), (1, 3))]
    expected = driver(load_model(zoo.folder, read, WHOLE)).run("s", PROMPT, [7, 1])
    assert torch.equal(driver(Chain(stages)).run("s", PROMPT, [7, 1]), expected)


@pytest.mark.parametrize("case", MIXED)
def test_matrices_of_8_bits(case: str, zoo: Zoo, driver: Any) -> None:
    expected = logits_of(zoo.save(config(case)), PROMPT)
    context = LayerContext(CpuKernels(), DType.FLOAT32, quantization="int8")
    network = load_model(zoo.folder, read_model_config(zoo.folder), context)
    logits = driver(network, kernels=context.kernels).run("s", PROMPT, [13, 1])
    assert 0 < (logits - expected).square().mean().sqrt() < 0.15 * expected.std()


@pytest.mark.parametrize("case", MIXED)
def test_adapters(case: str, zoo: Zoo, tmp_path: Path) -> None:
    """Of all matrices of the layers, against a model whose weights have their products added."""
    model = zoo.save(config(case))
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
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


def test_random_weights(zoo: Zoo, driver: Any) -> None:
    """Also of tensors that are one number."""
    zoo.save(config("apertus"))
    network = make_dummy_model(read_model_config(zoo.folder), WHOLE, seed=1)
    assert driver(network).run("s", PROMPT, [len(PROMPT)]).std() > 0.2


@pytest.mark.parametrize(
    ("case", "values", "error", "says"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, ConfigError, r"no_rope_layers must have a 0 or 1 for each of 3 layers"),
        ("exaone", {"layer_types": None, "sliding_window_pattern": "LX"}, ConfigError, "letters L and G, not 'LX'"),
        ("hunyuan", {"use_cla": True}, UnsupportedModelError, "use_cla=true is not supported"),
        ("arcee", {"hidden_act": "mish"}, UnsupportedModelError, "hidden_act='mish' is not supported"),
        ("apertus", {"hidden_act": "silu"}, UnsupportedModelError, 'hidden_act="silu" is not supported'),
        ("ministral", {"sliding_window": -1}, ConfigError, "sliding_window must be a positive integer"),
        ("granite", {"residual_multiplier": 0}, ConfigError, "residual_multiplier must be a number above 0"),
    ],
)
def test_values_that_are_refused(
    case: str, values: dict[str, Any], error: type[Exception], says: str, zoo: Zoo
) -> None:
    config(case).save_pretrained(zoo.folder)
    edit_config(zoo.folder, architectures=[f"{CASES[case][0]}ForCausalLM"], **values)
    with pytest.raises(error, match=says):
        read_model_config(zoo.folder)


def test_older_files_have_the_same_values(zoo: Zoo) -> None:
    """Rope as transformers 4 writes it, and patterns instead of lists of layers."""
    scaling = {name: value for name, value in YARN.items() if name != "rope_theta"}
    by_type = {"full_attention": YARN | {"rope_theta": 500.0}, "sliding_attention": ROPE}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "olmo3": ({"rope_parameters": by_type}, {"rope_theta": 500.0, "rope_scaling": scaling}),
        "exaone": ({}, {"layer_types": None, "sliding_window_pattern": "LG", "rope_theta": 10000.0}),
        "glm": ({}, {"rope_theta": 10000.0}),
        "smollm3": ({}, {"no_rope_layers": None, "rope_theta": 2e6}),
        "hunyuan": ({}, {"rope_scaling": {"type": "dynamic", "alpha": 50.0}, "rope_theta": 500.0}),
    }
    for case, (new, old) in cases.items():
        config(case, **new).save_pretrained(zoo.folder)
        edit_config(zoo.folder, architectures=[f"{CASES[case][0]}ForCausalLM"])
        wanted = read_model_config(zoo.folder)
        edit_config(zoo.folder, rope_parameters=None, **old)
        assert read_model_config(zoo.folder) == wanted, case
