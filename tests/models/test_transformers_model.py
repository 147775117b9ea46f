"""Architectures without a network here, through transformers' own code."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config.engine_config import make_config
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, UnsupportedModelError, WeightError
from octavo.kernels.interface import Kernels
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model, read_config
from octavo.models.config_files import read_model_config
from octavo.models.network import build_without_weights, num_active_parameters, num_parameters
from tests.models.zoo import ON_GPU, PARAMS, PROMPT, PROMPTS, SMALL, Zoo, answer_of, answers, edit_config, prompts_of


class TransformersZoo(Zoo):
    #: What torch computes between our kernels depends on the number of rows on a GPU.
    exact = not ON_GPU
    rounding = 0.3 if ON_GPU else 0.12

    def engine(self, folder: Path | None = None, /, **options: Any) -> LLM:
        return super().engine(folder, **{"model_impl": "transformers", **options})

    def _runner(self, kernels: Kernels, dtype: DType) -> Callable[..., torch.Tensor]:
        config = read_model_config(self.folder, model_impl="transformers")
        network = load_model(self.folder, config, LayerContext(kernels, dtype))
        run: Callable[..., torch.Tensor] = self._driver(network, kernels=kernels).run
        return run


@pytest.fixture
def zoo(tmp_path: Path, save_model: Callable[..., Any], driver: Any) -> TransformersZoo:
    return TransformersZoo(tmp_path, save_model, driver)


def config(kind: str, **values: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **{**SMALL, "num_hidden_layers": 2, "pad_token_id": None, **values})


LATENT = {
    "num_key_value_heads": 6, "kv_lora_rank": 24, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip
VAULTGEMMA = {"head_dim": 8, "sliding_window": 64, "query_pre_attn_scalar": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 1}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        # Learned positions, biases, a tied head; no grouped queries.
        ("biogpt", {}),
        # Norms of its own before the last products of attention and MLP.
        ("bitnet", {}),
        # Sigmoid routing, experts and a shared one.
        ("dots1", {**EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "sliding_window": None}),
        ("jais2", {"head_dim": 8}),
        # Mixtures of attention heads too.
        ("jetmoe", {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 3}),
        # Soft caps of the logits, norms of queries and keys after the rotation.
        ("nanochat", {}),
        # Layer norms without weights.
        ("olmo", {}),
        ("persimmon", {}),
        # Embedding scaled, soft caps of scores.
        ("vaultgemma", VAULTGEMMA),
        # Latent attention: values are narrower than keys, and no multiple of 8.
        ("youtu", LATENT),
    ],
)
def test_an_architecture_without_a_network(kind: str, values: dict[str, Any], zoo: TransformersZoo) -> None:
    model = zoo(config(kind, **values))
    network = build_without_weights(read_model_config(zoo.folder, model_impl="transformers"), "float32")
    assert num_parameters(network) == sum(parameter.numel() for parameter in model.parameters())
    assert (num_active_parameters(network) < num_parameters(network)) == (kind in ("dots1", "jetmoe"))


def test_windows(zoo: TransformersZoo) -> None:
    types = ["sliding_attention", "full_attention"]
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    zoo(config("cwm", sliding_window=7, layer_types=types, rope_parameters=rope))
    specs = build_without_weights(read_model_config(zoo.folder, model_impl="transformers"), "float32").kv_specs
    assert [spec.window for spec in specs] == [7, None]


def test_attention_sinks(zoo: TransformersZoo) -> None:
    zoo(config("gpt_oss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=64))


def test_two_attentions_of_a_layer_have_caches_of_their_own(zoo: TransformersZoo) -> None:
    # Its differences of two attentions lose too many bits for the tolerance of bfloat16.
    zoo.check_engine(zoo.save(config("diffllama")), {"num_gpu_blocks_override": 24, "block_size": 4})
    assert len(build_without_weights(read_model_config(zoo.folder), "float32").kv_specs) == 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows are no multiple of a vector, with tied embeddings."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config("vaultgemma", **VAULTGEMMA))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    target = tmp_path_factory.mktemp("vaultgemma")
    model.save_pretrained(target)
    return target


def engine(folder: Path, **options: Any) -> LLM:
    defaults = {"num_gpu_blocks_override": 200, "max_model_len": 64, "block_size": 4, "dtype": "float32"}
    return LLM(str(folder), skip_tokenizer_init=True, **{**defaults, **options})


def test_prefix_hits_and_swapped_requests_have_the_same_bits(folder: Path) -> None:
    wanted = answers(engine(folder, enable_prefix_caching=False), PROMPTS)
    cached = engine(folder)
    cached.generate(prompts_of([PROMPT[:13]]), PARAMS, use_tqdm=False)
    outputs = cached.generate(prompts_of(PROMPTS), PARAMS, use_tqdm=False)
    assert outputs[2].num_cached_tokens >= 12
    assert [answer_of(output) for output in outputs] == wanted
    tight = engine(
        folder, num_gpu_blocks_override=24, watermark=0.0, preemption_mode="swap", num_host_blocks_override=64
    )
    outputs = tight.generate(prompts_of(PROMPTS), PARAMS, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert [answer_of(output) for output in outputs] == wanted


def test_tokens_are_those_that_transformers_generates(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder)
    theirs.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": 16}
    expected = [theirs.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in PROMPTS]
    assert [tokens for tokens, _ in answers(engine(folder), PROMPTS)] == expected


def test_samples_beams_prompt_logprobs_and_vectors(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    llm = engine(folder)
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=6, prompt_logprobs=1)
    (output,) = llm.generate(prompts_of([PROMPT]), params, use_tqdm=False)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        result = theirs(torch.tensor([PROMPT]), output_hidden_states=True)
    scores = result.logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    ours = [place[token].logprob for place, token in zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True) if place]
    np.testing.assert_allclose(ours, scores[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0], atol=1e-3)
    (vector,) = llm.embed(prompts_of([PROMPT]), use_tqdm=False)
    last = torch.nn.functional.normalize(result.hidden_states[-1][0, -1], dim=0)
    np.testing.assert_allclose(vector.outputs.embedding, last, atol=1e-4)


def test_start_says_what_runs_and_which_promises_hold(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "octavo.startup"):
        engine(folder)
    (line,) = [record.getMessage() for record in caplog.records if "runs through transformers" in record.getMessage()]
    assert "slower than a network" in line and "bits in company and alone were equal" in line


def test_random_weights_need_config_json_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    first, second = (answers(engine(tmp_path, load_format="dummy", seed=3), PROMPTS[:1]) for _ in range(2))
    assert first == second != answers(engine(folder), PROMPTS[:1])


def test_a_network_here_comes_first_unless_the_option_says_otherwise(tmp_path: Path, save_model: Any) -> None:
    save_model(config("llama"))
    assert read_model_config(tmp_path).model_impl == "octavo"
    own, theirs = (answers(engine(tmp_path, model_impl=impl), PROMPTS) for impl in ("octavo", "transformers"))
    assert [tokens for tokens, _ in own] == [tokens for tokens, _ in theirs]


# A model with code of its own.

MODELING = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class PlainConfig(PretrainedConfig):
    model_type = "plain-made-up"

    def __init__(self, vocab_size=101, hidden_size=48, num_attention_heads=4, max_position_embeddings=96, **values):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_attention_heads, self.max_position_embeddings = num_attention_heads, max_position_embeddings
        super().__init__(**values)


def eager(module, query, key, value, attention_mask, scaling, **_):
    scores = query @ key.transpose(2, 3) * scaling
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ value).transpose(1, 2), None


class PlainPreTrainedModel(PreTrainedModel):
    config_class, base_model_prefix, _supports_attention_backend = PlainConfig, "model", True


class PlainAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.layer_idx, self.heads = config, 0, config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3 * self.heads, -1).transpose(1, 2).chunk(3, 1)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attend(self, q, k, v, None, scaling=0.3)[0].reshape(x.shape)


class PlainModel(PlainPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.attention, self.mlp = PlainAttention(config), nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, position_ids=None, use_cache=False, **_):
        x = self.embed(input_ids) + self.position(POSITIONS)
        x = x + self.attention(x)
        return BaseModelOutputWithPast(last_hidden_state=x + torch.tanh(self.mlp(x)))


class PlainForCausalLM(PlainPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = PlainModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, position_ids=None, use_cache=False, **_):
        hidden = self.model(input_ids, position_ids=position_ids).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))
"""


def custom_code(folder: Path, positions: str) -> None:
    (folder / "modeling_plain.py").write_text(MODELING.replace("POSITIONS", positions))
    content = {
        "architectures": ["PlainForCausalLM"],
        "model_type": "plain-made-up",
        "auto_map": {
            "AutoConfig": "modeling_plain.PlainConfig",
            "AutoModelForCausalLM": "modeling_plain.PlainForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(content))


def test_a_model_with_code_of_its_own_runs_if_it_is_trusted(tmp_path: Path) -> None:
    custom_code(tmp_path, "position_ids")
    with pytest.raises(UnsupportedModelError, match=r"modeling_plain\.py beside config\.json.*--trust-remote-code"):
        engine(tmp_path, load_format="dummy")
    llm = engine(tmp_path, load_format="dummy", trust_remote_code=True)
    together = answers(llm, PROMPTS)
    assert [answers(llm, [prompt])[0] for prompt in PROMPTS] == together


def test_code_that_ignores_positions_is_refused_at_the_start(tmp_path: Path) -> None:
    custom_code(tmp_path, "torch.arange(input_ids.shape[1])")
    with pytest.raises(UnsupportedModelError, match="does not use their positions"):
        engine(tmp_path, load_format="dummy", trust_remote_code=True)


# Refusals.


def write_config(folder: Path, kind: str, architecture: str, **values: Any) -> Path:
    config(kind, **values).save_pretrained(folder)
    edit_config(folder, architectures=[architecture])
    return folder


@pytest.mark.parametrize(
    ("kind", "architecture", "values", "reason"),
    [
        ("mamba", "MambaForCausalLM", {}, "recurrent layers"),
        ("doge", "DogeForCausalLM", {}, "compute with the mask of attention"),
        ("bloom", "BloomForCausalLM", {}, "takes no position_ids"),
        ("mvp", "MvpForConditionalGeneration", {}, "cross attention"),
        ("vaultgemma", "VaultGemmaForCausalLM", 
         {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
         "depend on the longest sequence"),
        ("vaultgemma", "VaultGemmaForSequenceClassification", {}, "only language models"),
        ("vaultgemma", "VaultGemmaForCausalLM", {"quantization_config": {"quant_method": "gptq"}},
         r"quantised \(gptq\)"),
        ("rembert", "RemBertForCausalLM", {}, "a mask of its own"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_with_the_reason(
    kind: str, architecture: str, values: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write_config(tmp_path, kind, architecture, **values)
    with pytest.raises(UnsupportedModelError, match=f"{architecture}.*{reason}"):
        read_model_config(tmp_path, model_impl="transformers")


def test_an_architecture_that_nobody_has_names_both_reasons(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OlmoXForCausalLM"], "model_type": "olmo-x"}))
    with pytest.raises(UnsupportedModelError, match=r"nearest are .*Olmo.*nor does the installed transformers have it"):
        read_model_config(tmp_path)


def test_without_the_packages_the_error_says_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=r"VaultGemmaForCausalLM.*octavo\[transformers\]"):
        read_model_config(folder)
    with pytest.raises(ConfigError, match=r"needs torch and transformers: install the extra octavo\[transformers\]"):
        read_model_config(folder, model_impl="transformers")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"enable_lora": True}, "enable_lora"),
        ({"quantization": "int8"}, "quantization='int8'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size above 1"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size above 1"),
        ({"speculative_config": {"method": "eagle", "model": "x"}}, "speculative_config with method 'eagle'"),
    ],
)
def test_options_that_need_a_network_here_are_refused(folder: Path, options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not supported with models that run through transformers"):
        engine(folder, **options)


def test_a_gguf_file_has_a_network_here_only(folder: Path, tmp_path: Path) -> None:
    (file := tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"model_impl='transformers' reads folders with safetensors; .*model\.gguf"):
        read_config(folder, make_config(model=str(file), model_impl="transformers"))


def test_a_checkpoint_without_all_tensors_is_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        engine(tmp_path)
