"""Products of bfloat16 by the tiles of AMX: the order of their sums, for every number of rows and every k.

Where the processor lacks AMX they run with the emulated kernels only (``test_emulated_isa.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.backends import cpu_settings

_cpu: Any = pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")
from tests.kernels import torch_facade  # noqa: E402

if "amx_bf16" not in _cpu.available_isas().floats:
    pytest.skip(f"the kernels have no AMX here: {_cpu.amx()}", allow_module_level=True)

STEP = 32


@pytest.fixture(autouse=True)
def _tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OCTAVO_CPU_ISA", raising=False)  # kernels that are made would take what it names
    with cpu_settings(isa="amx_bf16"):
        yield


def in_order(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x W^T in float32: for each step of 32 k, c += even + odd, chains of fused multiply-adds from zero.

    A product of two bfloat16 numbers, and its sum with a float32 of like magnitude, are exact in float64.
    """
    terms = x.astype(np.float64)[:, None] * weight.astype(np.float64)
    c = np.zeros(terms.shape[:2], np.float32)
    for begin in range(0, terms.shape[2], STEP):
        step = terms[..., begin : begin + STEP]
        chains = np.zeros((2, *c.shape), np.float32)
        for k in range(step.shape[2]):
            chains[k % 2] = (chains[k % 2] + step[..., k]).astype(np.float32)
        c = c + (chains[0] + chains[1])
    return c


def operands(rows: int, columns: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight, x = (torch.randn(n, k, generator=generator).bfloat16() for n in (columns, rows))
    return x, weight


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 33, 70])
@pytest.mark.parametrize("k", [1, 2, 7, 31, 32, 33, 64, 100])
def test_sums_are_added_in_steps_of_32(rows: int, k: int) -> None:
    x, weight = operands(rows, 57, k, 100 * rows + k)
    out = torch_facade.make_kernels().pack([weight])(x, torch.float32)
    assert np.array_equal(out.numpy(), in_order(x.float().numpy(), weight.float().numpy()))


@pytest.mark.parametrize("k", [2 * 1024, 2 * 1024 + 2, 3000, 5 * 1024 + 34])
def test_a_cut_of_k_changes_no_bit(k: int) -> None:
    """Vectors, which do not cut it, and tiles of one and of several rows, which do."""
    x, weight = operands(41, 70, k, k)
    product = torch_facade.make_kernels().pack([weight])
    whole = product(x, torch.float32)
    for begin, end in ((0, 1), (1, 3), (3, 19), (19, 41)):
        assert torch.equal(product(x[begin:end], torch.float32), whole[begin:end])
    assert np.array_equal(whole[:2].numpy(), in_order(x[:2].float().numpy(), weight.float().numpy()))


def test_what_is_not_normal_counts_as_zero_for_every_number_of_rows() -> None:
    least = 2.0**-126
    row = torch.tensor([[least / 2, 0.0], [least, 0.0], [least, 0.0]]).bfloat16()
    weight = torch.tensor([[1.0, 1.0], [1.5, 1.5], [0.5, 0.5]]).bfloat16()
    expected = torch.tensor([[0.0, 0.0, 0.0], [least, 1.5 * least, 0.0], [least, 1.5 * least, 0.0]])
    product = torch_facade.make_kernels().pack([weight])
    assert torch.equal(product(row, torch.float32), expected)
    assert torch.equal(product(row[:2], torch.float32), expected[:2])
    assert torch.equal(product(row.repeat(20, 1), torch.float32), expected.repeat(20, 1))


def test_numbers_that_are_none_spread_along_their_row_and_column_only() -> None:
    x, weight = operands(20, 40, 96, 5)
    product = torch_facade.make_kernels().pack([weight])
    before = product(x, torch.float32)
    x[3, 50] = float("nan")
    after = product(x, torch.float32)
    assert after[3].isnan().all()
    rest = torch.arange(20) != 3
    assert torch.equal(after[rest], before[rest])
