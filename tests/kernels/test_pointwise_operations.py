"""Norms, embeddings and the soft cap as operations of each backend, against float64."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.interface import AttentionTemperature, Xielu
from octavo.kernels.reference import ReferenceKernels
from tests.kernels import torch_facade

BACKENDS: dict[str, Any] = {"reference": lambda: torch_facade.of_torch(ReferenceKernels())}
for name, module, made in (
    ("cpu", "octavo.kernels.cpu.backend", lambda m: torch_facade.make_kernels),
    ("triton", "octavo.kernels.triton.backend", lambda m: lambda: torch_facade.of_torch(m.TritonKernels("cpu"))),
):
    try:
        BACKENDS[name] = made(importlib.import_module(module))
    except ImportError:
        continue
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=BACKENDS)
def kernels(request: pytest.FixtureRequest) -> Any:
    return BACKENDS[request.param]()


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(kernels: Any, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(5, 4, 36), torch.randn(36), torch.randn(36)
    heads = x[:, 1:3]
    wide = F.rms_norm(heads.double(), (36,), weight.double(), 1e-5)
    assert_near(kernels.rms_norm(heads, weight, 1e-5, out_dtype=dtype), wide, dtype)
    for shift in (bias, None):
        expected = F.layer_norm(heads.double(), (36,), weight.double(), None if shift is None else shift.double(), 1e-5)
        assert_near(kernels.layer_norm(heads, weight, shift, 1e-5, out_dtype=dtype), expected, dtype)
    halves = weight.bfloat16()
    assert kernels.layer_norm(x, halves, None, 1e-5).dtype == torch.bfloat16


def test_a_norm_is_added_to_the_residual_stream(kernels: Any) -> None:
    x, weight, residual = torch.randn(5, 36), torch.randn(36).bfloat16(), torch.randn(5, 36)
    expected = residual.double() + F.rms_norm(x.double(), (36,), weight.double(), 1e-5)
    assert_near(kernels.rms_norm(x, weight, 1e-5, add=residual.clone()), expected, torch.float32)


def test_embeddings_are_scaled_and_added(kernels: Any) -> None:
    table, residual = torch.randn(9, 20).bfloat16(), torch.randn(3, 20)
    ids = torch.tensor([0, 6, 3])
    assert torch.equal(kernels.embedding(ids, table, scale=2.5), table[ids].float() * 2.5)
    # Positions of a table that begins before position 0.
    assert torch.equal(kernels.embedding(ids, table, -2, add=residual.clone()), residual + table[ids + 2].float())


def test_ids_outside_the_embedding_have_zeros(kernels: Any) -> None:
    table, residual = torch.randn(4, 20).bfloat16(), torch.randn(5, 20)
    ids, inside = torch.tensor([6, 10, 9, 2, 14]), torch.tensor([True, False, True, False, False])
    expected = torch.where(inside[:, None], table[(ids - 6).clamp(0, 3)].float() * 0.3, 0.0)
    assert torch.equal(kernels.embedding(ids, table, 6, scale=0.3), expected)
    assert torch.equal(kernels.embedding(ids, table, 6, scale=0.3, add=residual.clone()), residual + expected)


def test_ids_outside_the_embedding_may_have_a_row_of_it(kernels: Any) -> None:
    table, ids = torch.randn(4, 20).bfloat16(), torch.tensor([6, 10, 9, 2, 14])
    rows = torch.tensor([0, 3, 3, 3, 3])
    assert torch.equal(kernels.embedding(ids, table, 6, scale=0.5, otherwise=3), table[rows].float() * 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_and_activations_in_place(kernels: Any, dtype: torch.dtype) -> None:
    x, factors, bias = torch.randn(5, 40).to(dtype), torch.randn(5, 90), torch.randn(40)
    expected = x.double() * factors[:, 7:47].double()
    assert_near(kernels.multiply(x.clone(), factors[:, 7:47]), expected, dtype)
    expected = x.double() * factors[2, :40].double() + bias.double()
    assert_near(kernels.multiply(x.clone(), factors[2, :40].clone(), bias), expected, dtype)
    changed = x.clone()
    result = kernels.activate(changed, "gelu_tanh")
    assert_near(result, F.gelu(x.double(), approximate="tanh"), dtype)
    assert torch.equal(changed, result)


def test_soft_cap(kernels: Any) -> None:
    x = torch.tensor([[-1e30, -40.0, -1e-3, 0.0, 2.0, 25.0, 80.0, float("inf")]]).repeat(3, 5)
    expected = 30 * torch.tanh(x.double() / 30)
    torch.testing.assert_close(kernels.soft_cap(x.clone(), 30.0).double(), expected, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamp(kernels: Any, dtype: torch.dtype) -> None:
    """Of some columns, in place; NaN stays."""
    x = (3 * torch.randn(5, 40)).to(dtype)
    x[2, 7] = float("nan")
    expected = x.clone()
    expected[:, 3:37] = x[:, 3:37].clamp(-1.5, 1.5)
    kernels.clamp(x[:, 3:37], 1.5)
    assert torch.equal(x.nan_to_num(9.0), expected.nan_to_num(9.0))
    kernels.clamp(x[:, 3:37], 0.5, -0.25)
    expected[:, 3:37] = expected[:, 3:37].clamp(-0.25, 0.5)
    assert torch.equal(x.nan_to_num(9.0), expected.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_with_a_weight_for_each_head(kernels: Any, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 4, 36), torch.randn(2, 36)
    heads = x[:, 1:3]
    expected = F.rms_norm(heads.double(), (36,), None, 1e-5) * weight.double()
    assert_near(kernels.rms_norm(heads, weight, 1e-5, out_dtype=dtype), expected, dtype)
    expected = F.layer_norm(heads.double(), (36,), None, None, 1e-5) * weight.double()
    assert_near(kernels.layer_norm(heads, weight, None, 1e-5, out_dtype=dtype), expected, dtype)


def test_scale(kernels: Any) -> None:
    x = torch.randn(3, 45)
    assert torch.equal(kernels.scale(x.clone(), 0.3), x * 0.3)


def test_xielu(kernels: Any) -> None:
    """Near 0 on the negative side, the function is a difference of nearly equal numbers."""
    x = torch.tensor([[-1e30, -90.0, -1.01, -0.99, -1e-3, -1e-6, -1e-7, 0.0, 1e-7, 2.0, 25.0]]).repeat(3, 5)
    positive, negative, beta, eps = 1.3, 0.9, 0.5, -1e-6
    wide = x.double()
    below = (torch.expm1(wide.clamp(max=eps)) - wide) * negative + beta * wide
    expected = torch.where(wide > 0, positive * wide * wide + beta * wide, below)
    found = kernels.xielu(x.clone(), Xielu(positive, negative, beta, eps)).double()
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_are_scaled_by_their_positions(kernels: Any, dtype: torch.dtype) -> None:
    rows, positions = torch.randn(6, 5, 24).to(dtype), torch.tensor([0, 6, 7, 8, 100, 4095])
    for offset in (0, 1):
        periods = torch.div(positions + offset, 8, rounding_mode="floor").double()
        expected = rows[:, 1:4].double() * (1 + 0.1 * torch.log(1 + periods))[:, None, None]
        queries = rows.clone()[:, 1:4]
        found = kernels.scale_queries(queries, positions, AttentionTemperature(0.1, 8, offset))
        assert_near(found, expected, dtype)
        assert torch.equal(found[:1], rows[:1, 1:4]), "a factor of 1 changes no bit"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_without_a_cache(kernels: Any, dtype: torch.dtype) -> None:
    rows, positions = torch.randn(4, 5, 24).to(dtype), torch.tensor([3, 0, 7, 2])
    angles = torch.rand(8, 8).double()
    table = torch.cat((angles.cos(), angles.sin()), dim=1).float()  # 16 of 24 dimensions
    wide, cos, sin = rows.double(), angles.cos()[positions][:, None], angles.sin()[positions][:, None]
    first, second = wide[..., :8], wide[..., 8:16]
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin, wide[..., 16:]), dim=-1)
    q, k = kernels.rotary(rows.clone()[:, :3], rows.clone()[:, 3:], positions, table)
    assert_near(q.contiguous(), expected[:, :3], dtype)
    assert_near(k.contiguous(), expected[:, 3:], dtype)


def test_products_of_a_float32_stream_with_narrow_weights(kernels: Any) -> None:
    x, weight = torch.randn(5, 32), torch.randn(16, 32).bfloat16()
    product = kernels.pack([weight])(x, torch.bfloat16)
    assert_near(product, x.bfloat16().double() @ weight.double().T, torch.bfloat16)
