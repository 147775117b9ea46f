"""config.json in its many spellings, and values that take the place of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.models.config_files import check_architecture, default_sampling, read_model_config
from octavo.models.registry import make_network, supported_architectures

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
}


def read(folder: Path, generation: Any = None, **changes: Any) -> ModelConfig:
    """``...`` as a value removes the key."""
    raw = {k: v for k, v in {**BASE, **changes}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(folder)


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.num_kv_heads == 8 and config.head_dim == 8
    assert config.rms_norm_eps == 1e-6 and config.rope.theta == 10000.0 and config.rope.rope_type == "default"
    assert not (config.tie_word_embeddings or config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm)
    assert config.sliding_windows == (None,) * 4
    assert config.max_position == 2048
    assert config.eos_token_ids == () and config.bos_token_id is None


def test_both_spellings_mean_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    four = read(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling}, torch_dtype="bfloat16")
    five = read(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}, dtype="bfloat16")
    oldest = read(tmp_path, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling}, torch_dtype="bfloat16")
    assert four == five == oldest
    assert five.rope.theta == 5e5 and five.rope.rope_type == "llama3" and five.checkpoint_dtype == "bfloat16"
    assert five.rope.scaling == {**scaling, "max_position_embeddings": 2048}


def test_null_scaling_is_none(tmp_path: Path) -> None:
    assert read(tmp_path, rope_scaling=None, rope_theta=1000).rope.theta == 1000.0


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"type": "linear", "factor": 4.0}, 8192),
        ({"type": "dynamic", "factor": 2.0}, 4096),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        (
            {
                "type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 512,
            },
            2048,
        ),
    ],
)
def test_scaling_extends_the_longest_sequence(scaling: dict[str, Any], longest: int, tmp_path: Path) -> None:
    assert read(tmp_path, rope_scaling=scaling).max_position == longest


def test_ids_of_both_files_are_merged_with_the_generation_configs_first(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=2, bos_token_id=1).eos_token_ids == (2,)
    config = read(tmp_path, {"eos_token_id": [7, 9], "bos_token_id": 5}, eos_token_id=[2, 9], bos_token_id=1)
    assert config.eos_token_ids == (7, 9, 2)
    assert config.bos_token_id == 5
    assert read(tmp_path, {"eos_token_id": 0}, eos_token_id=None).eos_token_ids == (0,)


def test_biases_and_norms_of_each_family(tmp_path: Path) -> None:
    def traits(architecture: str, **changes: Any) -> tuple[bool, bool, bool, bool]:
        config = read(tmp_path, architectures=[architecture], **changes)
        return config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm

    biased = {"attention_bias": True, "mlp_bias": True}
    assert traits("LlamaForCausalLM", **biased) == (True, True, True, False)
    assert traits("LlamaForCausalLM") == (False, False, False, False)
    assert traits("MistralForCausalLM", **biased) == (False, False, False, False)
    assert traits("Qwen2ForCausalLM") == (True, False, False, False)
    assert traits("Qwen3ForCausalLM") == (False, False, False, True)
    assert traits("Qwen3ForCausalLM", **biased) == (True, True, False, True)


def test_head_size_is_given_or_derived(tmp_path: Path) -> None:
    assert read(tmp_path, head_dim=32).head_dim == 32
    assert read(tmp_path, head_dim=None).head_dim == 8
    assert read(tmp_path, architectures=["Qwen3ForCausalLM"]).head_dim == 128


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 16}, (None,) * 4),
        ("MistralForCausalLM", {"sliding_window": 16}, (16,) * 4),
        ("MistralForCausalLM", {"sliding_window": None}, (None,) * 4),
        ("MistralForCausalLM", {}, (4096,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 16, "max_window_layers": 1}, (None,) * 4),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 16, "max_window_layers": 3, "use_sliding_window": True},
            (None, None, None, 16),
        ),
        ("Qwen2ForCausalLM", {"sliding_window": 16, "use_sliding_window": True}, (None,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": None, "use_sliding_window": True}, (None,) * 4),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 16, None, 16),
        ),
    ],
)
def test_windows(architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    assert read(tmp_path, architectures=[architecture], **changes).sliding_windows == windows


def test_architecture_from_the_model_type(tmp_path: Path) -> None:
    assert read(tmp_path, architectures=..., model_type="qwen2").architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"hidden_size": ...}, ConfigError, "hidden_size is missing"),
        ({"vocab_size": "many"}, ConfigError, "vocab_size must be a positive integer, not 'many'"),
        ({"num_hidden_layers": 0}, ConfigError, "num_hidden_layers must be a positive integer, not 0"),
        ({"num_attention_heads": True}, ConfigError, "num_attention_heads must be a positive integer, not True"),
        ({"num_key_value_heads": 3}, ConfigError, r"\(8\) must be a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 7}, ConfigError, "head_dim must be even, not 7"),
        ({"rms_norm_eps": -1}, ConfigError, "rms_norm_eps must be a number above 0, not -1"),
        ({"tie_word_embeddings": "yes"}, ConfigError, "tie_word_embeddings must be true or false, not 'yes'"),
        ({"rope_theta": float("nan")}, ConfigError, "rope_theta must be a number, not NaN"),
        ({"rope_scaling": {"factors": [1, float("nan")]}}, ConfigError, r"rope_scaling\.factors\[1\] must be a number"),
        ({"rope_theta": float("inf")}, ConfigError, "rope_theta must be a number above 0, not inf"),
        ({"num_hidden_layers": 10**30}, ConfigError, "num_hidden_layers must be at most 65536, not 10{30}$"),
        ({"hidden_size": 60}, ConfigError, r"hidden_size \(60\) must be a multiple of num_attention_heads \(8\)"),
        ({"rope_scaling": [1]}, ConfigError, "rope_scaling must be an object"),
        ({"rope_parameters": {"partial_rotary_factor": 2}}, ConfigError, "at most 1, not 2"),
        ({"eos_token_id": "</s>"}, ConfigError, "eos_token_id must be a token id or a list of them, not '</s>'"),
        (
            {"architectures": ["RwkvForCausalLM"]},
            UnsupportedModelError,
            "'RwkvForCausalLM' is not supported: state-space layers are not supported; supported: .*LlamaForCausalLM",
        ),
        ({"architectures": ...}, ConfigError, "it has neither architectures, such as .*, nor model_type"),
        (
            {"architectures": ..., "model_type": "x"},
            UnsupportedModelError,
            "type 'x' is not supported; supported: .*Llama",
        ),
        ({"hidden_act": "gelu"}, UnsupportedModelError, 'hidden_act="gelu" is not supported; supported: "silu"'),
        (
            {"rope_scaling": {"type": "mrope"}},
            UnsupportedModelError,
            "rope type 'mrope' is not supported; supported: d",
        ),
        ({"rope_parameters": {"full_attention": {}}}, UnsupportedModelError, "differ between layer types"),
        ({"quantization_config": {"quant_method": "hqq"}}, UnsupportedModelError, "quantized with 'hqq'"),
        ({"quantization_config": {"quant_method": "awq"}}, ConfigError, "bits is missing"),
        ({"quantization_config": "awq"}, ConfigError, "quantization_config must be an object"),
        ({"torch_dtype": "float8_e4m3fn"}, UnsupportedModelError, "'float8_e4m3fn' are not supported; supported: f"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["chunked"] * 4},
            UnsupportedModelError,
            "layer type 'chunked'",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
            ConfigError,
            "layer_types must be a list of 4 names",
        ),
    ],
)
def test_refusals_say_what_is_wrong(changes: dict[str, Any], error: type[Exception], says: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=says):
        read(tmp_path, **changes)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"llama"', "[" * 100_000])
def test_broken_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_config(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read(tmp_path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        read_model_config(tmp_path)


def test_binary_and_huge_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not readable JSON"):
        read_model_config(tmp_path)
    with file.open("wb") as stream:
        stream.truncate(17 << 20)
    with pytest.raises(ConfigError, match="at most 16777216 are read"):
        read_model_config(tmp_path)


def test_networks_of_unknown_architectures_are_refused() -> None:
    supported = supported_architectures()
    assert "LlamaForCausalLM" in supported and supported == sorted(supported)
    with pytest.raises(UnsupportedModelError, match=r"'FooForCausalLM' is not supported; supported: .*Llama"):
        make_network(ModelConfig("FooForCausalLM", 1, 2, 2, 1, 1, 1, 2, 1), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("RwkvForCausalLM", "state-space layers are not supported"),
        ("Zamba2ForCausalLM", "state-space layers are not supported"),
        ("LLaMAForCausalLM", "the nearest are 'LlamaForCausalLM', "),
        ("GPTNeoForCausalLM", "'GPTNeoXForCausalLM'"),
        ("Qwen9ForCausalLM", "'Qwen3ForCausalLM'"),
        ("DeepseekV9ForCausalLM", "the nearest are 'DeepseekV"),
        ("FooForCausalLM", "docs/adding-a-model.md tells how to add one"),
    ],
)
def test_unknown_architectures_are_refused_with_the_reason_or_the_nearest(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    with pytest.raises(UnsupportedModelError, match=f"{name}' is not supported.*{says}|{says}.*supported: ") as error:
        check_architecture(tmp_path, "octavo")
    assert says in str(error.value)


def sampling_file(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_sampling_defaults_are_those_of_generation_config(tmp_path: Path) -> None:
    content = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    other = {"max_new_tokens": 99, "eos_token_id": [1, 2], "do_sample": True, "transformers_version": "5.0"}
    folder = sampling_file(tmp_path / "model", content | other)
    assert default_sampling("auto", folder) == content | {"max_tokens": 99}
    assert default_sampling("none", folder) == default_sampling("vllm", folder) == {}
    own = sampling_file(tmp_path / "own", {"temperature": 0.1, "top_p": None})
    assert default_sampling(str(own), folder) == {"temperature": 0.1}
    assert default_sampling("auto", tmp_path) == {}


@pytest.mark.parametrize(
    ("source", "content", "words"),
    [
        ("auto", {"temperature": -1}, r"generation_config.json: temperature must be at least 0, not -1; .*='none'"),
        ("auto", {"top_k": "many"}, r"generation_config.json: top_k must be an integer, not 'many'"),
        ("other", {}, r"generation_config='other': there is no other/generation_config.json; .*auto.*none"),
    ],
)
def test_wrong_sampling_defaults_are_refused(tmp_path: Path, source: str, content: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        default_sampling(source, sampling_file(tmp_path / "model", content))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def test_objects_are_merged_and_other_values_replaced(tiny_model: Path) -> None:
    plain = read_model_config(tiny_model)
    changed = read_model_config(tiny_model, {"max_position_embeddings": 1024, "rope_parameters": YARN})
    assert plain.max_position == 256 and changed.max_position == 1024
    assert read_model_config(tiny_model, {}) == plain != changed


def test_a_stretched_model_answers_as_one_whose_config_says_so(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stretched"
    shutil.copytree(tiny_model, folder)
    overrides: dict[str, Any] = {"max_position_embeddings": 1024, "rope_parameters": YARN}
    config = json.loads((folder / "config.json").read_text())
    config |= {**overrides, "rope_parameters": {**config.get("rope_parameters", {}), **YARN}}
    (folder / "config.json").write_text(json.dumps(config))
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=2)
    prompt = list(range(3, 200)) * 2  # longer than the context without it
    answers = []
    for model, overriding in ((folder, None), (tiny_model, json.dumps(overrides))):
        llm = LLM(str(model), num_gpu_blocks_override=128, hf_overrides=overriding)
        [output] = llm.generate([prompt], params, use_tqdm=False)
        answers.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert answers[0] == answers[1] and len(answers[0][0]) == 8
