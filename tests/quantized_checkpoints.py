"""Writes quantised checkpoints in the published layouts; every packer is written from its format alone.

A packer takes a matrix [N, K] and gives the tensors of the checkpoint, by the part of their name after the matrix's,
and the values that they stand for, in float64.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Packed = tuple[dict[str, torch.Tensor], NDArray[np.float64]]
Packer = Callable[[NDArray[np.float32]], Packed]

#: Which of 8 columns lies in the lowest 4 bits of a word of AWQ, which in the next.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(values: NDArray[Any], bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Integers [A, B] packed along B in int32 [A, ceil(B * bits / 32)], the first in the lowest bits."""
    rows, columns = values.shape
    count = 32 // bits
    packed = np.zeros((rows, -(-columns // count)), dtype=np.uint32)
    for word in range(packed.shape[1]):
        for i in range(count):
            column = word * count + (order[i] if order else i)
            if column < columns:
                packed[:, word] |= values[:, column].astype(np.uint32) << np.uint32(bits * i)
    return torch.from_numpy(packed.view(np.int32))


def quantize(
    weight: NDArray[np.float32], bits: int, group_of: NDArray[Any], symmetric: bool, scale_type: torch.dtype
) -> tuple[NDArray[Any], torch.Tensor, NDArray[Any], NDArray[np.float64]]:
    """Codes [N, K], scales [N, groups] in their type, zeros [N, groups], and the values (code - zero) * scale."""
    n, k = weight.shape
    groups = int(group_of.max()) + 1
    top = 2**bits - 1
    scales = torch.zeros(n, groups, dtype=scale_type)
    zeros = np.zeros((n, groups), dtype=np.int64)
    codes = np.zeros((n, k), dtype=np.int64)
    values = np.zeros((n, k))
    for group in range(groups):
        mine = group_of == group
        part = weight[:, mine].astype(np.float64)
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scales[:, group] = torch.from_numpy(np.abs(part).max(1) * 2 if symmetric else high - low) / top
        scale = scales[:, group].double().numpy()
        zeros[:, group] = 2 ** (bits - 1) if symmetric else np.rint(-low / scale)
        zero = zeros[:, group, None]
        codes[:, mine] = np.clip(np.rint(part / scale[:, None]) + zero, 0, top)
        values[:, mine] = (codes[:, mine] - zero) * scale[:, None]
    return codes, scales, zeros, values


def gptq(
    weight: NDArray[np.float32],
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    version: int = 1,
    order: NDArray[Any] | None = None,
) -> Packed:
    """``order``: the columns in the order in which groups were made of them (act-order)."""
    k = weight.shape[1]
    group_of = np.arange(k) // (k if group == -1 else group)
    if order is not None:
        group_of = group_of[np.argsort(order)]
    codes, scales, zeros, values = quantize(weight, bits, group_of, symmetric, torch.float16)
    stored = words(zeros.T, bits)
    if version == 1:  # whole words minus one in each place, as GPTQModel converts
        one = sum(1 << shift for shift in range(0, 32, bits))
        stored = torch.from_numpy((stored.numpy().view(np.uint32) - np.uint32(one)).view(np.int32))
    tensors = {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": stored,
        "scales": scales.t().contiguous(),
        "g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }
    return tensors, values


def awq(weight: NDArray[np.float32], group: int = 32, scale_type: torch.dtype = torch.float16) -> Packed:
    group_of = np.arange(weight.shape[1]) // group
    codes, scales, zeros, values = quantize(weight, 4, group_of, False, scale_type)
    tensors = {
        "qweight": words(codes.T, 4, AWQ_ORDER),
        "qzeros": words(zeros.T, 4, AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }
    return tensors, values


def pack_quantized(
    weight: NDArray[np.float32],
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    order: NDArray[Any] | None = None,
    scale_type: torch.dtype = torch.bfloat16,
) -> Packed:
    n, k = weight.shape
    group_of = np.arange(k) // (k if group == -1 else group)
    if order is not None:
        group_of = group_of[np.argsort(order)]
    codes, scales, zeros, values = quantize(weight, bits, group_of, symmetric, scale_type)
    tensors = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor([n, k])}
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.T, bits).t().contiguous()
    if order is not None:
        tensors["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    return tensors, values


def int_quantized(weight: NDArray[np.float32], symmetric: bool = True) -> Packed:
    group_of = np.zeros(weight.shape[1], dtype=np.int64)
    codes, scales, zeros, values = quantize(weight, 8, group_of, symmetric, torch.float32)
    tensors = {"weight": torch.from_numpy((codes - 128).astype(np.int8)), "weight_scale": scales}
    tensors["input_scale"] = torch.ones(1)
    if not symmetric:
        tensors["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8))
    return tensors, values


def fp8(weight: NDArray[np.float32], block: tuple[int, int] | None, name: str, per_row: bool = False) -> Packed:
    """Scales of blocks, of rows, or of the matrix."""
    n, k = weight.shape
    rows, columns = block or ((1, k) if per_row else (n, k))
    scales = torch.zeros(-(-n // rows), -(-k // columns))
    stored = torch.zeros(n, k).to(torch.float8_e4m3fn)
    values = np.zeros((n, k))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = float(np.abs(weight[at]).max()) / 448
            stored[at] = (torch.from_numpy(weight[at].copy()) / scales[i, j]).to(torch.float8_e4m3fn)
            values[at] = stored[at].float().double().numpy() * float(scales[i, j])
    if block is None and not per_row:
        scales = scales.reshape(())
    return {"weight": stored, name: scales, "input_scale": torch.ones(1)}, values


#: The values of e2m1 without a sign, by code.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def mxfp4(weight: NDArray[np.float32]) -> Packed:
    """Blocks of 32 values with a power of two, as gpt-oss has them: names end with _blocks and _scales."""
    n, k = weight.shape
    groups = weight.astype(np.float64).reshape(n, k // 32, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(2))) - 2
    scaled = groups / 2.0 ** exponents[..., None]
    codes = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(3)
    values = np.sign(scaled) * E2M1[codes] * 2.0 ** exponents[..., None]
    codes |= (scaled < 0) << 3
    pairs = codes.reshape(n, k // 32, 16, 2)
    blocks = (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)
    scales = (exponents + 127).astype(np.uint8)
    return {"_blocks": torch.from_numpy(blocks), "_scales": torch.from_numpy(scales)}, values.reshape(n, k)


def write(
    source: Path,
    folder: Path,
    quantization: dict[str, Any],
    pack: Packer,
    plain: tuple[str, ...] = (),
    edit: Callable[[dict[str, torch.Tensor]], None] | None = None,
    files: int = 1,
) -> dict[str, torch.Tensor]:
    """Writes the checkpoint of ``source`` to ``folder`` with quantised matrices; returns the values of all tensors.

    Args:
        plain: parts of names of matrices that stay as they are.
        edit: changes the tensors before they are written.
        files: into which parts are spread, so that those of one matrix lie in several.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*.json"):
        shutil.copy(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        is_matrix = tensor.dim() == 2 and "embed" not in name and "lm_head" not in name
        if not is_matrix or any(part in name for part in plain):
            tensors[name] = values[name] = tensor
            continue
        parts, exact = pack(tensor.float().numpy())
        stem = name.removesuffix(".weight")
        tensors |= {f"{stem}{part if part[0] == '_' else f'.{part}'}": value for part, value in parts.items()}
        values[name] = torch.from_numpy(exact).float()
    if edit is not None:
        edit(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return values
    names = sorted(tensors, key=lambda name: name[::-1])  # all of one part, then all of the next
    weight_map: dict[str, str] = {}
    for i in range(files):
        mine = names[i::files]
        weight_map |= dict.fromkeys(mine, f"model-{i}.safetensors")
        save_file({name: tensors[name] for name in mine}, folder / f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return values
