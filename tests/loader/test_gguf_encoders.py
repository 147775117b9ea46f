"""GGUF files of encoders, laid out as llama.cpp's converter does, against the folders that they are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from octavo import LLM, UnsupportedModelError
from octavo.models.config_files import read_model_config
from tests.embedding_models import PROMPTS, make_encoder, make_qwen3
from tests.loader.conftest import finish, interleave

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


def add_dense(folder: Path, width: int, inner: int) -> list[np.ndarray]:
    """Two matrices between the pooling and the normalisation, as EmbeddingGemma has them."""
    rng, matrices = np.random.default_rng(0), []
    for name, (outputs, inputs) in {"2_Dense": (inner, width), "3_Dense": (width, inner)}.items():
        matrices.append(rng.standard_normal((outputs, inputs), np.float32))
        (folder / name).mkdir()
        sizes = {"in_features": inputs, "out_features": outputs, "bias": False}
        config = sizes | {"activation_function": "torch.nn.modules.linear.Identity"}
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file({"linear.weight": matrices[-1]}, folder / name / "model.safetensors")
    names = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Dense": "Dense", "4_N": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in names.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    return matrices


@pytest.mark.usefixtures("cached")
def test_embeddinggemma(tmp_path: Path) -> None:
    """A folder against transformers and numpy, and a file with the names and values of llama.cpp's converter."""
    folder, file = make_encoder(tmp_path / "folder"), tmp_path / "embeddinggemma.gguf"
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=10,
        use_bidirectional_attention=True,
        max_position_embeddings=64,
    )
    model = transformers.Gemma3TextModel(config).eval()
    for value in model.parameters():
        value.data.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(folder)
    dense = add_dense(folder, 32, 48)
    options: dict[str, Any] = {"dtype": "float32", "quantization": "none"}
    llm = LLM(str(folder), **options)
    for prompt_name in (None, "query"):
        for text, output in zip(TEXTS, llm.embed(TEXTS, prompt_name=prompt_name, use_tqdm=False), strict=True):
            ids = llm.get_tokenizer().encode(PROMPTS.get(prompt_name or "", "") + text)
            with torch.inference_mode():
                pooled = model(torch.tensor([ids])).last_hidden_state[0].double().mean(0).numpy()
            vector = dense[1].astype(np.float64) @ (dense[0].astype(np.float64) @ pooled)
            np.testing.assert_allclose(output.outputs.embedding, vector / np.linalg.norm(vector), atol=1e-5)

    writer = gguf.GGUFWriter(file, "gemma-embedding")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(7)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(10)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    for i, matrix in enumerate(dense, start=2):
        writer.add_dense_features_dims(f"dense_{i}", matrix.shape[1], matrix.shape[0])
        writer.add_tensor(f"dense_{i}.weight", matrix)
    add_tokenizer(writer, folder)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA_EMBEDDING, 7)
    for name, tensor in model.state_dict().items():
        written = names.get_name(name, (".weight",)) or names.get_name(f"model.{name}", (".weight",))
        assert written is not None
        writer.add_tensor(written, tensor.numpy() + 1 if name.endswith("norm.weight") else tensor.numpy())
    finish(writer)
    ours = LLM(str(file), **options)
    pooler = ours.front_end.files.model_config.pooler
    assert [(each.inputs, each.outputs, each.activation) for each in pooler.dense] == [
        (32, 48, "identity"),
        (48, 32, "identity"),
    ]
    for mine, its in zip(*(each.embed(TEXTS, use_tqdm=False) for each in (ours, llm)), strict=True):
        # A norm's weight is 1 + w in the file, which rounds it.
        np.testing.assert_allclose(mine.outputs.embedding, its.outputs.embedding, atol=1e-5)


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("arch", ["eurobert", "llama-embed"])
def test_layers_of_llama_without_a_causal_mask(arch: str, tmp_path: Path) -> None:
    folder, file = make_encoder(tmp_path / "folder"), tmp_path / "m.gguf"
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    config = transformers.EuroBertConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters=rope,
        mask_token_id=4,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    model = transformers.EuroBertModel(config).eval()
    model.save_pretrained(folder)
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    add_tokenizer(writer, folder)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, 2)
    for name, tensor in model.state_dict().items():
        value = tensor.numpy()
        if arch == "llama-embed" and ".q_proj" in name:
            value = interleave(value, 4)
        if arch == "llama-embed" and ".k_proj" in name:
            value = interleave(value, 2)
        written = names.get_name(name, (".weight",)) or names.get_name(f"model.{name}", (".weight",))
        writer.add_tensor(str(written), np.ascontiguousarray(value))
    finish(writer)
    options: dict[str, Any] = {"dtype": "float32", "quantization": "none"}
    ours, theirs = (LLM(str(each), **options) for each in (file, folder))
    for mine, its in zip(*(llm.embed(TEXTS, use_tqdm=False) for llm in (ours, theirs)), strict=True):
        np.testing.assert_array_equal(mine.outputs.embedding, its.outputs.embedding)


@pytest.mark.usefixtures("cached")
def test_a_language_model_that_judges_pairs(tmp_path: Path) -> None:
    """Qwen3-Reranker: llama.cpp's converter keeps the head's rows of two answers, and a template of pairs."""
    model, tokenizer = make_qwen3(tmp_path, base=False)
    no, yes = tokenizer.token_to_id("no"), tokenizer.token_to_id("yes")
    head = model.lm_head.weight.detach().numpy()
    config = model.config
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_pooling_type(gguf.PoolingType.RANK)
    writer.add_classifier_output_labels(["yes", "no"])
    template = "<|im_start|>Query: {query} Document: {document}<|im_end|>"
    writer.add_chat_template([{"name": "rerank", "template": template}])
    vocab = tokenizer.get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([3] * 3 + [1] * (len(vocab) - 3))
    writer.add_token_merges(["n o", "y e", "ye s"])
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(str(names.get_name(name, (".weight",))), tensor.numpy())
    writer.add_tensor("cls.output.weight", np.stack([head[yes], head[no]]))
    finish(writer)
    llm = LLM(str(tmp_path / "m.gguf"), dtype="float32", quantization="none", num_gpu_blocks_override=64)
    assert llm.front_end.pooling.tasks == ("classify", "score")
    documents = ["bank", "{query}"]
    for output, document in zip(llm.score("a river", documents, use_tqdm=False), documents, strict=True):
        ids = tokenizer.encode(f"<|im_start|>Query: a river Document: {document}<|im_end|>").ids
        assert output.prompt_token_ids == ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1].double()
        assert abs(output.outputs.score - float(torch.sigmoid(logits[yes] - logits[no]))) < 1e-5


@pytest.mark.usefixtures("cached")
def test_an_unknown_pooling_is_refused(tmp_path: Path) -> None:
    file = write_gguf(make_encoder(tmp_path / "folder"), tmp_path / "bert.gguf", pooling=9)
    with pytest.raises(UnsupportedModelError, match="pooling_type 9 is not supported"):
        LLM(str(file))
