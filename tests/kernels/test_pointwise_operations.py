"""Norms, embeddings and the soft cap as operations of each backend, against float64."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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


def test_soft_cap(kernels: Any) -> None:
    x = torch.tensor([[-1e30, -40.0, -1e-3, 0.0, 2.0, 25.0, 80.0, float("inf")]]).repeat(3, 5)
    expected = 30 * torch.tanh(x.double() / 30)
    torch.testing.assert_close(kernels.soft_cap(x.clone(), 30.0).double(), expected, rtol=1e-6, atol=4e-6)


def test_products_of_a_float32_stream_with_narrow_weights(kernels: Any) -> None:
    x, weight = torch.randn(5, 32), torch.randn(16, 32).bfloat16()
    product = kernels.pack([weight])(x, torch.bfloat16)
    assert_near(product, x.bfloat16().double() @ weight.double().T, torch.bfloat16)
