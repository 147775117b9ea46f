from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Q

from octavo.core.errors import OctavoError, TokenizerError, UnsupportedModelError, WeightError
from octavo.core.model_config import ModelConfig
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.rope import RotaryTable
from octavo.loader.gguf_config import generation_config, write_gguf_folder
from octavo.loader.gguf_file import GGUFFile, llama3_parameters
from octavo.models.config_files import default_sampling, read_model_config
from tests.loader.conftest import tensors_of, values_of, write_folder
from tests.torch_types import engine_dtype

KINDS = [
    Q.F32,
    Q.F16,
    Q.BF16,
    Q.Q8_0,
    Q.Q4_0,
    Q.Q4_1,
    Q.Q5_0,
    Q.Q5_1,
    Q.Q2_K,
    Q.Q3_K,
    Q.Q4_K,
    Q.Q5_K,
    Q.Q6_K,
    Q.IQ4_NL,
    Q.IQ4_XS,
    Q.IQ1_S,
    Q.IQ1_M,
    Q.IQ2_XXS,
    Q.IQ2_XS,
    Q.IQ2_S,
    Q.IQ3_XXS,
    Q.IQ3_S,
    Q.TQ1_0,
    Q.TQ2_0,
    Q.MXFP4,
    Q.NVFP4,
]


def read(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Everything that is read of a file."""
    return tensors_of(write_folder(path), path, engine_dtype(dtype))


def deinterleaved_index(heads: int, size: int) -> list[int]:
    """For each row of a transformers q or k weight, its row in the file."""
    half = size // 2
    return [h * size + (2 * i if i < half else 2 * (i - half) + 1) for h in range(heads) for i in range(size)]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in KINDS),
        # Rounding to another type is the same for all kinds.
        *(pytest.param(kind, torch.bfloat16, marks=pytest.mark.slow if i else ()) for i, kind in enumerate(KINDS)),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_weight_is_the_dequantized_value(tmp_path: Path, tiny_llama: Any, kind: Q, dtype: torch.dtype) -> None:
    path = tiny_llama(tmp_path / "m.gguf", kind)
    weights = read(path, dtype)
    wanted = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            values = values[deinterleaved_index(values.shape[0] // 64, 64)]
        wanted[tensor.name] = values.to(dtype)
    assert len(weights) == len(wanted)
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    }.items():
        assert weights[ours].dtype == dtype
        assert torch.equal(weights[ours], wanted[theirs]), ours


def hf_model(arch: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[arch]
    model = model_class(config_class(**(shape | changes))).eval()
    with torch.no_grad():
        for value in model.parameters():  # norms and biases start at 1 and 0: anything swapped would go unseen
            value.add_(torch.randn_like(value) * 0.1)
    return model


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_a_network_is_given_every_bit_of_a_model_that_was_exported_by_hand(
    tmp_path: Path, export_gguf: Any, arch: str, changes: dict[str, Any]
) -> None:
    model = hf_model(arch, **changes)
    model.save_pretrained(tmp_path / "hub")
    export_gguf(model, tmp_path / "m.gguf", arch)
    folder = write_folder(tmp_path / "m.gguf")
    wanted, got = tensors_of(tmp_path / "hub"), tensors_of(folder, tmp_path / "m.gguf")
    assert wanted.keys() == got.keys()
    assert all(torch.equal(values_of(got[name]), values_of(value)) for name, value in wanted.items())
    assert transformers.AutoTokenizer.from_pretrained(folder).encode("hello world")


def test_llama3_rope_factors_become_its_rope_scaling(tmp_path: Path, export_gguf: Any) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = hf_model("llama", rope_parameters=rope, head_dim=64, max_position_embeddings=131072)
    plain = 500000.0 ** -(torch.arange(0, 64, 2).double() / 64)
    factors = (plain / model.model.rotary_emb.inv_freq.double()).float().numpy()
    export_gguf(
        model, tmp_path / "m.gguf", "llama", edit=lambda writer: writer.add_tensor("rope_freqs.weight", factors)
    )
    config = json.loads((write_folder(tmp_path / "m.gguf") / "config.json").read_text())
    assert config["rope_parameters"] == rope


@pytest.mark.parametrize("parameters", [(500000.0, 128, 8.0, 4.0, 8192), (500000.0, 64, 32.0, 4.0, 8192)])
def test_published_llama3_tables_are_recognised(parameters: tuple[float, int, float, float, int]) -> None:
    theta, head, factor, high, original = parameters
    table = []
    for i in range(head // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / head)
        if wavelength < original / high:
            table.append(1.0)
        elif wavelength > original:
            table.append(factor)
        else:
            smooth = (original / wavelength - 1) / (high - 1)
            table.append(1 / ((1 - smooth) / factor + smooth))
    found = llama3_parameters(np.array(table, np.float32).astype(np.float64), theta)
    assert found is not None
    assert (found["factor"], found["high_freq_factor"], found["original_max_position_embeddings"]) == (
        factor,
        high,
        original,
    )
    assert found["low_freq_factor"] == 1.0


def rope_table(writer: gguf.GGUFWriter, factors: list[float]) -> None:
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


@pytest.mark.parametrize("factors", [[1.0, 1.5, 3.25, 4.0, 7.0, 7.0, 8.0, 9.0], [0.5] * 8])
def test_a_rope_table_of_any_values_is_used_as_it_is(tmp_path: Path, export_gguf: Any, factors: list[float]) -> None:
    export_gguf(hf_model("llama"), tmp_path / "m.gguf", "llama", edit=partial(rope_table, factors=factors))
    folder = write_folder(tmp_path / "m.gguf")
    config = read_model_config(folder)
    plain = replace(config, rope=replace(config.rope, rope_type="default"))
    ours, theirs = (rotary_frequencies(each) for each in (config, plain))
    assert np.allclose(ours * np.array(factors, np.float32), theirs, rtol=1e-6)


@pytest.mark.parametrize("factors", [[1.0, np.nan, *[8.0] * 6], [1.0] * 7, [-1.0] * 8])
def test_a_rope_table_without_sense_is_refused(tmp_path: Path, export_gguf: Any, factors: list[float]) -> None:
    export_gguf(hf_model("llama"), tmp_path / "m.gguf", "llama", edit=partial(rope_table, factors=factors))
    with pytest.raises(WeightError, match=r"'rope_freqs\.weight' must hold 8 positive numbers"):
        write_folder(tmp_path / "m.gguf")


def rotary_frequencies(config: ModelConfig) -> np.ndarray:
    """Angles from position 0 to position 1."""
    table = RotaryTable(config, ReferenceKernels(), 2).array.numpy()
    half = table.shape[1] // 2
    return np.arctan2(table[1, half:], table[1, :half])


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, {"rope_theta": 10000.0, "rope_type": "default"}),
        ({"llama.rope.freq_base": 123456.0}, {"rope_theta": 123456.0, "rope_type": "default"}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
                "llama.rope.scaling.yarn_attn_factor": 1.25,
                "llama.an.unknown.key": 7,
            },
            {
                **{"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
                **{"beta_fast": 16.0, "attention_factor": 1.25},
            },
        ),
    ],
)
def test_rope_settings(tmp_path: Path, tiny_llama: Any, keys: dict[str, Any], wanted: dict[str, Any]) -> None:
    folder = write_folder(tiny_llama(tmp_path / "m.gguf", keys=keys))
    assert json.loads((folder / "config.json").read_text())["rope_parameters"] == wanted
    assert read_model_config(folder).rope.theta == wanted["rope_theta"]


def test_values_given_for_each_layer_are_read_as_one(tmp_path: Path, tiny_llama: Any) -> None:
    folder = write_folder(tiny_llama(tmp_path / "m.gguf", keys={"llama.attention.head_count_kv": [2, 2]}))
    assert json.loads((folder / "config.json").read_text())["num_key_value_heads"] == 2


def test_generation_config_names_every_token_that_ends_an_answer(tmp_path: Path, export_gguf: Any) -> None:
    export_gguf(hf_model("llama"), tmp_path / "m.gguf", "llama", edit=lambda w: w.add_eot_token_id(5))
    content = json.loads((write_folder(tmp_path / "m.gguf") / "generation_config.json").read_text())
    assert content == {"bos_token_id": 0, "eos_token_id": [1, 5]}


def test_a_call_ends_an_answer_of_gpt_oss() -> None:
    keys: Any = {"tokenizer.ggml.tokens": ["a", "<|return|>", "<|call|>"], "tokenizer.ggml.eos_token_id": 1}
    assert generation_config(cast(GGUFFile, SimpleNamespace(metadata=keys)))["eos_token_id"] == [1, 2]


def test_generation_config_has_the_sampling_keys_of_the_file(tmp_path: Path, tiny_llama: Any) -> None:
    own = {"temp": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "penalty_repeat": 1.1}
    others = {"mirostat": 2, "xtc_probability": 0.5, "sequence": "penalties;top_k", "penalty_last_n": 64}
    keys = {f"general.sampling.{name}": value for name, value in (own | others).items()}
    folder = write_folder(tiny_llama(tmp_path / "m.gguf", keys=keys))
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    assert default_sampling("auto", folder) == expected
    assert default_sampling("none", folder) == {}


def test_sampling_keys_mean_what_they_mean_in_llama_cpp(tmp_path: Path, tiny_llama: Any) -> None:
    keys = {"temp": -1.0, "top_p": 1.5, "top_k": -5, "min_p": math.nan, "penalty_repeat": "high"}
    folder = write_folder(tiny_llama(tmp_path / "m.gguf", keys={f"general.sampling.{k}": v for k, v in keys.items()}))
    assert default_sampling("auto", folder) == {"temperature": 0.0, "top_p": 1.0, "top_k": 0}


def test_a_built_in_models_sampling_is_for_what_its_file_does_not_set(tmp_path: Path, tiny_llama: Any) -> None:
    path = tiny_llama(tmp_path / "m.gguf", keys={"general.sampling.temp": 0.6})
    folder = tmp_path / "m"
    folder.mkdir()
    write_gguf_folder(path, folder, {"temperature": 0.2, "top_p": 0.9})
    assert default_sampling("auto", folder) == {"temperature": 0.6, "top_p": 0.9}


def test_the_file_type_is_told(tmp_path: Path, tiny_llama: Any) -> None:
    path = tiny_llama(tmp_path / "named.gguf", keys={"general.file_type": gguf.LlamaFileType.MOSTLY_Q4_K_M.value})
    assert GGUFFile(path).file_type == "Q4_K_M"
    assert GGUFFile(tiny_llama(tmp_path / "unknown.gguf", keys={"general.file_type": 999})).file_type == "F32"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.logit_scale": 2.0}, "logit_scale"),
        ({"llama.attention.clamp_kqv": 8.0}, "clamp_kqv"),
        ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"llama.rope.dimension_count": 32}, "rotated whole"),
        ({"llama.attention.value_length": 32}, "key and value heads"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
        ({"llama.attention.head_count_kv": [2, 4]}, "differs between layers"),
        ({"general.architecture": "mpt"}, "'mpt' is not supported; supported: llama, .*gemma3"),
        (
            {"general.architecture": "lfm2", "lfm2.block_count": 2, "lfm2.attention.head_count_kv": [2, 4]},
            r"lfm2\.attention\.head_count_kv must have one number of KV heads, or 0, for each layer, not \[2, 4\]",
        ),
        (
            {"general.architecture": "lfm2", "lfm2.block_count": 1, "lfm2.attention.head_count_kv": "two"},
            r"must have one number of KV heads, or 0, for each layer, not \['two'\]",
        ),
        ({"general.architecture": "rwkv7"}, "GGUF architecture 'rwkv7' is not supported: state-space layers are not"),
        ({"general.architecture": "starcoder"}, "'starcoder' is not supported; the nearest is 'starcoder2'"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path: Path, tiny_llama: Any, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tiny_llama(tmp_path / "m.gguf", keys=keys))


def test_an_unsupported_tensor_type_is_refused_by_name(tmp_path: Path, tiny_llama: Any) -> None:
    odd = (np.zeros((256, 256 // 256 * 292), np.uint8), Q.Q8_K)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_q\.weight.*Q8_K"):
        read(tiny_llama(tmp_path / "m.gguf", tensors={"blk.0.attn_q.weight": odd}))


def test_an_unknown_tensor_type_is_refused_by_name(tmp_path: Path, tiny_llama: Any) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    type_at = content.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8
    content[type_at] = 99
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_q\.weight' has type 99.*pip install -U gguf"):
        GGUFFile(path)


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path, tiny_llama: Any) -> None:
    extra = {"blk.0.attn_sinks.weight": (np.zeros(4, np.float32), Q.F32)}
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_sinks\.weight"):
        read(tiny_llama(tmp_path / "m.gguf", tensors=extra))


def test_a_missing_tensor_is_named(tmp_path: Path, tiny_llama: Any) -> None:
    with pytest.raises(WeightError, match=r"blk\.0\.ffn_up\.weight"):
        read(tiny_llama(tmp_path / "m.gguf", tensors={"blk.0.ffn_up.weight": None}))


def test_a_wrong_shape_is_named_with_the_right_one(tmp_path: Path, tiny_llama: Any) -> None:
    wrong = {"blk.0.ffn_up.weight": (np.zeros((512, 128), np.float32), Q.F32)}
    with pytest.raises(WeightError, match=r"ffn_up.*\[512, 128\].*\[512, 256\]"):
        read(tiny_llama(tmp_path / "m.gguf", tensors=wrong))


def test_a_claim_of_billions_of_layers_fails_at_once(tmp_path: Path, tiny_llama: Any) -> None:
    with pytest.raises(WeightError, match="11 tensors, too few for 2147483647 layers"):
        read(tiny_llama(tmp_path / "m.gguf", keys={"llama.block_count": 2**31 - 1}))


def test_a_truncated_file_is_an_error_wherever_it_ends(tmp_path: Path, tiny_llama: Any) -> None:
    whole = tiny_llama(tmp_path / "m.gguf", Q.Q8_0).read_bytes()
    for i, length in enumerate([0, 3, 4, 10, 24, 100, 3000, 9000, len(whole) // 2, len(whole) - 64]):
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(whole[:length])
        with pytest.raises(WeightError, match=r"truncated|corrupt|not a GGUF"):
            read(path)


def test_a_damaged_header_is_an_error_and_never_a_crash(tmp_path: Path, tiny_llama: Any) -> None:
    whole = bytearray(tiny_llama(tmp_path / "m.gguf", Q.Q8_0).read_bytes())
    header = 12000
    rng = np.random.default_rng(1)
    refused = 0
    for i in range(150):
        damaged = bytearray(whole)
        for at in rng.integers(4, header, size=4):
            damaged[at] = rng.integers(0, 256)
        if i % 3 == 0:  # numbers of items and lengths that lie
            at = int(rng.integers(8, header))
            damaged[at : at + 8] = (2 ** int(rng.integers(30, 64)) - 1).to_bytes(8, "little")
        path = tmp_path / f"d{i}.gguf"
        path.write_bytes(damaged)
        try:
            read(path)
        except (WeightError, UnsupportedModelError, TokenizerError):
            refused += 1
        except OctavoError as e:
            pytest.fail(f"unexpected kind of error: {e!r}")
    assert refused > 50
