"""What files of sentence-transformers say of vectors, and what is refused of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo import LLM, ConfigError, OctavoError, PoolingParams, UnsupportedModelError, WeightError
from octavo.core.pooler_config import DenseConfig
from octavo.models.config_files import read_model_config
from tests.embedding_models import HIDDEN_SIZE, make_encoder
from tests.models.zoo import edit_config

TYPES = "sentence_transformers.models."
FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "activation.Tanh": np.tanh,
    "activation.ReLU": lambda x: np.maximum(x, 0),
    "linear.Identity": lambda x: x,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_encoder(tmp_path / "encoder")


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def modules(folder: Path, *types: tuple[str, str]) -> None:
    write(
        folder, "modules.json", [{"idx": i, "path": path, "type": TYPES + kind} for i, (kind, path) in enumerate(types)]
    )


def add_dense(folder: Path, outputs: int = 8, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((outputs, HIDDEN_SIZE)).astype(np.float32)
    bias = rng.standard_normal(outputs).astype(np.float32)
    config = {
        "in_features": HIDDEN_SIZE,
        "out_features": outputs,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    write(folder, "2_Dense/config.json", {**config, **changes})
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    modules(folder, ("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"), ("Normalize", "3_Normalize"))
    return weight, bias


def test_flags_and_the_name_of_a_pooling(folder: Path) -> None:
    for flag, kind in (
        ("cls_token", "cls"),
        ("max_tokens", "max"),
        ("lasttoken", "last"),
        ("weightedmean_tokens", "weighted_mean"),
    ):
        write(folder, "1_Pooling/config.json", {f"pooling_mode_{flag}": True, "pooling_mode_mean_tokens": False})
        assert read_model_config(folder).pooler.kind == kind
    write(folder, "1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False})
    assert read_model_config(folder).pooler.include_prompt is False
    modules(folder, ("Transformer", ""), ("Pooling", "1_Pooling"))
    pooler = read_model_config(folder).pooler
    assert pooler.is_from_files and not pooler.normalize


def test_a_matrix_after_the_pooling(folder: Path) -> None:
    plain = LLM(str(folder), dtype="float32")
    pooled = plain.encode("abc def", PoolingParams(use_activation=False), use_tqdm=False)[0].outputs.data
    for name, function in FUNCTIONS.items():
        weight, bias = add_dense(folder, activation_function=f"torch.nn.modules.{name}")
        llm = LLM(str(folder), dtype="float32")
        vector = function(weight.astype(np.float64) @ pooled + bias)
        vector /= np.linalg.norm(vector)
        ours = llm.embed("abc def", use_tqdm=False)[0].outputs.embedding
        np.testing.assert_allclose(ours, vector, atol=1e-5)
        assert llm.front_end.pooling.vector_size == 8


def test_a_prompt_that_is_not_pooled(folder: Path) -> None:
    write(folder, "1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False})
    llm = LLM(str(folder), dtype="float32")
    raw = PoolingParams(use_activation=False)
    named = llm.embed("abc", prompt_name="query", pooling_params=raw, use_tqdm=False)[0]
    states = llm.encode("query: abc", raw, pooling_task="token_embed", use_tqdm=False)[0].outputs.data
    skipped = len(llm.get_tokenizer().encode("query: ")) - 1
    np.testing.assert_allclose(named.outputs.embedding, states[skipped:].mean(0), atol=1e-5)


def test_prompts_and_lengths(folder: Path) -> None:
    said = {"prompts": {"q": "ask: "}, "default_prompt_name": "q", "similarity_fn_name": "dot"}
    write(folder, "config_sentence_transformers.json", said)
    write(folder, "sentence_bert_config.json", {"max_seq_length": 32})
    config = read_model_config(folder)
    assert (config.default_length, config.max_position, config.pooler.similarity) == (32, 64, "dot")
    llm = LLM(str(folder))
    assert llm.core.max_model_len == 32 and LLM(str(folder), max_model_len=64).core.max_model_len == 64
    assert llm.embed("abc", use_tqdm=False)[0].prompt_token_ids == llm.get_tokenizer().encode("ask: abc")


def test_shorter_vectors(folder: Path) -> None:
    edit_config(folder, matryoshka_dimensions=None)
    assert read_model_config(folder).pooler.dimensions == ()
    edit_config(folder, is_matryoshka=True)
    assert read_model_config(folder).pooler.dimensions is None
    edit_config(folder, matryoshka_dimensions=[4, 16])
    assert read_model_config(folder).pooler.dimensions == (4, 16)
    edit_config(folder, matryoshka_dimensions=[4, 99])
    with pytest.raises(ConfigError, match="matryoshka_dimensions must be a list of numbers up to 32"):
        read_model_config(folder)


def test_what_a_cross_encoder_says(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "judge", labels=1)
    edit_config(folder, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    assert read_model_config(folder).pooler.activation == "identity"
    edit_config(folder, sentence_transformers={"activation_fn": "my.own.Thing"})
    with pytest.raises(UnsupportedModelError, match=r"activation_fn 'my.own.Thing' is not supported"):
        read_model_config(folder)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("modules.json", {"a": 1}, "must hold a list of at most 16 modules"),
        ("modules.json", [{"type": TYPES + "Pooling", "path": "../x"}], "a path within it"),
        ("modules.json", [{"type": TYPES + "LSTM", "path": "x"}], "modules of type 'LSTM' are not supported"),
        ("modules.json", [{"type": TYPES + "Pooling", "path": "missing"}], "is missing"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "one kind of pooling",
        ),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, r"not \['median'\]"),
        ("sentence_bert_config.json", {"max_seq_length": -1}, "max_seq_length must be a positive integer"),
        ("config_sentence_transformers.json", {"prompts": {"q": 1}}, "prompts must be texts by name"),
        (
            "config_sentence_transformers.json",
            {"prompts": {}, "default_prompt_name": "q"},
            "must be one of the prompts, not 'q'",
        ),
        ("config_sentence_transformers.json", {"similarity_fn_name": "hamming"}, "similarity_fn_name must be one of"),
    ],
)
def test_what_is_wrong_is_refused_with_the_file(folder: Path, name: str, content: Any, words: str) -> None:
    write(folder, name, content)
    with pytest.raises(OctavoError, match=words):
        read_model_config(folder)


def test_matrices_that_do_not_fit_are_refused(folder: Path) -> None:
    from octavo.loader.pooling_weights import read_dense

    add_dense(folder)
    with pytest.raises(WeightError, match=r"'linear.weight' must have the shape \[9, 32\], and is \(8, 32\)"):
        read_dense(folder, DenseConfig("2_Dense", HIDDEN_SIZE, 9))
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(WeightError, match="files of pickles"):
        LLM(str(folder))
    add_dense(folder, activation_function="torch.nn.modules.activation.Mish")
    with pytest.raises(UnsupportedModelError, match="activation_function 'Mish' is not supported"):
        read_model_config(folder)
