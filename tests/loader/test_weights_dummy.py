"""Random weights: a config.json is enough to run, nothing overflows, and what needs text is refused clearly."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.config.engine_config import make_config
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, InvalidRequestError, TokenizerError, WeightError
from octavo.core.model_config import ModelConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.input_processor import Prompt
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.loader.builtin import SHAPES
from octavo.loader.resolve import resolve_model
from octavo.loader.weights import dummy_weights, load_model, make_dummy_model
from octavo.models.config_files import read_model_config
from octavo.models.network import build_without_weights, num_parameters, weight_bytes
from octavo.models.registry import make_network
from tests.fake_hub import serving_hub

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
}
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 32, "max_model_len": 128, "max_num_batched_tokens": 64}
IDS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def load(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder),
        **{**SMALL, "load_format": "dummy", "kernels": "reference", "max_num_seqs": 8, "device": "cpu"},
        **options,
    )


def test_a_config_is_enough_and_the_seed_decides(folder: Path) -> None:
    def tokens(seed: int) -> list[int]:
        (output,) = load(folder, seed=seed).generate([[5, 6, 7]], IDS, use_tqdm=False)
        completion = output.outputs[0]
        assert completion.text == ""
        assert completion.logprobs is not None
        assert all(-30 < p.logprob <= 0 for position in completion.logprobs for p in position.values())
        return list(completion.token_ids)

    assert len(tokens(0)) == 6
    assert tokens(0) == tokens(0) != tokens(1)


def test_of_a_model_of_the_hub_only_the_description_is_fetched(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**SMALL, "load_format": "dummy", "kernels": "reference", "max_num_seqs": 8, "device": "cpu"}
    with serving_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        files = {"config.json": (folder / "config.json").read_bytes(), "model.safetensors": b"", "README.md": b""}
        hub.add("owner/name", files)
        (output,) = LLM("owner/name", **options).generate([[5, 6, 7]], IDS, use_tqdm=False)
        assert [path for path in files if hub.received(path)] == ["config.json"]
    assert len(output.outputs[0].token_ids) == 6


def test_what_needs_text_is_refused_with_what_would_be_right(folder: Path) -> None:
    llm = load(folder)
    with pytest.raises(InvalidRequestError, match=r"no tokenizer .*: give the prompt as token ids"):
        llm.generate("text", IDS)
    with pytest.raises(InvalidRequestError, match=r"no tokenizer .*: set detokenize=False"):
        llm.generate([5, 6], SamplingParams(max_tokens=2))
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        llm.generate([5, 6], SamplingParams(max_tokens=2, detokenize=False, bad_words=["no"]))
    with pytest.raises(InvalidRequestError, match=r"no tokenizer .*conversation"):
        llm.chat([{"role": "user", "content": "hello"}], IDS)
    prompts: list[Prompt] = [[5], "text"]
    good, bad = llm.generate(prompts, IDS, use_tqdm=False)
    assert (good.outputs[0].finish_reason, bad.outputs[0].finish_reason) == ("length", "error")


def test_with_real_weights_a_tokenizer_is_still_needed(folder: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        LLM(str(folder), device="cpu")


def test_a_tokenizer_that_is_there_is_used(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), load_format="dummy", device="cpu", **SMALL, max_num_seqs=8)
    (output,) = llm.generate(["hello"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(output.prompt_token_ids) == 5
    assert output.outputs[0].text


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_dummy_weights_are_quantised_like_others(folder: Path, quantization: str) -> None:
    pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")
    llm = LLM(str(folder), load_format="dummy", device="cpu", quantization=quantization, **SMALL, max_num_seqs=8)
    (output,) = llm.generate([[3, 4]], IDS, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 6


def test_weights_are_not_quantised_to_a_type_of_other_devices(folder: Path) -> None:
    with pytest.raises(ConfigError, match="int8 and int4, not 'fp8'"):
        LLM(str(folder), load_format="dummy", device="cpu", quantization="fp8", **SMALL, max_num_seqs=8)


def test_there_is_no_file_to_take_blocks_from(folder: Path) -> None:
    with pytest.raises(ConfigError, match="load_format='dummy' has no file"):
        load(folder, quantization="gguf")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_expected_tensor_is_made_in_the_right_type_and_stays_small(architecture: str, tied: bool) -> None:
    config = ModelConfig(
        architecture, 64, 48, 80, 2, 4, 2, 16, 64, tie_word_embeddings=tied, qk_norm=True, qkv_bias=True
    )
    network = make_network(config, LayerContext(ReferenceKernels(), DType.BFLOAT16))
    made = dict(dummy_weights(network, DType.BFLOAT16, seed=4))
    assert set(made) == {name for name, _, _ in network.tensors()}
    for name, tensor in made.items():
        assert DType.of(tensor) is DType.BFLOAT16
        if tensor.ndim == 2:
            assert tensor.astype(float).std() == pytest.approx(tensor.shape[1] ** -0.5, rel=0.15), name
            assert abs(tensor.astype(float)).max() <= (3 / tensor.shape[1]) ** 0.5 * 1.01
        else:
            assert (tensor == (0.0 if "bias" in name else 1.0)).all()
    assert (made["model.layers.0.mlp.up_proj.weight"] != made["model.layers.1.mlp.up_proj.weight"]).any()
    again = dict(dummy_weights(network, DType.BFLOAT16, seed=4))
    assert all((tensor == again[name]).all() for name, tensor in made.items())
    loaded = make_dummy_model(config, LayerContext(ReferenceKernels(), DType.BFLOAT16), seed=4)
    assert list(loaded.tensors()) == []


@pytest.mark.parametrize(
    ("name", "parameters", "context"),
    [
        ("llama-3.2-1b-shape", 1_235_814_400, 131072),
        ("llama-3.1-8b-shape", 8_030_261_248, 131072),
        ("opt-125m-shape", 125_239_296, 2048),
        ("opt-13b-shape", 12_853_473_280, 2048),
        ("gpt2-shape", 124_439_808, 1024),
    ],
)
def test_the_shapes_are_those_of_the_published_models(
    name: str, parameters: int, context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    folder = resolve_model(name)
    assert folder == resolve_model(name)
    c = read_model_config(folder)
    assert weight_bytes(build_without_weights(c, "bfloat16")) == 2 * parameters
    assert c.max_position == context
    with pytest.raises(TokenizerError, match="load_format='dummy'"):
        LLM(name, device="cpu", kernels="reference", max_model_len=64)
    with pytest.raises(WeightError, match="load_format='dummy'"):
        load_model(folder, replace(c, vocab_size=8, max_position=64), LayerContext(ReferenceKernels(), DType.BFLOAT16))


@pytest.mark.parametrize(
    ("name", "parameters", "windows"),
    [
        ("mistral-7b-v0.1-shape", 7_241_732_096, {4096: 32}),
        ("gemma-3-270m-shape", 268_098_176, {512: 15, None: 3}),
        ("gemma-3-12b-shape", 11_765_788_416, {1024: 40, None: 8}),
        ("gemma-4-e2b-shape", 4_628_569_379, {512: 12, None: 3}),
    ],
)
def test_shapes_with_windows_are_those_of_the_published_models(
    name: str, parameters: int, windows: dict[int | None, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    network = build_without_weights(read_model_config(resolve_model(name)), "bfloat16")
    assert num_parameters(network) == parameters
    assert Counter(spec.window for spec in network.kv_specs) == windows


def test_the_names_of_the_shapes_are_known_to_the_help_for_wrong_names() -> None:
    with pytest.raises(FileNotFoundError, match=f"did you mean '{next(iter(SHAPES))}'"):
        resolve_model("llama-3.2-1b-shap")


def test_the_engine_in_another_process_needs_no_more(folder: Path) -> None:
    async def main() -> list[int]:
        options = {**SMALL, "load_format": "dummy", "max_num_seqs": 8, "device": "cpu"}
        llm = await AsyncLLM.start(make_config(model=str(folder), **options))
        try:
            with pytest.raises(InvalidRequestError, match="set detokenize=False"):
                await llm.submit("a", [5, 6], SamplingParams(max_tokens=2))
            async for output in llm.generate("b", [5, 6], IDS):
                last = output
            return list(last.outputs[0].token_ids)
        finally:
            await llm.shutdown()

    assert len(asyncio.run(main())) == 6
