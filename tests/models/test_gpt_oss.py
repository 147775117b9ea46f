"""gpt-oss against transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, LoRARequest
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.models.config_files import read_model_config
from octavo.models.network import build_without_weights, num_active_parameters, num_parameters
from tests.adapters import write_adapter
from tests.models.test_network import tensor_parallel_logits
from tests.models.zoo import (
    ON_GPU,
    PARAMS,
    PROMPT,
    PROMPTS,
    SMALL,
    Zoo,
    answer_of,
    answers,
    assert_same,
    edit_config,
    logits_of,
    prompts_of,
)
from tests.quantized_checkpoints import mxfp4

ROPE = {
    **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"truncate": False, "original_max_position_embeddings": 24},
}


def config(**values: Any) -> Any:
    from transformers import GptOssConfig

    shape = SMALL | {"head_dim": 16, "intermediate_size": 32, "num_local_experts": 6, "num_experts_per_tok": 3}
    return GptOssConfig(**shape | {"sliding_window": 7, "rope_parameters": ROPE} | values)


def spread(model: Any) -> None:
    """Sinks from almost none to most of a token's attention, and gates and ups beyond the clamps."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.linspace(-3, 4, len(layer.self_attn.sinks)))
            layer.mlp.experts.gate_up_proj_bias.mul_(20.0)


def test_gpt_oss(zoo: Zoo) -> None:
    model = zoo(config(), tight={"num_gpu_blocks_override": 22, "block_size": 4}, change=spread)
    assert read_model_config(zoo.folder).sliding_windows == (7, None, 7)
    tensors = dict(model.named_parameters())
    assert tensors["model.layers.0.mlp.experts.gate_up_proj"].shape == (6, 48, 64)


def test_1_2_and_4_tensor_parallel_workers_give_the_same_bits(zoo: Zoo, driver: Any) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 96}
    expected = logits_of(zoo.save(config(**sizes), change=spread), PROMPT)
    alone = tensor_parallel_logits(zoo.folder, driver, 1, DType.FLOAT32)
    assert_same(alone, expected)
    for size in (2, 4):
        assert torch.equal(tensor_parallel_logits(zoo.folder, driver, size, DType.FLOAT32), alone)


def test_int8_and_bfloat16_alone_and_in_company(zoo: Zoo) -> None:
    model = zoo.save(config(), change=spread)
    for dtype, quantization in (("float32", "int8"), ("bfloat16", "none"))[ON_GPU:]:  # there, experts have no int8
        engine = zoo.engine(dtype=dtype, quantization=quantization)
        alone = [answers(engine, [prompt])[0] for prompt in PROMPTS]
        assert answers(engine, PROMPTS) == alone
        for prompt, (tokens, logprobs) in zip(PROMPTS, alone, strict=True):
            scores = logits_of(model, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
            chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert (chosen - torch.tensor(logprobs)).square().mean().sqrt() < 0.15


def test_adapters_of_attention(zoo: Zoo) -> None:
    model = zoo.save(config(head_dim=8), change=spread)
    adapter = write_adapter(zoo.folder / "adapter", zoo.folder)
    engine = zoo.engine(enable_lora=True)
    request = LoRARequest("adapter", 1, str(adapter))
    plain = answers(engine, [PROMPT])[0]
    outputs = engine.generate(prompts_of([PROMPT, PROMPT]), PARAMS, use_tqdm=False, lora_request=[request, None])
    adapted, beside = map(answer_of, outputs)
    assert beside == plain
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        if name.endswith("lora_A.weight"):
            up = load_file(adapter / "adapter_model.safetensors")[name.replace("lora_A", "lora_B")]
            weight = model.get_parameter(name.removeprefix("base_model.model.").replace("lora_A.", ""))
            weight.data += up @ tensor
    tokens, logprobs = adapted
    scores = logits_of(model, PROMPT + tokens)[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert scores.argmax(-1).tolist() == tokens != plain[0]
    assert (scores.max(-1).values - torch.tensor(logprobs)).abs().max() < 1e-3


def test_sizes_are_counted(zoo: Zoo) -> None:
    model = zoo.save(config())
    network = build_without_weights(read_model_config(zoo.folder), "float32")
    assert num_parameters(network) == sum(parameter.numel() for parameter in model.parameters())
    unused = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name) // 2
    assert num_active_parameters(network) == num_parameters(network) - unused


def test_random_weights(zoo: Zoo) -> None:
    zoo.save(config(hidden_size=64, intermediate_size=64))
    edit_config(zoo.folder, quantization_config={"quant_method": "mxfp4"})
    for quantization in ("auto", "mxfp4"):
        options: dict[str, Any] = {"max_model_len": 64, "skip_tokenizer_init": True, "quantization": quantization}
        engine = LLM(str(zoo.folder), load_format="dummy", **options)
        logprobs = [logprob for _, logprobs in answers(engine, PROMPTS) for logprob in logprobs]
        assert -5 < min(logprobs) < max(logprobs) < -0.1


def test_values_that_are_refused(zoo: Zoo) -> None:
    zoo.save(config())
    edit_config(zoo.folder, swiglu_limit=10.0)
    with pytest.raises(UnsupportedModelError, match=r"swiglu_limit=10\.0 is not supported"):
        read_model_config(zoo.folder)
    edit_config(zoo.folder, swiglu_limit=None, num_experts_per_tok=7)
    with pytest.raises(ConfigError, match=r"num_experts_per_tok \(7\) is more than the 6 experts"):
        read_model_config(zoo.folder)


def write_mxfp4(model: Any, source: Path, folder: Path) -> None:
    """The checkpoint of ``source`` with its experts in MXFP4, as OpenAI publishes it; the model gets their values."""
    shutil.copytree(source, folder)
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor
            continue
        packed = [mxfp4(matrix.T.numpy()) for matrix in tensor]
        for part in ("_blocks", "_scales"):
            tensors[f"{name}{part}"] = torch.stack([parts[part] for parts, _ in packed])
        values = np.stack([values.T for _, values in packed])
        model.get_parameter(name).data.copy_(torch.from_numpy(values))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("quantization", ["none", "mxfp4"])
def test_mxfp4_checkpoints(zoo: Zoo, quantization: str) -> None:
    """Widened, they are those of their values; in their own form the activations have 8 bits."""
    model = zoo.save(config(hidden_size=64, intermediate_size=64), change=spread)
    write_mxfp4(model, zoo.folder, zoo.folder / "mxfp4")
    engine = zoo.engine(zoo.folder / "mxfp4", quantization=quantization)
    alone = [answers(engine, [prompt])[0] for prompt in PROMPTS]
    assert answers(engine, PROMPTS) == alone
    tolerance = 1e-3 if quantization == "none" else 0.1
    for prompt, (tokens, logprobs) in zip(PROMPTS, alone, strict=True):
        scores = logits_of(model, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (scores.max(-1).values - chosen).max() < tolerance
        assert (chosen - torch.tensor(logprobs)).abs().max() < tolerance
    if quantization == "mxfp4":  # is what "auto" is
        assert answers(zoo.engine(zoo.folder / "mxfp4"), PROMPTS) == alone


def test_ranks_of_an_mxfp4_checkpoint_agree(zoo: Zoo, driver: Any) -> None:
    # Four ranks have 64, 32, 32 and 32 inner values.
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 160}
    model = zoo.save(config(**sizes), change=spread)
    write_mxfp4(model, zoo.folder, zoo.folder / "mxfp4")
    expected = logits_of(model, PROMPT)
    assert_same(tensor_parallel_logits(zoo.folder / "mxfp4", driver, 2, DType.FLOAT32), expected)
    for size in (2, 4):
        own = tensor_parallel_logits(zoo.folder / "mxfp4", driver, size, DType.FLOAT32, "mxfp4")
        assert 0 < (own - expected).square().mean().sqrt() < 0.02 * expected.std()
