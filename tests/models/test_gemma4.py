"""Gemma 4 against transformers, its shared KV in memory, and config.json as it is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.config.kv_spec import KVSpec, group_layers
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.loader.adapters import AdapterTargets
from octavo.loader.weights import load_model
from octavo.models.config_files import read_model_config
from octavo.models.gemma4 import Gemma4Config, Gemma4Experts, Gemma4Layer
from octavo.models.network import (
    build_rank_without_weights,
    build_without_weights,
    kv_bytes_per_token,
    weight_bytes,
)
from tests.models.test_network import tensor_parallel_logits
from tests.models.zoo import (
    OUTPUT,
    PARAMS,
    PROMPT,
    PROMPTS,
    SMALL,
    Zoo,
    answer_of,
    answers,
    assert_same,
    logits_of,
    prompts_of,
)
from tests.runner.plan_worker import make_adapter

ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
}
SHAPE = SMALL | {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "rope_parameters": ROPES,
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": 0,
}
#: E2B and E4B: the last layers read caches of earlier ones, and every layer has an input of its own.
SMALL_MODEL = SHAPE | {
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 101,
}
#: 31B and 26B-A4B: values of global layers are their keys, of which there are fewer.
LARGE_MODEL = SHAPE | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
MIXTURE = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24}
TIGHT = {"num_gpu_blocks_override": 22, "block_size": 4}


def config(**values: Any) -> Any:
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(**json.loads(json.dumps(values)))


def scale_layers(model: Any) -> None:
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.layer_scalar.fill_(0.5 + 0.125 * index)
            layer.self_attn.q_norm.weight.mul_(0.25)  # as scores have no factor


def test_per_layer_inputs_and_shared_kv(zoo: Zoo) -> None:
    zoo(config(**SMALL_MODEL), tight=TIGHT, change=scale_layers)


def test_values_that_are_keys_and_experts_beside_the_mlp(zoo: Zoo) -> None:
    zoo.rounding = 0.3  # a router whose input is rounded chooses another expert for a token or two
    zoo(config(**LARGE_MODEL, **MIXTURE), tight=TIGHT, change=scale_layers)


def test_a_unified_model_without_either(zoo: Zoo) -> None:
    from transformers import Gemma4UnifiedTextConfig

    shape = {name: value for name, value in LARGE_MODEL.items() if name != "hidden_size_per_layer_input"}
    zoo.check_network(zoo.save(Gemma4UnifiedTextConfig(**json.loads(json.dumps(shape))), change=scale_layers))


def test_shared_caches_are_counted_once_swapped_and_found_again(zoo: Zoo) -> None:
    zoo.save(config(**SMALL_MODEL), change=scale_layers)
    network = build_without_weights(read_model_config(zoo.folder), "float32")
    # Layers 4 and 5 read the caches of 2 and 3.
    assert network.cache_of_layer == {0: 0, 1: 1, 2: 2, 3: 3, 4: 2, 5: 3}
    window, whole = KVSpec("sliding", 2, 16, "float32", 6), KVSpec("full", 2, 32, "float32")
    assert network.kv_specs == [window, whole, window, whole]
    assert kv_bytes_per_token(network) == 4 * 2 * (2 * 2 * 16 + 2 * 2 * 32)
    alone = zoo.engine(enable_prefix_caching=False)
    wanted = [answers(alone, [prompt])[0] for prompt in PROMPTS]
    groups = alone.llm_engine.core.executor.kv_groups()
    assert [(group.block_bytes, group.window) for group in groups] == [(16 * 4 * 256, None), (16 * 4 * 128, 6)]
    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 16, "watermark": 0.0}
    tight = zoo.engine(**options, num_gpu_blocks_override=22, num_host_blocks_override=64, preemption_mode="swap")
    assert answers(tight, PROMPTS) == wanted
    stats = tight.llm_engine.core.scheduler.stats()
    assert stats.preemptions_by_swap > 0 and stats.swapped_in_blocks > 0
    assert stats.blocks_used == stats.host_blocks_used == 0
    ample = zoo.engine(**options)
    assert answers(ample, PROMPTS[-1:]) == wanted[-1:]
    [again] = ample.generate(prompts_of(PROMPTS[-1:]), PARAMS, use_tqdm=False)
    assert again.num_cached_tokens == 39 and answer_of(again) == wanted[-1]
    many = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, n=3)
    [forks] = ample.generate(prompts_of(PROMPTS[2:3]), many, use_tqdm=False)
    assert [list(completion.token_ids) for completion in forks.outputs] == [wanted[2][0]] * 3


def test_rows_that_are_not_sampled_leave_before_the_layers_without_a_cache(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers have the bits of steps in which all rows pass through all layers, as prompt logprobs need them."""
    zoo.save(config(**SMALL_MODEL), change=scale_layers)
    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 16, "enable_prefix_caching": False}
    several = SamplingParams(temperature=0.8, seed=3, max_tokens=OUTPUT, ignore_eos=True, n=3, logprobs=2)
    company = SamplingParams(temperature=0.0, max_tokens=3 * OUTPUT, ignore_eos=True)
    whole = SamplingParams(temperature=0.0, max_tokens=3 * OUTPUT, ignore_eos=True, prompt_logprobs=0)
    rows: list[list[int]] = [[], []]
    forward = Gemma4Layer.forward

    def counting(layer: Gemma4Layer, residual: Any, *args: Any, **keywords: Any) -> Any:
        rows[layer.kv_owner is not None].append(residual.shape[0])
        return forward(layer, residual, *args, **keywords)

    monkeypatch.setattr(Gemma4Layer, "forward", counting)

    def run(llm: LLM, first: SamplingParams, adapter: Any = None) -> list[Any]:
        params = [first, several, *[PARAMS] * (len(PROMPTS) - 1)]
        prompts = prompts_of([PROMPTS[0], *PROMPTS])
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=[None, adapter] * 2 + [adapter])
        return [[(c.token_ids, c.logprobs) for c in output.outputs] for output in outputs[1:]]

    reference = zoo.engine(kernels="reference", **options)  # whose steps are not recorded
    for params, share in ((PARAMS, 0.5), (whole, 1.0)):
        rows[:] = [], []
        reference.generate(prompts_of(PROMPTS[-1:]), params, use_tqdm=False)
        assert sum(rows[True]) / 2 <= share * sum(rows[False]) / 4
    assert sum(rows[True]) / 2 == sum(rows[False]) / 4
    llm = zoo.engine(**options, enable_lora=True)
    fast = run(llm, company)
    assert run(llm, whole) == fast
    assert run(zoo.engine(**options, speculative_config={"method": "ngram"}), company) == fast
    adapter = make_adapter(zoo.folder / "adapter", AdapterTargets(read_model_config(zoo.folder)), 0, rank=4)
    adapted = [run(llm, params, adapter) for params in (company, whole)]
    assert adapted[0] == adapted[1] != fast


@pytest.mark.parametrize("shape", [SMALL_MODEL, LARGE_MODEL | MIXTURE])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_two_ranks_give_the_bits_of_one(dtype: DType, shape: Any, zoo: Zoo, driver: Any) -> None:
    model = zoo.save(config(**shape), change=scale_layers)
    alone = tensor_parallel_logits(zoo.folder, driver, 1, dtype)
    assert torch.equal(tensor_parallel_logits(zoo.folder, driver, 2, dtype), alone)
    if dtype is DType.FLOAT32:
        assert_same(alone, logits_of(model, PROMPT))


def test_the_table_of_per_layer_embeddings_stays_in_the_file(zoo: Zoo) -> None:
    """And of tokens that are none of text, such as those of images, the row of padding counts."""
    cpu = pytest.importorskip("octavo.kernels.cpu.backend", reason="the CPU kernels are not built")
    zoo.save(config(**SMALL_MODEL | {"pad_token_id": 7}), change=lambda model: model.bfloat16())
    read, kernels = read_model_config(zoo.folder), cpu.CpuKernels()
    network: Any = load_model(zoo.folder, read, LayerContext(kernels, DType.FLOAT32))
    table = network.per_layer.table.table
    owner = table.owner
    while isinstance(getattr(owner, "base", None), np.ndarray):
        owner = owner.base
    assert table.dtype is DType.BFLOAT16 and not owner.flags.owndata and not owner.flags.writeable
    held = weight_bytes(network) - weight_bytes(network, maps_tables=True)
    assert held == 101 * 6 * 8 * 4
    rows = kernels.to_numpy(network.per_layer.table(kernels.array(np.array([3, 101, 7]))))
    assert (rows[1] == rows[2]).all() and (rows[0] != rows[1]).any()


def test_keys_of_layers_that_do_not_use_them_are_left_out(zoo: Zoo) -> None:
    model = zoo.save(config(**SMALL_MODEL))
    file = zoo.folder / "model.safetensors"
    unused = {f"model.layers.5.self_attn.{name}.weight": torch.ones(3, 48) for name in ("k_proj", "v_proj", "k_norm")}
    save_file({**load_file(file), **unused}, file, metadata={"format": "pt"})
    run = zoo._runner(ReferenceKernels(), DType.FLOAT32)
    assert_same(run("s", PROMPT, [25]), logits_of(model, PROMPT))


#: Published files, without what does not say how to compute.
E2B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "dtype": "bfloat16",
    "eos_token_id": [1, 106],
    "model_type": "gemma4",
    "text_config": {
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "max_position_embeddings": 131072,
        "model_type": "gemma4_text",
        "num_attention_heads": 8,
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": True,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
}
A4B = E2B | {
    "text_config": {
        **E2B["text_config"],
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "hidden_size": 2816,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 2112,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "top_k_experts": 8,
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
    }
}


def read(folder: Path, raw: dict[str, Any]) -> Gemma4Config:
    (folder / "config.json").write_text(json.dumps(raw))
    config = read_model_config(folder)
    assert isinstance(config, Gemma4Config)
    return config


def test_the_small_models_share_caches_and_have_a_table_for_all_layers(tmp_path: Path) -> None:
    config = read(tmp_path, E2B)
    assert config.sliding_windows == ((512,) * 4 + (None,)) * 7 and config.eos_token_ids == (1, 106)
    assert (config.shared_layers, config.wide_shared, config.per_layer_size) == (20, True, 256)
    assert [config.kv_owner(layer) for layer in (13, 14, 15, 18, 19, 34)] == [None, None, 13, 13, 14, 14]
    assert config.local_rope.theta == 10000.0
    assert (config.rope.rope_type, config.rope.theta, config.rope.partial_rotary_factor) == ("proportional", 1e6, 0.25)
    network = build_without_weights(config, "bfloat16")
    groups = {group.spec.window: len(group.layers) for group in group_layers(network.kv_specs)}
    assert groups == {512: 12, None: 3}
    assert kv_bytes_per_token(network) == 12 * 2 * 256 * 2 + 3 * 2 * 512 * 2
    assert weight_bytes(network) - weight_bytes(network, maps_tables=True) == 262144 * 35 * 256 * 2


def test_the_mixture_takes_keys_as_values_of_global_layers(tmp_path: Path) -> None:
    config = read(tmp_path, A4B)
    assert config.experts == Gemma4Experts(128, 8, 704) and not config.per_layer_size
    assert (config.keys_as_values, config.global_head_dim, config.global_kv_heads) == (True, 512, 2)
    names = {name for name, _, _ in build_without_weights(config, "bfloat16").tensors()}
    assert "model.layers.4.self_attn.v_proj.weight" in names
    assert "model.layers.5.self_attn.v_proj.weight" not in names


def test_impossible_settings_are_named(tmp_path: Path) -> None:
    text = E2B["text_config"]
    with pytest.raises(ConfigError, match=r"num_kv_shared_layers \(35\) leaves no layer"):
        read(tmp_path, E2B | {"text_config": text | {"num_kv_shared_layers": 35}})
    with pytest.raises(ConfigError, match=r"num_kv_shared_layers \(31\) leaves no layer"):
        read(tmp_path, E2B | {"text_config": text | {"num_kv_shared_layers": 31}})
    with pytest.raises(UnsupportedModelError, match='use_bidirectional_attention="all" is not supported'):
        read(tmp_path, E2B | {"text_config": text | {"use_bidirectional_attention": "all"}})
    with pytest.raises(UnsupportedModelError, match="per_layer_config is supported for head_dim"):
        read(tmp_path, E2B | {"text_config": text | {"per_layer_config": {"4": {"head_dim": 64}}}})
    with pytest.raises(ConfigError, match=r"top_k_experts \(129\) is more than the 128 experts"):
        read(tmp_path, A4B | {"text_config": A4B["text_config"] | {"top_k_experts": 129}})
    stage = LayerContext(ReferenceKernels(), DType.FLOAT32, layers=range(15))
    with pytest.raises(ConfigError, match="has no pipeline stages: set pipeline_parallel_size=1"):
        build_rank_without_weights(read(tmp_path, E2B), stage)
