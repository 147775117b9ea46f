"""Quantisation of weights to 8 or 4 bits, at load, in the layouts of ``quant``.

======  ====================================================================  =============
kind    value of a weight                                                     bits per weight
======  ====================================================================  =============
int8    code in -127 .. 127 times a float32 scale of its row                  8 + 32 / K
fp8     an e4m3 number times such a scale                                     8 + 32 / K
int4    code in -8 .. 7 times a float32 scale of 128 or 32 consecutive K      4.25 or 5
======  ====================================================================  =============

Codes are stored in blocks of 128 inputs, [K / 128, N, 128 codes], so that the reads of a program are contiguous.
In a block they are packed in 16-bit words by halves or, 4 bits, by quarters: word j holds the codes of inputs j and
j + 64, or j, j + 32, j + 64 and j + 96, from the low bits up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.core.errors import ConfigError, WeightError

#: Outputs and inputs are padded to multiples of these with zeros: the product's loads of weights have no edges.
COLUMNS = 128
BLOCK = 128

#: Where the greatest magnitude of a group may be put among the 16 codes.
_TARGETS = (-8.5, -8.0, -7.5, -7.0, -6.5, -6.0, 6.0, 6.5, 7.0, 7.5)
#: A group or row whose greatest magnitude is below this counts as zeros: its inverse must be finite.
_LEAST = 1e-30
#: Tiles of rows up to which a product may be cut into pieces of K.
_ROW_TILES = 8
#: Weights that are quantised at once: float32 copies of them are made.
_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class TritonQuantizedLinear:
    """A quantised weight [N, K] with its bias."""

    #: "int8", "int4" or "fp8".
    kind: str
    #: N and K.
    outputs: int
    inputs: int
    #: Consecutive inputs that share a scale; 0: the whole row.
    group: int
    #: int16 [K padded / 128, N padded, 64 words, or 32 of 4-bit codes].
    codes: Tensor
    #: float32 [N padded]; int4: float32 [K padded / group, N padded].
    scales: Tensor
    #: [N] or none.
    bias: Tensor | None
    #: int32, zero between products: number of finished pieces of each tile of the output.
    arrivals: Tensor


def quantize(weight: Tensor, kind: str, bias: Tensor | None = None, group: int | None = None) -> TritonQuantizedLinear:
    """Quantises a floating-point weight [N, K] on its device.

    8 bits: the scale is the greatest magnitude of the row / 127 (fp8: 448). int4: of ten scales for a group, the one
    with the least squared error.

    Args:
        weight: float32, bfloat16 or float16.
        kind: "int8", "int4" or "fp8".
        bias: [N]; kept as it is.
        group: int4 only: weights that share a scale, 128 or 32; default: 128 if K is a multiple of it, else 32.

    Raises:
        ConfigError: an unknown kind or group, K is no multiple of the group, or fp8 on a GPU that has none.
        WeightError: a weight is infinite or not a number.
    """
    outputs, inputs = weight.shape
    if kind == "int4":
        group = group or (128 if inputs % 128 == 0 else 32)
        if group not in (32, 128) or inputs % group:
            raise ConfigError(f"int4 in groups of {group} (of 32 or 128) needs inputs in multiples of it, not {inputs}")
        encode: Callable[[Tensor], tuple[Tensor, Tensor]] = partial(_int4, group=group)
    elif kind in ("int8", "fp8") and group is None:
        encode = _int8 if kind == "int8" else _fp8
    else:
        raise ConfigError(f"quantization {kind!r} with group {group!r}: expected int8, fp8 or int4 (group 32 or 128)")
    if kind == "fp8":
        _check_fp8(weight.device)
    parts = [encode(part) for part in _padded_parts(weight)]
    codes = torch.cat([part[0] for part in parts], dim=1)
    scales = torch.cat([part[1] for part in parts], dim=-1)
    if not scales.isfinite().all():
        raise WeightError("a weight is infinite, not a number, or too great to be quantised")
    arrivals = torch.zeros(_ROW_TILES * codes.shape[1] // COLUMNS, dtype=torch.int32, device=weight.device)
    return TritonQuantizedLinear(kind, outputs, inputs, group or 0, codes, scales, bias, arrivals)


def _padded_parts(weight: Tensor) -> Iterator[Tensor]:
    """Slices of rows in float32, padded with zeros."""
    rows = max(COLUMNS, _AT_ONCE // max(1, weight.shape[1]) // COLUMNS * COLUMNS)
    for part in weight.split(rows):
        yield F.pad(part.float(), (0, -part.shape[1] % BLOCK, 0, -part.shape[0] % COLUMNS))


def _in_blocks(codes: Tensor) -> Tensor:
    """[N, K] to [K / 128, N, 128]."""
    return codes.view(codes.shape[0], -1, BLOCK).transpose(0, 1)


def _over_row_scales(weight: Tensor, greatest: float) -> tuple[Tensor, Tensor]:
    """Weights over the scales of their rows, in -greatest .. greatest, and those scales."""
    magnitude = weight.abs().amax(1)
    # NaN and infinity do not count as zero in this comparison.
    scales = torch.where(magnitude < _LEAST, 0.0, magnitude / greatest)
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    return (weight * inverse[:, None]).clamp_(-greatest, greatest), scales


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = _over_row_scales(weight, 127.0)
    return _words_of_bytes(codes.round_().nan_to_num_().to(torch.int8)), scales


def _fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = _over_row_scales(weight, 448.0)
    return _words_of_bytes(codes.to(torch.float8_e4m3fn).view(torch.int8)), scales


def _words_of_bytes(codes: Tensor) -> Tensor:
    halves = _in_blocks(codes).unflatten(2, (2, -1))
    return halves.transpose(2, 3).contiguous().view(torch.int16).squeeze(3)


def _int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """For given codes q the best scale is sum(w q) / sum(q q); it leaves the error sum(w w) - sum(w q)^2 / sum(q q)."""
    groups = weight.view(weight.shape[0], -1, group)
    magnitudes, where = groups.abs().max(2)
    extreme = groups.gather(2, where[..., None])
    best_gain = torch.zeros_like(magnitudes)
    scales = torch.where(magnitudes.isfinite(), 0.0, float("nan"))
    for target in _TARGETS:
        codes = (groups * (target / extreme)).round_().clamp_(-8, 7)
        product, square = (groups * codes).sum(2), codes.square().sum(2)
        gain = product * product / square
        better = (gain > best_gain) & (magnitudes >= _LEAST)
        best_gain = torch.where(better, gain, best_gain)
        scales = torch.where(better, product / square, scales)
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    codes = ((groups * inverse[..., None]).round_().clamp_(-8, 7) + 8).nan_to_num_().to(torch.int16)
    first, second, third, fourth = _in_blocks(codes.flatten(1)).split(BLOCK // 4, dim=2)
    return first | second << 4 | third << 8 | fourth << 12, scales.t()


def _check_fp8(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"fp8 needs a GPU of compute capability 8.9 or newer; {name} is older: use int8")
