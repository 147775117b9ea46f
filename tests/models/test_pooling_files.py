"""What files of sentence-transformers say of vectors, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoTokenizer

from octavo import LLM, ConfigError, InvalidRequestError, OctavoError, PoolingParams, UnsupportedModelError, WeightError
from octavo.core.outputs import DenseConfig
from octavo.models.config_files import read_model_config
from tests.embedding_models import HIDDEN_SIZE, MAX_TOKENS, make_encoder, make_qwen3
from tests.models.zoo import edit_config

TYPES = "sentence_transformers.models."
#: torch.nn's activations that a Dense may have.
FUNCTIONS = (
    *("Tanh", "ReLU", "GELU", "Sigmoid", "SiLU", "Mish", "LeakyReLU", "ELU", "CELU", "SELU", "ReLU6", "Hardtanh"),
    *("Hardswish", "Hardsigmoid", "Softplus", "Softsign", "LogSigmoid", "Tanhshrink", "Softshrink", "Hardshrink"),
    *("Softmax", "Softmin", "Identity"),
)
RAW = PoolingParams(use_activation=False)
CUT = PoolingParams(truncate_prompt_tokens=-1)
#: Settings with which sentence-transformers 6 saves a Transformer module.
TEXTS_ONLY = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}


ENCODER = (("Transformer", ""), ("Pooling", "1_Pooling"))


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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_matrix_after_the_pooling(name: str, folder: Path) -> None:
    module = getattr(torch.nn, name)
    pooled = LLM(str(folder), dtype="float32").encode("abc def", RAW, use_tqdm=False)[0].outputs.data
    weight, bias = add_dense(folder, activation_function=f"{module.__module__}.{name}")
    function = module(dim=-1) if name.startswith("Soft") and name.endswith(("max", "min")) else module()
    vector = function(torch.from_numpy(weight.astype(np.float64) @ pooled + bias)).numpy()
    llm = LLM(str(folder), dtype="float32")
    ours = llm.embed("abc def", use_tqdm=False)[0].outputs.embedding
    np.testing.assert_allclose(ours, vector / np.linalg.norm(vector), atol=1e-5)
    assert llm.front_end.pooling.vector_size == 8


@pytest.mark.parametrize("outputs", [HIDDEN_SIZE, 8])
def test_what_is_added_to_a_matrix_and_normalized_before_it(outputs: int, folder: Path) -> None:
    pooled = LLM(str(folder), dtype="float32").encode("abc def", RAW, use_tqdm=False)[0].outputs.data.astype(np.float64)
    weight, bias = add_dense(folder, outputs, use_residual=True)
    through = np.random.default_rng(1).standard_normal((outputs, HIDDEN_SIZE)).astype(np.float32)
    tensors = {"linear.weight": weight, "linear.bias": bias}
    if outputs != HIDDEN_SIZE:
        tensors["residual.weight"] = through
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    modules(folder, *ENCODER, ("Normalize", "3_Normalize"), ("Dense", "2_Dense"), ("Dropout", "4_Dropout"))
    unit = pooled / np.linalg.norm(pooled)
    added = unit if outputs == HIDDEN_SIZE else through @ unit
    ours = LLM(str(folder), dtype="float32").embed("abc def", use_tqdm=False)[0].outputs.embedding
    np.testing.assert_allclose(ours, np.tanh(weight @ unit + bias) + added, atol=1e-5)


def test_a_prompt_that_is_not_pooled(folder: Path) -> None:
    write(folder, "1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False})
    llm = LLM(str(folder), dtype="float32")
    raw = PoolingParams(use_activation=False)
    named = llm.embed("abc", prompt_name="query", pooling_params=raw, use_tqdm=False)[0]
    states = llm.encode("query: abc", raw, pooling_task="token_embed", use_tqdm=False)[0].outputs.data
    skipped = len(llm.get_tokenizer().encode("query: ")) - 1
    np.testing.assert_allclose(named.outputs.embedding, states[skipped:].mean(0), atol=1e-5)


def test_a_prompt_counts_without_a_special_token_at_its_end_alone(folder: Path) -> None:
    """A tokenizer without special tokens around texts; where nothing is left to pool the vector is zero."""
    write(folder, "1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    write(folder, "tokenizer.json", tokenizer | {"post_processor": None})
    llm = LLM(str(folder), dtype="float32")
    states = llm.encode("query: abc", RAW, pooling_task="token_embed", use_tqdm=False)[0].outputs.data
    skipped = len(llm.get_tokenizer().encode("query: "))

    def named(text: str) -> np.ndarray:
        output = llm.embed(text, prompt_name="query", pooling_params=RAW, use_tqdm=False)[0]
        return np.array(output.outputs.embedding)

    np.testing.assert_allclose(named("abc"), states[skipped:].mean(0), atol=1e-5)
    assert not named("").any()
    write(folder, "1_Pooling/config.json", {"pooling_mode": "max", "include_prompt": False})
    with pytest.raises(InvalidRequestError):
        LLM(str(folder)).embed("", prompt_name="query", use_tqdm=False)


@pytest.mark.parametrize(
    ("settings", "of_tokenizer", "length"),
    [
        (TEXTS_ONLY, 20, 20),
        (TEXTS_ONLY, int(1e30), MAX_TOKENS),
        (TEXTS_ONLY, 4096, MAX_TOKENS),
        ({**TEXTS_ONLY, "max_seq_length": 30}, 20, 30),
        ({**TEXTS_ONLY, "processor_kwargs": {"model_max_length": 24}}, 20, 24),
        ({"tokenizer_args": {"model_max_length": 24}}, 20, 24),
        ({**TEXTS_ONLY, "processing_kwargs": {"text": {"max_length": 10}}, "max_seq_length": 30}, 20, 10),
        ({**TEXTS_ONLY, "unpad_inputs": False, "model_kwargs": {"dtype": "float16"}}, 20, 20),
    ],
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_where_texts_are_cut(side: str, settings: dict[str, Any], of_tokenizer: int, length: int, folder: Path) -> None:
    write(folder, "sentence_bert_config.json", settings)
    values = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, "tokenizer_config.json", values | {"model_max_length": of_tokenizer, "truncation_side": side})
    llm = LLM(str(folder))
    assert llm.core.max_model_len == length
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in ("a bcd " * 30, "", "a", "caf\u00e9 \u6f22"):
        output = llm.embed(text, pooling_params=CUT, use_tqdm=False)[0]
        assert output.prompt_token_ids == theirs(text, truncation=True, max_length=length)["input_ids"]
    with pytest.raises(InvalidRequestError):
        llm.embed("a bcd " * 30, use_tqdm=False)


def test_texts_in_lower_case(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    write(folder, "tokenizer.json", tokenizer)
    for lower in (False, True):
        write(folder, "sentence_bert_config.json", {"do_lower_case": lower})
        llm = LLM(str(folder))
        ids = [llm.embed(text, use_tqdm=False)[0].prompt_token_ids for text in ("ABC [SEP] d", "abc [SEP] d")]
        assert (ids[0] == ids[1]) == lower


def test_a_prompt_may_be_null(folder: Path) -> None:
    said = {"prompts": {"query": None, "document": ""}, "default_prompt_name": None, "similarity_fn_name": None}
    write(folder, "config_sentence_transformers.json", said)
    pooler = read_model_config(folder).pooler
    assert (dict(pooler.prompts), pooler.similarity) == ({"document": ""}, "cosine")


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
        ("modules.json", [{"type": TYPES + "LSTM", "path": "x"}], "the module 'LSTM' is not supported"),
        *(
            ("modules.json", [{"type": TYPES + kind, "path": "x"}], f"'{kind}'")
            for kind in ("LayerNorm", "CNN", "WordWeights", "BoW", "Router", "StaticEmbedding", "WeightedLayerPooling")
        ),
        ("modules.json", [{"type": "custom.Transformer", "path": ""}], "'custom.Transformer'"),
        ("modules.json", [{"type": TYPES + "Pooling", "path": "missing"}], "is missing"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, r"\['mean', 'cls'\]"),
        ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, "'token_embeddings'"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "'SparseEncoder'"),
        ("config_sentence_transformers.json", {"model_type": "MultiVectorEncoder"}, "'MultiVectorEncoder'"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "'fill-mask'"),
        ("sentence_bert_config.json", {"modality_config": {"text": {}, "image": {}}}, "image"),
        ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "message"),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {"method_output_name": "pooler_output"}}},
            "'pooler_output'",
        ),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"add_special_tokens": False}}}, "add_special"),
        ("sentence_bert_config.json", {"config_args": {"hidden_act": "relu"}}, "hidden_act"),
        ("sentence_bert_config.json", {"query_length": 8}, "query_length"),
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
    from octavo.loader.weights import read_dense

    add_dense(folder)
    with pytest.raises(WeightError, match=r"'linear.weight' must have the shape \[9, 32\], and is \(8, 32\)"):
        read_dense(folder, DenseConfig("2_Dense", HIDDEN_SIZE, 9))
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(WeightError, match="files of pickles"):
        LLM(str(folder))
    add_dense(folder, activation_function="torch.nn.modules.activation.PReLU")
    with pytest.raises(UnsupportedModelError, match="activation_function 'PReLU' is not supported"):
        read_model_config(folder)


def test_qwen3_embedding_as_it_is_published(tmp_path: Path) -> None:
    """Keys of a base model under the name of a language model, an EOS from the tokenizer, the last token."""
    model, tokenizer = make_qwen3(tmp_path, base=True, eos=True)
    prompts = {"query": "Instruct: retrieve passages\nQuery:", "document": ""}
    write(tmp_path, "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    flags = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True}
    write(tmp_path, "1_Pooling/config.json", flags)
    modules(tmp_path, *ENCODER, ("Normalize", "2_Normalize"))
    llm = LLM(str(tmp_path), dtype="float32", num_gpu_blocks_override=64)
    for name, before in prompts.items():
        output = llm.embed("Where is it?", prompt_name=name, use_tqdm=False)[0]
        ids = tokenizer.encode(before + "Where is it?").ids
        assert output.prompt_token_ids == ids and ids[-1] == 0
        with torch.inference_mode():
            vector = model(torch.tensor([ids])).last_hidden_state[0, -1].double().numpy()
        np.testing.assert_allclose(output.outputs.embedding, vector / np.linalg.norm(vector), atol=1e-5)


#: A chat template with the roles of a pair.
JUDGE = (
    "{% for m in messages %}{% if m.role == 'system' %}<|im_start|>Instruct: {{ m.content }}\n"
    "{% elif m.role == 'query' %}Query: {{ m.content }}\n"
    "{% elif m.role == 'document' %}Document: {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def test_a_language_model_that_judges_pairs(tmp_path: Path) -> None:
    """Qwen3-Reranker as a CrossEncoder of sentence-transformers, whose last module is LogitScore."""
    model, tokenizer = make_qwen3(tmp_path, base=False)
    no, yes = tokenizer.token_to_id("no"), tokenizer.token_to_id("yes")
    (tmp_path / "chat_template.jinja").write_text(JUDGE)
    write(
        tmp_path,
        "modules.json",
        [
            {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
            {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"},
        ],
    )
    write(tmp_path, "1_LogitScore/config.json", {"true_token_id": yes, "false_token_id": no})
    forward = {"method": "forward", "method_output_name": "logits"}
    settings = {
        "transformer_task": "text-generation",
        "modality_config": {"text": forward, "message": {**forward, "format": "flat"}},
        "module_output_name": "causal_logits",
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    }
    write(tmp_path, "sentence_bert_config.json", settings)
    prompts = {"prompts": {"search": "judge"}, "default_prompt_name": "search", "model_type": "CrossEncoder"}
    write(tmp_path, "config_sentence_transformers.json", prompts)
    llm = LLM(str(tmp_path), dtype="float32", num_gpu_blocks_override=64)
    assert llm.front_end.pooling.tasks == ("score",)
    for output, document in zip(llm.score("a river", ["bank", "loaf"], use_tqdm=False), ("bank", "loaf"), strict=True):
        text = f"<|im_start|>Instruct: judge\nQuery: a river\nDocument: {document}<|im_end|><|im_start|>"
        ids = tokenizer.encode(text).ids
        assert output.outputs.error is None
        assert output.prompt_token_ids == ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1].double()
        assert abs(output.outputs.score - float(torch.sigmoid(logits[yes] - logits[no]))) < 1e-5

    write(tmp_path, "1_LogitScore/config.json", {"true_token_id": yes, "false_token_id": None})
    with pytest.raises(UnsupportedModelError, match="false_token_id must be the id of a token, not None"):
        LLM(str(tmp_path))
    write(tmp_path, "1_LogitScore/config.json", {"true_token_id": 9999, "false_token_id": no})
    with pytest.raises(ConfigError, match="the vocabulary has"):
        LLM(str(tmp_path), num_gpu_blocks_override=64)
    settings["modality_config"]["message"]["format"] = "structured"  # type: ignore[index]
    write(tmp_path, "sentence_bert_config.json", settings)
    with pytest.raises(UnsupportedModelError, match="'structured' is not supported; supported: flat"):
        LLM(str(tmp_path))
