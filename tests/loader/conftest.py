"""Tiny GGUF files, written with the gguf package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.kernels.torch_backend import to_torch
from octavo.kernels.weight_rows import GGUFRows, QuantizedRows
from octavo.loader.gguf_config import write_gguf_folder
from octavo.loader.gguf_file import GGUFCheckpoint
from octavo.loader.weights import read_safetensors
from octavo.models.checkpoint import Pairs
from octavo.models.config_files import read_model_config
from octavo.models.network import build_without_weights

#: A byte-level vocabulary: the 256 byte characters, a few merges, two special tokens.
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ġ Ġ", "1 2"]


def byte_level_tokens() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    alphabet = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(rest))]
    return ["<|start|>", "<|end|>", *alphabet, *(m.replace(" ", "") for m in MERGES)]


def add_tokenizer(writer: gguf.GGUFWriter, pre: str = "gpt-2", **options: Any) -> int:
    """A byte-level tokenizer; returns its number of tokens."""
    tokens = byte_level_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if "add_bos" in options:
        writer.add_add_bos_token(options["add_bos"])
    return len(tokens)


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: the rows of a head's two halves take turns."""
    rows = []
    for head in np.split(weight, heads):
        first, second = np.split(head, 2)
        for a, b in zip(first, second, strict=True):
            rows += [a, b]
    return np.stack(rows)


def random_blocks(rng: np.random.Generator, kind: Q, rows: int, columns: int) -> np.ndarray:
    """Bytes of a quantized tensor [rows, bytes]: numbers if gguf can quantize them, else random blocks."""
    values = rng.standard_normal((rows, columns), dtype=np.float32)
    try:
        return gguf.quants.quantize(values, kind).view(np.uint8).reshape(rows, -1)
    except NotImplementedError:
        pass
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    if kind == Q.IQ1_M:  # a float16 scale in the high halves of four words
        data[:, :, 55] = data[:, :, 55] & 0x0F | 0x30
        return data.reshape(rows, -1)
    scales = {Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208], Q.Q2_K: [80, 82], Q.Q3_K: [108]}.get(kind, [0])
    for at in scales:
        data[:, :, at : at + 2] = rng.standard_normal((rows, columns // block, 1)).astype(np.float16).view(np.uint8)
    return data.reshape(rows, -1)


def hf_names(layers: int) -> dict[str, str]:
    """GGUF name -> transformers name."""
    parts = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    names["output.weight"] = "lm_head.weight"
    for i in range(layers):
        for ours, theirs in parts.items():
            for kind in ("weight", "bias"):
                names[f"blk.{i}.{ours}.{kind}"] = f"model.layers.{i}.{theirs}.{kind}"
    return names


@pytest.fixture
def export_gguf() -> Callable[..., None]:
    """Writes a transformers model as GGUF by hand."""

    def export(model: Any, path: Path, arch: str, *, edit: Callable[[gguf.GGUFWriter], None] | None = None) -> None:
        config, state = model.config, model.state_dict()
        writer = gguf.GGUFWriter(path, arch)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        assert add_tokenizer(writer) <= config.vocab_size
        for ours, theirs in hf_names(config.num_hidden_layers).items():
            if theirs not in state or (theirs == "lm_head.weight" and config.tie_word_embeddings):
                continue
            value = state[theirs].float().numpy()
            if arch == "llama" and ".attn_q." in ours:
                value = interleave(value, config.num_attention_heads)
            if arch == "llama" and ".attn_k." in ours:
                value = interleave(value, config.num_key_value_heads)
            writer.add_tensor(ours, np.ascontiguousarray(value))
        if edit is not None:
            edit(writer)
        finish(writer)

    return export


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(path: Path) -> Path:
    """The folder with configuration and tokenizer of a GGUF file, beside it."""
    folder = path.with_suffix("")
    folder.mkdir()
    write_gguf_folder(path, folder)
    return folder


def tensors_of(
    folder: Path, gguf: Path | None = None, dtype: DType | None = DType.FLOAT32
) -> dict[str, Tensor | QuantizedRows]:
    """What a network is given of a folder's safetensors, or of a GGUF file, under its own names."""
    config = read_model_config(folder)
    network = build_without_weights(config, "float32")
    shapes = network.tensor_shapes()
    pairs: Pairs = read_safetensors(folder)
    if gguf is not None:
        pairs = GGUFCheckpoint(gguf, config, shapes).read(shapes, network.checkpoint_map, dtype)
    for entry in network.checkpoint_map:
        pairs = entry.apply(pairs, shapes)
    tensors = {name: to_torch(tensor) if isinstance(tensor, np.ndarray) else tensor for name, tensor in pairs}
    assert tensors.keys() == shapes.keys()
    return tensors


def values_of(tensor: Tensor | QuantizedRows) -> Tensor:
    """The values of a matrix in either form."""
    return to_torch(tensor.dequantize()) if isinstance(tensor, GGUFRows) else tensor  # type: ignore[return-value]


@pytest.fixture
def tiny_llama() -> Callable[..., Path]:
    """Writes a one-layer llama GGUF file whose matrices have the given type; anything of it can be changed."""

    def make(
        path: Path,
        kind: Q = Q.F32,
        *,
        seed: int = 0,
        tensors: dict[str, tuple[np.ndarray, Q] | None] | None = None,
        keys: dict[str, Any] | None = None,
        pre: str = "gpt-2",
        **tokenizer: Any,
    ) -> Path:
        rng = np.random.default_rng(seed)
        hidden, inner, heads, kv = 256, 512, 4, 2
        writer = gguf.GGUFWriter(path, (keys or {}).get("general.architecture", "llama"))
        numbers: dict[str, Any] = {
            "block_count": 1,
            "context_length": 128,
            "embedding_length": hidden,
            "feed_forward_length": inner,
            "attention.head_count": heads,
            "attention.head_count_kv": kv,
        }
        extra = {k: v for k, v in (keys or {}).items() if k != "general.architecture"}
        for key, value in ({f"llama.{k}": v for k, v in numbers.items()} | extra).items():
            if isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, list):
                writer.add_array(key, value)
            elif value is not None:
                (writer.add_int32 if value < 0 else writer.add_uint32)(key, value)
        writer.add_layer_norm_rms_eps(1e-5)
        vocab = add_tokenizer(writer, pre, **tokenizer)
        shapes = {
            "token_embd.weight": (vocab, hidden),
            "blk.0.attn_q.weight": (hidden, hidden),
            "blk.0.attn_k.weight": (hidden // heads * kv, hidden),
            "blk.0.attn_v.weight": (hidden // heads * kv, hidden),
            "blk.0.attn_output.weight": (hidden, hidden),
            "blk.0.ffn_gate.weight": (inner, hidden),
            "blk.0.ffn_up.weight": (inner, hidden),
            "blk.0.ffn_down.weight": (hidden, inner),
        }
        content: dict[str, tuple[np.ndarray, Q] | None] = {
            name: (random_blocks(rng, kind, *shape), kind) for name, shape in shapes.items()
        }
        for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
            content[name] = (rng.standard_normal(hidden, dtype=np.float32), Q.F32)
        for name, entry in (content | (tensors or {})).items():
            if entry is not None:
                data, raw = entry
                writer.add_tensor(name, data, raw_dtype=None if data.dtype == np.float32 else raw)
        finish(writer)
        return path

    return make
