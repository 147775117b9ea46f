"""Converts a GGUF file to a Hugging Face style folder: dequantized weights in transformers' names and layouts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES

from octavo.core.errors import UnsupportedModelError, WeightError
from octavo.kernels.gguf_rows import GGUFRows
from octavo.loader.gguf_config import ROPE_FACTORS, generation_config, model_config
from octavo.loader.gguf_file import GGUFFile, GGUFTensor
from octavo.loader.gguf_tokenizer import write_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

_SAFETENSORS = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}


@dataclass(frozen=True)
class _Weight:
    """A tensor with its name and shape in transformers."""

    name: str
    shape: tuple[int, ...]
    source: GGUFTensor
    #: Rows per head, if the rows of each head must be reordered, else 0.
    head_rows: int = 0


def convert_gguf(path: Path, folder: Path, dtype: str) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer's files into ``folder``.

    Args:
        path: the GGUF file.
        folder: exists and is empty.
        dtype: float32 (exactly the dequantized values) or bfloat16 (these, rounded to nearest even).

    Raises:
        WeightError: the file is damaged, or a tensor is missing or of the wrong shape.
        UnsupportedModelError: its architecture, a setting, a tensor type or a tensor is not supported.
        TokenizerError: its tokenizer is incomplete or of an unknown kind.
    """
    file = GGUFFile(path)
    config = model_config(file, dtype)
    weights = _weights(file, config)
    write_tokenizer(file, folder, config["vocab_size"])
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(file))
    _write_safetensors(folder / "model.safetensors", file, weights, dtype)


def read_gguf(path: Path) -> Iterator[tuple[str, Tensor | GGUFRows]]:
    """The (name, tensor) pairs of a GGUF file, with transformers' names and layouts.

    Quantised matrices come in the file's blocks, everything else in float32.

    Raises:
        As ``convert_gguf``.
    """
    import torch

    file = GGUFFile(path)
    for weight in _weights(file, model_config(file, "float32")):
        kind = weight.source.type
        block = GGML_QUANT_SIZES[kind][0]
        if block > 1 and len(weight.shape) == 2:
            rows = file.read_rows(weight.source)
            rows = _deinterleave(rows, weight.head_rows) if weight.head_rows else rows
            yield weight.name, GGUFRows(kind.name, rows, weight.shape[1], block)
        else:
            values = np.concatenate([piece.reshape(-1) for piece in _pieces(file, weight)])
            yield weight.name, torch.from_numpy(values.reshape(weight.shape))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def _weights(file: GGUFFile, config: dict[str, Any]) -> list[_Weight]:
    """All tensors of the network.

    Raises:
        WeightError: one is missing, unexpected or of the wrong shape.
    """
    weights = []
    for source, name, shape, head_rows in _expected(config):
        tensor = file.tensors.get(source)
        if tensor is None:
            raise WeightError(f"{file.path} has no tensor {source!r}")
        if tensor.shape != shape:
            raise WeightError(f"{file.path}: tensor {source!r} has shape {list(tensor.shape)}, expected {list(shape)}")
        weights.append(_Weight(name, shape, tensor, head_rows))
    if unknown := file.tensors.keys() - {w.source.name for w in weights} - {ROPE_FACTORS}:
        raise UnsupportedModelError(
            f"{file.path} has tensors that a {config['model_type']} model does not: {', '.join(sorted(unknown)[:5])}"
        )
    return weights


def _expected(config: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """(GGUF name, transformers' name, shape, rows per head to reorder or 0) of every tensor."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    # Files of this architecture hold q and k with the two halves of each head interleaved, for another rotation.
    interleaved = head if config["model_type"] == "llama" else 0
    linears = [
        ("attn_q", "self_attn.q_proj", (q, hidden), interleaved),
        ("attn_k", "self_attn.k_proj", (kv, hidden), interleaved),
        ("attn_v", "self_attn.v_proj", (kv, hidden), 0),
        ("attn_output", "self_attn.o_proj", (hidden, q), 0),
        ("ffn_gate", "mlp.gate_proj", (inner, hidden), 0),
        ("ffn_up", "mlp.up_proj", (inner, hidden), 0),
        ("ffn_down", "mlp.down_proj", (hidden, inner), 0),
    ]
    norms = [("attn_norm", "input_layernorm", hidden), ("ffn_norm", "post_attention_layernorm", hidden)]
    if config["model_type"] == "qwen3":
        norms += [("attn_q_norm", "self_attn.q_norm", head), ("attn_k_norm", "self_attn.k_norm", head)]
    biased = _biased(config)

    yield "token_embd.weight", "model.embed_tokens.weight", (config["vocab_size"], hidden), 0
    for i in range(config["num_hidden_layers"]):
        for source, name, shape, head_rows in linears:
            yield f"blk.{i}.{source}.weight", f"model.layers.{i}.{name}.weight", shape, head_rows
            if source in biased:
                yield f"blk.{i}.{source}.bias", f"model.layers.{i}.{name}.bias", shape[:1], head_rows
        for source, name, size in norms:
            yield f"blk.{i}.{source}.weight", f"model.layers.{i}.{name}.weight", (size,), 0
    yield "output_norm.weight", "model.norm.weight", (hidden,), 0
    if not config["tie_word_embeddings"]:
        yield "output.weight", "lm_head.weight", (config["vocab_size"], hidden), 0


def _biased(config: dict[str, Any]) -> set[str]:
    """The linear layers with a bias."""
    biased: set[str] = set()
    if config["model_type"] == "qwen2":
        biased |= {"attn_q", "attn_k", "attn_v"}
    if config.get("attention_bias"):
        biased |= {"attn_q", "attn_k", "attn_v", "attn_output"}
    if config.get("mlp_bias"):
        biased |= {"ffn_gate", "ffn_up", "ffn_down"}
    return biased


def _write_safetensors(path: Path, file: GGUFFile, weights: list[_Weight], dtype: str) -> None:
    """Streams the tensors to disk: the safetensors library needs all of them in memory at once.

    Format: 8 bytes with the header's length, the header in JSON, the data in the header's order.
    """
    code, size = _SAFETENSORS[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight in weights:
        end = offset + int(np.prod(weight.shape, dtype=object)) * size
        header[weight.name] = {"dtype": code, "shape": list(weight.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for weight in weights:
            for piece in _pieces(file, weight):
                out.write(_encoded(piece, dtype).data)


def _pieces(file: GGUFFile, weight: _Weight) -> Iterator[np.ndarray]:
    if not weight.head_rows:
        yield from file.read_pieces(weight.source)
    elif len(weight.shape) == 1:  # a bias is one row of the file: its values are reordered
        bias = np.concatenate([piece.ravel() for piece in file.read_pieces(weight.source)])
        yield _deinterleave(bias[:, None], weight.head_rows)
    else:
        for piece in file.read_pieces(weight.source, group=weight.head_rows):
            yield _deinterleave(piece, weight.head_rows)


def _deinterleave(rows: np.ndarray, head_rows: int) -> np.ndarray:
    """Rows 0, 2, 4, … of each head, then rows 1, 3, 5, …"""
    columns = rows.shape[1]
    heads = rows.reshape(-1, head_rows // 2, 2, columns).swapaxes(1, 2)
    return np.ascontiguousarray(heads).reshape(-1, columns)


def _encoded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Contiguous little-endian values as bytes: float32 as they are, or bfloat16 (uint16)."""
    if dtype == "float32":
        return np.ascontiguousarray(values, dtype="<f4")
    import torch

    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().astype("<i2", copy=False)
