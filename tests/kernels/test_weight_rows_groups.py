"""Integers in groups: their values, their shares, and the formats that the CPU kernels make of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.kernels.cpu.backend import CpuKernels
from octavo.kernels.cpu.linear import group_codes, group_format
from octavo.kernels.weight_rows import GroupQuantizedRows
from octavo.layers.layer import LayerContext
from octavo.layers.linear import RowParallelLinear
from octavo.models.checkpoint import Split
from tests.kernels.quantized_codes import dequantize_codes


def random_rows(
    bits: int, n: int, k: int, group: int, *, symmetric: bool = True, dtype: DType = DType.FLOAT16
) -> GroupQuantizedRows:
    random = np.random.default_rng(bits + group)
    codes, zeros = (random.integers(0, 2**bits, (n, columns), np.uint8) for columns in (k, k // group))
    scales = (random.random((n, k // group), np.float32) * np.float32(0.01) + np.float32(0.001)).astype(dtype.numpy)
    return GroupQuantizedRows(bits, codes, scales, None if symmetric else zeros)


def exact(rows: GroupQuantizedRows) -> np.ndarray:
    """The values in float64."""
    n, k = rows.shape
    zeros = np.full((n, k), 2 ** (rows.bits - 1)) if rows.zeros is None else rows.zeros.repeat(rows.group, 1)
    return (rows.codes.astype(np.float64) - zeros) * rows.scales.astype(np.float64).repeat(rows.group, 1)


SYMMETRIC = [
    (4, 128, DType.FLOAT16, "q4_128"),
    (4, 256, DType.BFLOAT16, "q4_128"),
    (4, 64, DType.FLOAT16, "q4_32"),
    (4, 32, DType.BFLOAT16, "q4_32"),
    (8, 128, DType.FLOAT16, "q8_128"),
    (8, 32, DType.FLOAT16, "q8_32"),
    (8, 512, DType.FLOAT32, "q8_channel"),
]


@pytest.mark.parametrize(("bits", "group", "dtype", "form"), SYMMETRIC)
def test_symmetric_groups_keep_their_values(bits: int, group: int, dtype: DType, form: str) -> None:
    rows = random_rows(bits, 20, 512, group, dtype=dtype)
    codes = group_codes(rows)
    assert codes.format == form == group_format(rows)
    assert np.allclose(dequantize_codes(codes), exact(rows), rtol=1e-7, atol=0)
    assert np.allclose(rows.dequantize(), exact(rows), rtol=1e-7, atol=0)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_zeros_become_minima_nearer_to_the_values_than_bfloat16_is(group: int) -> None:
    rows = random_rows(4, 40, 512, group, symmetric=False)
    codes = group_codes(rows)
    assert codes.format == "q4_1"
    steps = rows.scales.astype(np.float64).repeat(group, 1)
    errors = np.abs(dequantize_codes(codes).astype(np.float64) - exact(rows)) / steps
    rounded = np.abs(rows.dequantize(DType.BFLOAT16).astype(np.float64) - exact(rows)) / steps
    assert errors.max() <= 15 * 2.0**-11 * 1.001
    assert np.sqrt((errors**2).mean()) < 0.3 * np.sqrt((rounded**2).mean())


@pytest.mark.parametrize(
    "rows",
    [
        random_rows(4, 8, 128, 16),
        random_rows(8, 8, 128, 32, symmetric=False),
        dataclasses.replace(random_rows(4, 8, 128, 32), scales=np.full((8, 4), 1e6, np.float32)),
        dataclasses.replace(random_rows(4, 8, 128, 32), scales=np.full((8, 4), 3.3e-7, np.float32)),
    ],
    ids=["16", "8 bits with zeros", "too great", "too small"],
)
def test_what_the_kernels_do_not_have_is_known_before_it_is_packed(rows: GroupQuantizedRows) -> None:
    assert not CpuKernels().has_products(rows)
    with pytest.raises(ConfigError, match="quantization='none'"):
        CpuKernels().pack([rows], dtype=DType.FLOAT32)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_share_of_the_columns_may_divide_a_group(symmetric: bool) -> None:
    rows = random_rows(4, 10, 256, 128, symmetric=symmetric)
    for columns in (slice(0, 128), slice(64, 128), slice(96, 256), slice(None)):
        share = rows.take(slice(2, 9), columns)
        assert np.array_equal(share.dequantize(), rows.dequantize()[2:9, columns])
        assert group_format(share) is not None
    whole = random_rows(8, 10, 96, 96).take(slice(None), slice(40, 96))
    assert whole.group == 56 and group_format(whole) == "q8_channel"


def test_ranks_add_up_to_the_product() -> None:
    """Row-parallel ranks hold shares of the columns, each of half a group."""
    rows = random_rows(4, 48, 128, 128)
    x = np.random.default_rng(0).standard_normal((3, 128), np.float32)
    total: Any = 0
    for rank in range(2):
        kernels = CpuKernels()
        context = LayerContext(kernels, DType.FLOAT32, quantization="gptq-int4", tp_rank=rank, tp_size=2)
        layer = RowParallelLinear(context, 128, 48, bias=False)
        layer.load("weight", rows)
        assert [part.format for part in layer.packed.parts] == ["q4_32"]  # type: ignore[attr-defined]
        share = kernels.array(x[:, rank * 64 : rank * 64 + 64])
        total += kernels.to_numpy(layer.packed(share, DType.FLOAT32))
    want = x.astype(np.float64) @ exact(rows).T
    assert np.linalg.norm(total - want) < 0.01 * np.linalg.norm(want)


def test_rows_are_split_in_their_own_bits() -> None:
    rows = random_rows(4, 30, 64, 32, symmetric=False)
    shapes = {"a.q_proj.weight": (10, 64), "a.k_proj.weight": (20, 64)}
    parts: Any = dict(Split("qk", ("q_proj", "k_proj")).apply([("a.qk.weight", rows)], shapes))
    assert {type(part) for part in parts.values()} == {GroupQuantizedRows}
    assert np.array_equal(parts["a.k_proj.weight"].dequantize(), rows.dequantize()[10:])
