"""LoRA adapters on disk: what is read, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.core.dtypes import DType
from octavo.core.errors import AdapterError
from octavo.core.request import AdapterRef
from octavo.loader.adapters import AdapterTargets, check_adapter, read_adapter
from octavo.models.checkpoint import is_transposed
from octavo.models.config_files import read_model_config
from octavo.models.network import build_without_weights

E, F, V, HEADS, KV_HEADS, LAYERS = 32, 48, 61, 4, 2, 2
Q, K = E, E // HEADS * KV_HEADS
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": V,
    "hidden_size": E,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": V,
    "n_embd": E,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 64,
}
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}
FALCON = {
    "architectures": ["FalconForCausalLM"],
    "vocab_size": V,
    "hidden_size": E,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "new_decoder_architecture": True,
}
GPTJ = {
    "architectures": ["GPTJForCausalLM"],
    "vocab_size": V,
    "n_embd": E,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 64,
    "rotary_dim": 4,
}
MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
Q_PROJ = "model.layers.0.self_attn.q_proj"


def make_targets(folder: Path, config: dict[str, Any]) -> AdapterTargets:
    """The targets of the network that a config.json describes."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return AdapterTargets(read_model_config(folder))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> AdapterTargets:
    return make_targets(tmp_path_factory.mktemp("llama"), LLAMA)


def random(*shape: int, numbers: np.random.Generator | None = None) -> np.ndarray:
    return (numbers or np.random.default_rng(0)).standard_normal(shape, np.float32)


def pair(module: str, out: int, inputs: int, rank: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors of a module's product, as PEFT names them."""
    numbers = np.random.default_rng(seed)
    return {
        f"base_model.model.{module}.lora_A.weight": random(rank, inputs, numbers=numbers),
        f"base_model.model.{module}.lora_B.weight": random(out, rank, numbers=numbers),
    }


def save(folder: Path, tensors: dict[str, np.ndarray], **settings: Any) -> Path:
    """Writes a folder as PEFT does."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": [], **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def weights(path: Path, targets: AdapterTargets, max_rank: int = 16) -> Any:
    """Checks and reads an adapter."""
    return read_adapter(check_adapter(path, "a", targets, max_rank), targets, max_rank)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save(tmp_path / "adapter", pair(Q_PROJ, Q, E))


def test_an_adapter_is_a_digest_a_name_a_path_and_a_rank(adapter: Path, llama: AdapterTargets) -> None:
    ref = check_adapter(adapter, "sql", llama, 16)
    assert ref == AdapterRef(ref.key, "sql", str(adapter.absolute()), 4)
    assert len(ref.key) == 32 and check_adapter(adapter, "other", llama, 16).key == ref.key
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 9}))
    assert check_adapter(adapter, "sql", llama, 16).key != ref.key, "other scales are another adapter"


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16])
def test_matrices_are_read_in_float32_with_their_scale(tmp_path: Path, llama: AdapterTargets, dtype: DType) -> None:
    tensors = {name: tensor.astype(dtype.numpy) for name, tensor in pair(Q_PROJ, Q, E).items()}
    found = weights(save(tmp_path / "a", tensors), llama)
    down, up = (tensor.astype(np.float32) for tensor in tensors.values())
    assert [*found] == ["model.layers.0.self_attn"] and [*found["model.layers.0.self_attn"]] == ["q_proj"]
    read_down, read_up = found["model.layers.0.self_attn"]["q_proj"]
    assert read_down.dtype == read_up.dtype == np.float32
    assert np.array_equal(read_down, down) and np.array_equal(read_up, up * 2)


@pytest.mark.parametrize(
    "settings, scale",
    [
        ({}, 2.0),
        ({"lora_alpha": 3}, 0.75),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"proj": 2}}, 2.0),  # the name of a module is matched from a dot on
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 2}}, 2.0),
        ({"alpha_pattern": {"layers\\.[01]\\..*q_proj": 2}}, 0.5),
        ({"r": 16, "rank_pattern": {"q_proj": 4}}, 2.0),
        ({"r": 16, "rank_pattern": {"self_attn.q_proj": 4}, "use_rslora": True}, 4.0),
    ],
)
def test_scales_are_those_of_peft(tmp_path: Path, llama: AdapterTargets, settings: Any, scale: float) -> None:
    tensors = pair(Q_PROJ, Q, E)
    _, up = weights(save(tmp_path / "a", tensors, **settings), llama)["model.layers.0.self_attn"]["q_proj"]
    assert np.array_equal(up, [*tensors.values()][1] * scale)


def test_embedding_and_head_take_adapters(tmp_path: Path, llama: AdapterTargets) -> None:
    tensors = pair("lm_head", V, E)
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = random(4, V)
    tensors["base_model.model.model.embed_tokens.lora_embedding_B"] = random(E, 4)
    tensors["base_model.model.model.embed_tokens.base_layer.weight"] = random(V, E)  # saved by PEFT beside them
    found = weights(save(tmp_path / "a", tensors), llama)
    assert {layer: {part: (a.shape, b.shape) for part, (a, b) in parts.items()} for layer, parts in found.items()} == {
        "lm_head": {"": ((4, E), (V, 4))},
        "model.embed_tokens": {"": ((4, V), (E, 4))},
    }
    tensors["base_model.model.model.embed_tokens.base_layer.weight"] = random(V + 1, E)
    with pytest.raises(AdapterError, match=r"embed_tokens.base_layer.weight.*resized vocabulary"):
        check_adapter(save(tmp_path / "b", tensors), "b", llama, 16)


@pytest.mark.parametrize(
    "config, module, out, inputs",
    [
        (LLAMA, Q_PROJ, Q, E),
        (LLAMA, "model.layers.1.mlp.down_proj", E, F),
        (GPT2, "transformer.h.1.attn.c_attn", 3 * E, E),
        (GPT2, "transformer.h.0.mlp.c_proj", E, 4 * E),
        (PHI3, "model.layers.0.self_attn.qkv_proj", Q + 2 * K, E),
        (PHI3, "model.layers.0.mlp.gate_up_proj", 2 * F, E),
        (FALCON, "transformer.h.0.self_attention.query_key_value", Q + 2 * K, E),
        (FALCON, "transformer.h.0.mlp.dense_4h_to_h", E, 4 * E),
        (GPTJ, "transformer.h.0.attn.k_proj", E, E),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else str(value),
)
def test_the_product_is_what_the_checkpoint_map_makes_of_a_changed_weight(
    tmp_path: Path, config: dict[str, Any], module: str, out: int, inputs: int
) -> None:
    """The reference is the whole product, passed through the map as a tensor of the checkpoint."""
    targets = make_targets(tmp_path / "model", config)
    tensors = pair(module, out, inputs)
    down, up = tensors.values()
    network = build_without_weights(targets.config, "float32")
    name, delta = f"{module}.weight", 2 * up @ down
    shapes = {name: layer.expected[shard] for name, layer, shard in network.tensors()}
    pairs: Any = [(name, delta.T if is_transposed(name, network.checkpoint_map) else delta)]
    for entry in network.checkpoint_map:
        pairs = entry.apply(pairs, shapes)
    expected = dict(pairs)
    found = {
        f"{layer}.{part}.weight" if part else f"{layer}.weight": b @ a
        for layer, parts in weights(save(tmp_path / "a", tensors), targets).items()
        for part, (a, b) in parts.items()
    }
    assert found.keys() == expected.keys() and len(found) >= 1
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-5)


def test_heads_of_tied_models_take_adapters(tmp_path: Path) -> None:
    targets = make_targets(tmp_path / "model", {**LLAMA, "tie_word_embeddings": True})
    assert [*weights(save(tmp_path / "a", pair("lm_head", V, E)), targets)] == ["lm_head"]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
        ({"peft_type": None}, "peft_type=None"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"use_dora": True}, "use_dora=True is not supported: DoRA"),
        ({"use_qalora": True}, "use_qalora"),
        ({"use_something_new": True}, "use_something_new=True is not supported"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.w"]}, "target_parameters"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'.*weights that the initialisation"),
        ({"init_lora_weights": "novel"}, "init_lora_weights='novel'"),
        ({"r": 0}, "r must be a positive integer, not 0"),
        ({"r": "4"}, "r must be a positive integer, not '4'"),
        ({"r": 5}, "q_proj.lora_A.weight.* rank 5"),
        ({"lora_alpha": None}, "lora_alpha must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"alpha_pattern": {"(": 1}}, "wrong or too complex"),
        ({"alpha_pattern": {"(a+)+b": 1}}, "wrong or too complex"),
        ({"alpha_pattern": {".*.*.*.*.*.*.*.*x": 1}}, "wrong or too complex"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_served_are_refused_by_name(
    tmp_path: Path, llama: AdapterTargets, settings: Any, message: str
) -> None:
    with pytest.raises(AdapterError, match=message):
        check_adapter(save(tmp_path / "a", pair(Q_PROJ, Q, E), **settings), "a", llama, 16)


def test_settings_of_training_are_ignored(tmp_path: Path, llama: AdapterTargets) -> None:
    folder = save(
        tmp_path / "a",
        pair(Q_PROJ, Q, E),
        lora_dropout=0.3,
        fan_in_fan_out=True,
        layers_to_transform=[0],
        loftq_config={},
        eva_config=None,
        init_lora_weights="gaussian",
        megatron_core="megatron.core",
        trainer_version="7",
    )
    assert check_adapter(folder, "a", llama, 16).rank == 4


@pytest.mark.parametrize(
    "tensors, message",
    [
        (pair(Q_PROJ, Q + 1, E), r"lora_B.weight' cannot be used: it has 33 rows, but .*q_proj' has 32"),
        (pair(Q_PROJ, Q, E + 1), r"lora_A.weight' has 33 columns, but .*q_proj' has 32 inputs"),
        (pair("model.layers.2.self_attn.q_proj", Q, E), "LlamaForCausalLM of 2 layers does not have"),
        (pair("model.layers.0.input_layernorm", E, E), "input_layernorm', which takes no adapters"),
        (pair("transformer.h.0.attn.c_attn", 3 * E, E), "c_attn', which a LlamaForCausalLM"),
        ({k: v for k, v in pair(Q_PROJ, Q, E).items() if "lora_A" in k}, "lora_A.weight' has no partner"),
        ({"model.layers.0.self_attn.q_proj.weight": np.zeros((Q, E), np.float32)}, "is no low-rank matrix"),
        (
            {
                **pair(Q_PROJ, Q, E),
                "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": np.ones(E, np.float32),
            },
            "lora_magnitude_vector' is no low-rank matrix",
        ),
        (
            {**pair(Q_PROJ, Q, E), "base_model.model.lm_head.weight": np.zeros((V, E), np.float32)},
            "lm_head.weight' is no low-rank",
        ),
        (
            {name: tensor.astype(np.int32) for name, tensor in pair(Q_PROJ, Q, E).items()},
            "lora_A.weight' is of type I32",
        ),
        ({name: tensor[None] for name, tensor in pair(Q_PROJ, Q, E).items()}, "lora_A.weight' has shape"),
        ({}, "holds no low-rank matrices"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, llama: AdapterTargets, tensors: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(AdapterError, match=message):
        check_adapter(save(tmp_path / "a", tensors), "a", llama, 16)


def test_experts_and_routers_take_no_adapters(tmp_path: Path) -> None:
    targets = make_targets(tmp_path / "model", MIXTRAL)
    for module, out in (("experts.1.w1", F), ("gate", 4)):
        tensors = pair(f"model.layers.0.block_sparse_moe.{module}", out, E)
        with pytest.raises(AdapterError, match=f"{module}', which takes no adapters"):
            check_adapter(save(tmp_path / "a", tensors), "a", targets, 16)


def test_a_rank_above_the_maximum_is_refused(adapter: Path, llama: AdapterTargets) -> None:
    with pytest.raises(AdapterError, match=r"lora_A.weight' has rank 4; served are ranks of 1 to 3 \(max_lora_rank\)"):
        check_adapter(adapter, "a", llama, 3)


def _without_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def _without_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def _with_a_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _truncated(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def _longer(folder: Path) -> None:
    with (folder / "adapter_model.safetensors").open("ab") as file:
        file.write(b"more")


def _no_safetensors(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"hello, hello, hello")


def _no_json(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


def _deep_json(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[" * 100000)


def _overlapping(folder: Path) -> None:
    header = {name: {"dtype": "F32", "shape": [4, E], "data_offsets": [0, 16 * E]} for name in pair(Q_PROJ, Q, E)}
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16 * E))


def _huge_shape(folder: Path) -> None:
    header = {name: {"dtype": "F32", "shape": [4, 1 << 60], "data_offsets": [0, 64]} for name in pair(Q_PROJ, Q, E)}
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))


@pytest.mark.parametrize(
    "damage, message",
    [
        (_without_config, "has no adapter_config.json"),
        (_without_weights, "has no adapter_model.safetensors"),
        (_with_a_pickle, "pickles, which can run code"),
        (_truncated, "damaged or no safetensors file"),
        (_longer, "damaged or no safetensors file"),
        (_no_safetensors, "no safetensors file"),
        (_no_json, "is not readable JSON"),
        (_deep_json, "is not readable JSON"),
        (_overlapping, "damaged or no safetensors file"),
        (_huge_shape, "damaged or no safetensors file"),
    ],
)
def test_damaged_folders_are_refused(
    adapter: Path, llama: AdapterTargets, damage: Callable[[Path], None], message: str
) -> None:
    damage(adapter)
    with pytest.raises(AdapterError, match=message):
        check_adapter(adapter, "a", llama, 16)


def test_paths_that_hold_no_adapter_are_refused(tmp_path: Path, llama: AdapterTargets) -> None:
    with pytest.raises(AdapterError, match=r"absent is missing"):
        check_adapter(tmp_path / "absent", "a", llama, 16)
    with pytest.raises(AdapterError, match="is no adapter"):
        file = tmp_path / "notes.txt"
        file.write_text("notes")
        check_adapter(file, "a", llama, 16)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(AdapterError, match="a whole model"):
        check_adapter(tmp_path, "a", llama, 16)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_when_read(tmp_path: Path, llama: AdapterTargets, value: float) -> None:
    tensors = pair(Q_PROJ, Q, E)
    [*tensors.values()][1][3, 2] = value
    ref = check_adapter(save(tmp_path / "a", tensors), "a", llama, 16)
    with pytest.raises(AdapterError, match=r"1 of the values of tensor .*q_proj.lora_B.weight' are infinite or not"):
        read_adapter(ref, llama, 16)


@pytest.mark.parametrize("damage", [None, _truncated, _no_json, _without_weights])
def test_files_that_changed_after_the_check_are_refused(
    adapter: Path, llama: AdapterTargets, damage: Callable[[Path], None] | None
) -> None:
    ref = check_adapter(adapter, "sql", llama, 16)
    file = adapter / "adapter_model.safetensors"
    if damage is None:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    else:
        damage(adapter)
    with pytest.raises(AdapterError, match=r"'sql' changed on disk after it was loaded; load it again"):
        read_adapter(ref, llama, 16)


def write_gguf(path: Path, tensors: dict[str, np.ndarray], arch: str = "llama", **facts: Any) -> Path:
    """Writes an adapter as llama.cpp's converter does."""
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), arch)
    facts = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0, **facts}
    for key, value in facts.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_float32(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(source: str, down: np.ndarray, up: np.ndarray) -> dict[str, np.ndarray]:
    return {f"{source}.lora_a": down, f"{source}.lora_b": up}


def _permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """The rows of queries or keys of a Llama, as llama.cpp's converter reorders them."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def test_gguf_adapters_are_those_of_peft(tmp_path: Path, llama: AdapterTargets) -> None:
    modules = {
        "blk.1.attn_q.weight": ("model.layers.1.self_attn.q_proj", Q, E, HEADS),
        "blk.0.attn_k.weight": ("model.layers.0.self_attn.k_proj", K, E, KV_HEADS),
        "blk.0.attn_v.weight": ("model.layers.0.self_attn.v_proj", K, E, None),
        "blk.0.attn_output.weight": ("model.layers.0.self_attn.o_proj", E, Q, None),
        "blk.0.ffn_gate.weight": ("model.layers.0.mlp.gate_proj", F, E, None),
        "blk.0.ffn_down.weight": ("model.layers.0.mlp.down_proj", E, F, None),
        "output.weight": ("lm_head", V, E, None),
    }
    tensors: dict[str, np.ndarray] = {}
    rows: dict[str, np.ndarray] = {}
    for seed, (source, (module, out, inputs, heads)) in enumerate(modules.items()):
        made = pair(module, out, inputs, seed=seed)
        down, up = made.values()
        tensors |= made
        rows |= gguf_tensors(source, down, up if heads is None else _permuted(up, heads))
    a, b = random(4, V), random(E, 4)
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = a
    tensors["base_model.model.model.embed_tokens.lora_embedding_B"] = b
    rows |= gguf_tensors("token_embd.weight", np.ascontiguousarray(a.T), b)
    theirs = weights(write_gguf(tmp_path / "a.gguf", rows), llama)
    ours = weights(save(tmp_path / "a", tensors), llama)
    assert theirs.keys() == ours.keys()
    for layer, parts in ours.items():
        for part, matrices in parts.items():
            assert all(np.array_equal(x, y) for x, y in zip(matrices, theirs[layer][part], strict=True))


def test_gguf_adapters_of_gated_delta_networks_are_those_of_peft(tmp_path: Path) -> None:
    """Their files have value heads in another order, and queries with their gates."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8}
    kinds = {"layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 8, "head_dim": 8}
    targets = make_targets(tmp_path / "model", {**LLAMA, **sizes, **kinds, "architectures": ["Qwen3_5ForCausalLM"]})
    heads = [3 * key + value for value in range(3) for key in range(2)]
    values = np.concatenate([np.arange(8) + 8 * head for head in heads])
    modules = {
        "blk.0.attn_qkv.weight": ("model.layers.0.linear_attn.in_proj_qkv", 80, E),
        "blk.0.attn_gate.weight": ("model.layers.0.linear_attn.in_proj_z", 48, E),
        "blk.0.ssm_out.weight": ("model.layers.0.linear_attn.out_proj", E, 48),
        "blk.1.attn_q.weight": ("model.layers.1.self_attn.q_proj", 2 * Q, E),
    }
    tensors: dict[str, np.ndarray] = {}
    rows: dict[str, np.ndarray] = {}
    for seed, (source, (module, out, inputs)) in enumerate(modules.items()):
        made = pair(module, out, inputs, seed=seed)
        down, up = made.values()
        tensors |= made
        if module.endswith("out_proj"):
            down = np.ascontiguousarray(down[:, values])
        elif "linear_attn" in module:
            up = np.concatenate([up[:-48], up[-48:][values]])
        rows |= gguf_tensors(source, down, up)
    theirs = weights(write_gguf(tmp_path / "a.gguf", rows, "qwen35"), targets)
    ours = weights(save(tmp_path / "a", tensors), targets)
    assert theirs.keys() == ours.keys()
    assert {part for parts in ours.values() for part in parts} == {
        *("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "q_proj", "gate_proj", ""),
    }
    for layer, parts in ours.items():
        for part, matrices in parts.items():
            assert all(np.array_equal(x, y) for x, y in zip(matrices, theirs[layer][part], strict=True)), part


def test_quantised_gguf_adapters_are_read(tmp_path: Path, llama: AdapterTargets) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    down = random(4, E)
    file = tmp_path / "a.gguf"
    from gguf import GGUFWriter

    writer = GGUFWriter(str(file), "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    kind = GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.attn_v.weight.lora_a", quantize(down, kind), raw_dtype=kind)
    writer.add_tensor("blk.0.attn_v.weight.lora_b", np.ones((K, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read, _ = weights(file, llama)["model.layers.0.self_attn"]["v_proj"]
    np.testing.assert_allclose(read, down, atol=0.05, rtol=0)


@pytest.mark.parametrize(
    "source, arch, facts, message",
    [
        (
            "blk.0.attn_v.weight",
            "qwen2",
            {},
            "for the architecture 'qwen2'; the model .LlamaForCausalLM. takes 'llama'",
        ),
        ("blk.0.attn_v.weight", "llama", {"general.type": "model"}, "general.type is 'model'"),
        ("blk.0.attn_v.weight", "llama", {"adapter.type": "ia3"}, "adapter.type='ia3' is not supported"),
        ("blk.0.attn_v.weight", "llama", {"adapter.lora.alpha": None}, "adapter.lora.alpha must be a number"),
        ("blk.0.attn_v.weight", "llama", {"adapter.alora.x": "1"}, "adapter.alora.x"),
        ("blk.7.attn_v.weight", "llama", {}, "LlamaForCausalLM of 2 layers does not have"),
        ("blk.0.attn_norm.weight", "llama", {}, "input_layernorm', which takes no adapters"),
        ("blk.0.ffn_gate_exps.weight", "llama", {}, "no adapters of the tensor 'blk.0.ffn_gate_exps.weight'"),
        ("rope_freqs.weight", "llama", {}, "no adapters of the tensor 'rope_freqs.weight'"),
    ],
)
def test_gguf_adapters_that_do_not_fit_are_refused(
    tmp_path: Path, llama: AdapterTargets, source: str, arch: str, facts: Any, message: str
) -> None:
    rows = gguf_tensors(source, np.ones((4, E), np.float32), np.ones((K, 4), np.float32))
    with pytest.raises(AdapterError, match=message):
        check_adapter(write_gguf(tmp_path / "a.gguf", rows, arch, **facts), "a", llama, 16)


def test_damaged_gguf_adapters_are_refused(tmp_path: Path, llama: AdapterTargets) -> None:
    rows = gguf_tensors("blk.0.attn_v.weight", np.ones((4, E), np.float32), np.ones((K, 4), np.float32))
    file = write_gguf(tmp_path / "a.gguf", rows)
    ref = check_adapter(file, "a", llama, 16)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(AdapterError, match="truncated"):
        check_adapter(file, "a", llama, 16)
    with pytest.raises(AdapterError, match="changed on disk"):
        read_adapter(ref, llama, 16)
    write_gguf(file, {k: v for k, v in rows.items() if k.endswith("a")})
    with pytest.raises(AdapterError, match=r"has no partner 'blk.0.attn_v.weight.lora_b'"):
        check_adapter(file, "a", llama, 16)
