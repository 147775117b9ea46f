"""Weights of cross attention from the engine: those of transformers, and the same bits however they are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo import LLM, SamplingParams
from octavo.core.request import EncoderInput, RequestOptions
from octavo.models.whisper import FEATURES
from tests.models.test_encoder_decoders import save, whisper

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 300,
    "max_num_seqs": 8,
    "block_size": 4,
    "max_model_len": 64,
    "num_threads": 1,
}
#: More positions than a head has numbers, and not a multiple of them, nor of a block.
POSITIONS = 30
PROMPT = [2, *((i * 29 + 5) % 90 + 3 for i in range(17))]
HEADS = [(1, 3), (0, 1), (1, 0)]
ONLY_PROMPT = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whisper")


@pytest.fixture(scope="module")
def model(folder: Path) -> tuple[Any, torch.Tensor]:
    return whisper(folder, pad_token_id=0, max_source_positions=POSITIONS)


@pytest.fixture(scope="module")
def prompt(model: tuple[Any, torch.Tensor]) -> dict[str, Any]:
    given = EncoderInput.of(FEATURES, model[1].numpy().tobytes(), POSITIONS)
    return {"prompt_token_ids": PROMPT, "encoder_input": given, "num_forced": 0}


@pytest.fixture(scope="module")
def llm(folder: Path, model: Any) -> LLM:
    return LLM(str(folder), **OPTIONS)


def ask(llm: LLM, prompt: Any, heads: Any = HEADS, others: int = 0) -> NDArray[np.float32]:
    """The weights, computed in the company of other requests."""
    options = RequestOptions(alignment_heads=heads)
    for i in range(others):
        many = {**prompt, "prompt_token_ids": PROMPT[: 3 + i]}
        llm.add_request(f"other {i}", many, SamplingParams(max_tokens=20, seed=i, detokenize=False), RequestOptions())
    llm.add_request("asks", prompt, ONLY_PROMPT, options, streaming=False)
    found: dict[str, Any] = {}
    while llm.has_unfinished_requests():
        found |= {output.request_id: output for output in llm.step() if output.finished}
    output = found["asks"]
    assert output.outputs[0].error is None
    assert all(found[f"other {i}"].attention_weights is None for i in range(others))
    shape = len(heads), len(output.prompt_token_ids), output.num_encoder_tokens
    return np.frombuffer(output.attention_weights, np.float32).reshape(shape)


def expected(model: Any, heads: Any = HEADS, **inputs: Any) -> NDArray[np.float32]:
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        made = model(**inputs, decoder_input_ids=torch.tensor([PROMPT]), output_attentions=True)
    return np.stack([made.cross_attentions[layer][0, head].numpy() for layer, head in heads])


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_weights_are_those_of_transformers(kernels: str, folder: Path, model: Any, prompt: Any) -> None:
    found = ask(LLM(str(folder), **OPTIONS, kernels=kernels), prompt)
    assert found.shape == (3, len(PROMPT), POSITIONS)
    np.testing.assert_allclose(found, expected(model[0], input_features=model[1][None]), atol=1e-5)
    assert found.std() > 1e-3


@pytest.mark.parametrize("family", ["T5", "Marian"])
def test_weights_of_networks_that_read_text(family: str, tmp_path: Path) -> None:
    text = [(i * 37 + 11) % 97 + 3 for i in range(21)]
    theirs = expected(save(tmp_path, family), [(1, 2)], input_ids=torch.tensor([text]))
    prompt = {"prompt_token_ids": PROMPT, "encoder_input": EncoderInput.of_tokens(text), "num_forced": 0}
    np.testing.assert_allclose(ask(LLM(str(tmp_path), **OPTIONS), prompt, [(1, 2)]), theirs, atol=1e-5)


def test_bits_do_not_depend_on_company_or_on_what_is_cached(llm: LLM, prompt: Any) -> None:
    alone = ask(llm, prompt)
    cached = ask(llm, prompt)  # the encoder is not computed, the prompt is
    llm.reset_prefix_cache()
    company = ask(llm, prompt, others=3)
    assert alone.tobytes() == cached.tobytes() == company.tobytes()


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 8}, {"tensor_parallel_size": 2}], ids=str)
def test_bits_do_not_depend_on_how_they_are_computed(
    options: dict[str, Any], folder: Path, llm: LLM, prompt: Any
) -> None:
    other = LLM(str(folder), **OPTIONS, **options)
    assert ask(other, prompt, others=2).tobytes() == ask(llm, prompt).tobytes()


@pytest.mark.parametrize(
    ("options", "error"), [({"dtype": "bfloat16"}, 0.02), ({"kv_cache_dtype": "int8"}, 0.02)], ids=str
)
def test_other_types_of_numbers(options: dict[str, Any], error: float, folder: Path, model: Any, prompt: Any) -> None:
    found = ask(LLM(str(folder), **{**OPTIONS, **options}), prompt)
    np.testing.assert_allclose(found, expected(model[0], input_features=model[1][None]), atol=error)
    np.testing.assert_allclose(found.sum(axis=2), 1.0, atol=error)


def test_a_request_that_does_not_ask_has_none(llm: LLM, prompt: Any) -> None:
    [output] = llm.generate([prompt], ONLY_PROMPT, use_tqdm=False)
    assert output.attention_weights is None
