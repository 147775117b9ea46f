"""Row-parallel products: 1, 2 and 4 ranks give the same bits, through the product's pieces and ``all_reduce``."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.backends import cpu_settings

_cpu: Any = pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")
from octavo.kernels.torch_backend import from_torch, sum_as_tree  # noqa: E402
from octavo.layers.layer import LayerContext  # noqa: E402
from octavo.layers.linear import RowParallelLinear  # noqa: E402
from tests.busy_machine import PATIENCE  # noqa: E402
from tests.kernels import torch_facade  # noqa: E402
from tests.thread_groups import thread_group  # noqa: E402
from tests.torch_types import engine_dtype  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16]
ROWS = 70


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with cpu_settings(threads=1):  # ranks that are threads of one process cannot share the pool of threads
        yield


@pytest.fixture(params=_cpu.available_isas().floats)
def isa(request: pytest.FixtureRequest) -> str:
    _cpu.choose_isa(request.param)
    return str(request.param)


def make_kernels() -> Any:
    return torch_facade.make_kernels(1)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def results(size: int, dtype: torch.dtype, weight: Tensor, bias: Tensor | None, x: Tensor, add: Tensor) -> list[Tensor]:
    """For each number of rows the product of their first ones, then the product added to a residual."""
    groups = thread_group(size, timeout=PATIENCE) if size > 1 else [None]
    kernels = [make_kernels() for _ in range(size)]

    def rank(index: int) -> list[Tensor]:
        kernels[index].group = groups[index]
        context = LayerContext(kernels[index], engine_dtype(dtype), tp_rank=index, tp_size=size)
        layer = RowParallelLinear(context, weight.shape[1], len(weight), bias is not None)
        layer.load("weight", from_torch(weight))
        if bias is not None:
            layer.load("bias", from_torch(bias))
        share = x.chunk(size, dim=1)[index].contiguous()
        found = []
        for rows in range(1, len(x) + 1):
            found += [layer(share[:rows]), layer.add_to(add[:rows].clone(), share[:rows])]
        return found

    with ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(rank, range(size)))
    for other in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ranks[0], other, strict=True))
    return ranks[0]


@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_1_2_and_4_ranks_give_the_same_bits(isa: str, dtype: torch.dtype, bias: bool) -> None:
    outputs, inputs = 83, 4 * 22
    weight, x = random(outputs, inputs, seed=0), random(ROWS, inputs, seed=1).to(dtype)
    offset = random(outputs, seed=2).to(dtype) if bias else None
    add = 100 * random(ROWS, outputs, seed=3)
    one = results(1, dtype, weight, offset, x, add)
    for size in (2, 4):
        for alone, together in zip(one, results(size, dtype, weight, offset, x, add), strict=True):
            assert torch.equal(alone, together)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pieces", [2, 4])
def test_pieces_of_k_are_joined_as_a_tree(isa: str, dtype: torch.dtype, pieces: int) -> None:
    kernels = make_kernels()
    weight, x, bias = random(50, 80, seed=0).to(dtype), random(33, 80, seed=1).to(dtype), random(50, seed=2).to(dtype)
    whole = kernels.pack([weight], bias, pieces=pieces)
    parts = [
        kernels.pack([w.contiguous()])(x_part.contiguous(), torch.float32)
        for w, x_part in zip(weight.chunk(pieces, 1), x.chunk(pieces, 1), strict=True)
    ]
    assert torch.equal(whole(x, torch.float32), sum_as_tree(parts) + bias)
    assert not torch.equal(whole(x, torch.float32), kernels.pack([weight], bias)(x, torch.float32))


@pytest.mark.parametrize(
    ("k", "pieces", "dtype", "says"),
    [
        (12, 3, torch.float32, "1, 2 or 4 pieces, not 3"),
        (6, 4, torch.float32, "k 6 cannot be summed in 4 equal pieces"),
        (12, 4, torch.bfloat16, "k 12 cannot be summed in 4 equal pieces of pairs"),
    ],
)
def test_k_that_has_no_such_pieces_is_refused(k: int, pieces: int, dtype: torch.dtype, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_kernels().pack([torch.ones(4, k, dtype=dtype)], pieces=pieces)
