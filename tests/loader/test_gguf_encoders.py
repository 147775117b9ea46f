"""GGUF files of encoders, laid out as llama.cpp's converter does, against the folders that they are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from octavo import LLM, UnsupportedModelError
from octavo.models.config_files import read_model_config
from tests.embedding_models import make_encoder
from tests.loader.conftest import finish

TEXTS = ["abc def", "a", "Deaf, bad; cab!", "x" * 50]
#: Names of the folder's tensors by those in a file.
NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "blk.{}.attn_q": "encoder.layer.{}.attention.self.query",
    "blk.{}.attn_k": "encoder.layer.{}.attention.self.key",
    "blk.{}.attn_v": "encoder.layer.{}.attention.self.value",
    "blk.{}.attn_output": "encoder.layer.{}.attention.output.dense",
    "blk.{}.attn_output_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "blk.{}.ffn_up": "encoder.layer.{}.intermediate.dense",
    "blk.{}.ffn_down": "encoder.layer.{}.output.dense",
    "blk.{}.layer_output_norm": "encoder.layer.{}.output.LayerNorm",
}
HEAD = {"cls": "pooler.dense", "cls.output": "classifier"}


def write_gguf(folder: Path, path: Path, *, pooling: int | None = 1, labels: list[str] | None = None) -> Path:
    """The file of a folder of BERT."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {name.removeprefix("bert."): value for name, value in load_file(folder / "model.safetensors").items()}
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_uint32("bert.pooling_type", pooling)
    if labels:
        writer.add_array("bert.classifier.output_labels", labels)
    add_tokenizer(writer, folder)
    for ours, its in {**NAMES, **(HEAD if labels else {})}.items():
        for layer in range(config["num_hidden_layers"] if "{}" in ours else 1):
            for kind in ("weight", "bias"):
                if (tensor := tensors.get(f"{its.format(layer)}.{kind}")) is not None:
                    writer.add_tensor(f"{ours.format(layer)}.{kind}", np.ascontiguousarray(tensor))
    finish(writer)
    return path


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """The WordPiece of a folder, whose tokens are marked where a word begins."""
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    whole = [token[0] == "[" for token in tokens]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(
        [t if w else t[2:] if t.startswith("##") else "▁" + t for t, w in zip(tokens, whole, strict=True)]
    )
    writer.add_token_types([gguf.TokenType.CONTROL if w else gguf.TokenType.NORMAL for w in whole])
    for name, token in (("unknown", "[UNK]"), ("seperator", "[SEP]"), ("padding", "[PAD]"), ("cls", "[CLS]")):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", vocab[token])


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cached")
def test_an_encoder_gives_the_vectors_of_its_folder(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "folder")
    file = write_gguf(folder, tmp_path / "bert.gguf")
    options: dict[str, Any] = {"dtype": "float32", "quantization": "none"}
    ours, theirs = (LLM(str(model), **options) for model in (file, folder))
    assert ours.front_end.pooling.tasks == ("embed", "token_embed", "score")
    for mine, its in zip(*(llm.embed(TEXTS, use_tqdm=False) for llm in (ours, theirs)), strict=True):
        assert mine.prompt_token_ids == its.prompt_token_ids
        np.testing.assert_array_equal(mine.outputs.embedding, its.outputs.embedding)
    assert ours.get_tokenizer().encode_pair("ab", "c") == theirs.get_tokenizer().encode_pair("ab", "c")


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(("number", "kind"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_the_file_says_how_vectors_are_made(number: int, kind: str, tmp_path: Path) -> None:
    from octavo.loader.resolve import resolve_model

    file = write_gguf(make_encoder(tmp_path / "folder"), tmp_path / "bert.gguf", pooling=number)
    pooler = read_model_config(resolve_model(str(file))).pooler
    assert (pooler.kind, pooler.normalize, pooler.is_from_files) == (kind, True, True)


@pytest.mark.usefixtures("cached")
def test_class_scores_of_a_file(tmp_path: Path) -> None:
    folder, labels = make_encoder(tmp_path / "folder", labels=3), ["good", "bad", "so so"]
    file = write_gguf(folder, tmp_path / "bert.gguf", pooling=4, labels=labels)
    options: dict[str, Any] = {"dtype": "float32", "quantization": "none"}
    ours, theirs = (LLM(str(model), **options) for model in (file, folder))
    assert ours.front_end.files.model_config.labels == tuple(labels)
    for mine, its in zip(*(llm.classify(TEXTS, use_tqdm=False) for llm in (ours, theirs)), strict=True):
        np.testing.assert_array_equal(mine.outputs.probs, its.outputs.probs)


@pytest.mark.usefixtures("cached")
def test_an_encoder_with_rotary_positions(tmp_path: Path) -> None:
    from transformers import NomicBertConfig, NomicBertModel

    folder = make_encoder(tmp_path / "folder")
    old = json.loads((folder / "config.json").read_text())
    shape = {name: old[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    model = NomicBertModel(NomicBertConfig(**shape, num_attention_heads=4, max_position_embeddings=64))
    model.save_pretrained(folder)
    state = {name: value.detach().numpy() for name, value in model.named_parameters()}
    file = tmp_path / "nomic.gguf"
    writer = gguf.GGUFWriter(file, "nomic-bert")
    writer.add_context_length(64)
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-12)
    writer.add_rope_freq_base(1000.0)
    writer.add_causal_attention(False)
    writer.add_uint32("nomic-bert.pooling_type", 1)
    add_tokenizer(writer, folder)
    tensors = {
        "token_embd.weight": state["embeddings.word_embeddings.weight"],
        "token_types.weight": state["embeddings.token_type_embeddings.weight"],
        **{f"token_embd_norm.{kind}": state[f"embeddings.LayerNorm.{kind}"] for kind in ("weight", "bias")},
    }
    for i in range(shape["num_hidden_layers"]):
        layer = f"layers.{i}."
        fused = [state[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"]
        tensors[f"blk.{i}.attn_qkv.weight"] = np.concatenate(fused)
        tensors[f"blk.{i}.attn_output.weight"] = state[f"{layer}self_attn.o_proj.weight"]
        for part in ("gate", "up", "down"):
            tensors[f"blk.{i}.ffn_{part}.weight"] = state[f"{layer}mlp.{part}_proj.weight"]
        for kind in ("weight", "bias"):
            tensors[f"blk.{i}.attn_output_norm.{kind}"] = state[f"{layer}post_attention_layernorm.{kind}"]
            tensors[f"blk.{i}.layer_output_norm.{kind}"] = state[f"{layer}post_mlp_layernorm.{kind}"]
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    finish(writer)
    options: dict[str, Any] = {"dtype": "float32", "quantization": "none"}
    ours, theirs = (LLM(str(model), **options) for model in (file, folder))
    for mine, its in zip(*(llm.embed(TEXTS, use_tqdm=False) for llm in (ours, theirs)), strict=True):
        np.testing.assert_array_equal(mine.outputs.embedding, its.outputs.embedding)


@pytest.mark.usefixtures("cached")
def test_an_unknown_pooling_is_refused(tmp_path: Path) -> None:
    file = write_gguf(make_encoder(tmp_path / "folder"), tmp_path / "bert.gguf", pooling=9)
    with pytest.raises(UnsupportedModelError, match="pooling_type 9 is not supported"):
        LLM(str(file))
