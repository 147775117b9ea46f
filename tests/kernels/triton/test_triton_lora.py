"""Low-rank products of adapters on a GPU, or interpreted: against float64, and the order of their sums."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.kernels.interface import LowRank, LowRankShape
from octavo.kernels.triton import lora
from octavo.kernels.triton.backend import TritonKernels
from octavo.kernels.triton.lora import RowTiles
from tests.lora_cases import Adapter, exact, make_adapter, random

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OUTPUTS = [24, 7, 130]
RANKS = [(8, 8, 8), (1, 0, 40), (3, 15, 0)]


def adapters_of(inputs: int) -> list[Adapter]:
    return [make_adapter(inputs, OUTPUTS, ranks, seed) for seed, ranks in enumerate(RANKS)]


def filled(kernels: TritonKernels, inputs: int, dtype: DType) -> LowRank:
    low_rank = kernels.adapters.make_low_rank(LowRankShape(inputs, tuple(OUTPUTS), len(RANKS) + 1, 40, dtype))
    for slot, adapter in enumerate(adapters_of(inputs)):
        low_rank.place(slot, low_rank.pack(make_adapter(inputs, OUTPUTS, (40, 40, 40), 9)))  # another one before
        low_rank.place(slot, low_rank.pack(adapter))
    return low_rank


def call(
    kernels: TritonKernels, low_rank: LowRank, slots: Sequence[int], x: Tensor, add: Tensor | None = None
) -> Tensor:
    kernels.adapters.use(torch.tensor(slots, dtype=torch.int32, device=DEVICE))
    out = low_rank(x.to(DEVICE), None if add is None else add.to(DEVICE, copy=True))
    assert out is not None
    return out.cpu()


def test_rows_are_sorted_into_tiles_of_one_slot() -> None:
    tiles = RowTiles.of(torch.tensor([1, -1, 0, 1, 7], dtype=torch.int32), 2, deterministic=True)
    found = [
        (slot, [row for row in tiles.places.view(-1, tiles.rows)[i].tolist() if row < 5])
        for i, slot in enumerate(tiles.slots.tolist())
        if slot >= 0
    ]
    assert found == [(0, [2]), (1, [0, 3]), (2, [1, 4])]


@pytest.mark.parametrize(
    ("dtype", "inputs"), [(DType.FLOAT32, 131), pytest.param(DType.BFLOAT16, 300, marks=pytest.mark.slow)]
)
def test_rows_of_several_adapters(dtype: DType, inputs: int) -> None:
    kernels = TritonKernels(DEVICE, deterministic=True)
    low_rank, adapters = filled(kernels, inputs, dtype), [*adapters_of(inputs), None]
    slots = [(3 * row) % 5 - 1 for row in range(12)]
    x, add = random(12, inputs + 3)[:, :inputs], random(12, sum(OUTPUTS), seed=1)
    added, bound = exact(adapters, OUTPUTS, slots, x, dtype)
    alone, together = call(kernels, low_rank, slots, x), call(kernels, low_rank, slots, x, add)
    assert ((alone.double() - added).abs() <= bound).all()
    assert ((together.double() - (added + add)).abs() <= bound + 1e-6 * add.abs()).all()
    without = [row for row, slot in enumerate(slots) if slot in (-1, 3)]
    assert torch.equal(together[without], add[without])
    assert torch.signbit(alone[without]).all()
    assert not alone[without].any()


def test_a_row_has_the_same_bits_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = TritonKernels(DEVICE, deterministic=True)
    low_rank = filled(kernels, 300, DType.BFLOAT16)
    x, slots = random(12, 300), [(3 * row) % 5 - 1 for row in range(12)]
    whole = call(kernels, low_rank, slots, x)
    chosen = [11, 2, 7]
    assert torch.equal(call(kernels, low_rank, [slots[row] for row in chosen], x[chosen]), whole[chosen])
    assert torch.equal(call(kernels, low_rank, slots[4:5], x[4:5]), whole[4:5])
    monkeypatch.setattr(lora, "_MANY_ROWS", 12)  # a program computes all pieces
    assert torch.equal(call(kernels, low_rank, slots, x), whole)


def test_embeddings() -> None:
    kernels = TritonKernels(DEVICE)
    low_rank = kernels.adapters.make_low_rank_embedding(LowRankShape(20, (70,), 3, 40, DType.FLOAT32))
    parts = [make_adapter(20, [70], [rank], rank)[0] for rank in (1, 40)]
    for slot, part in enumerate(parts):
        assert part is not None
        low_rank.place(slot, low_rank.pack(part))
    slots = [0, 1, -1, 1, 2, 1]
    ids, add = torch.tensor([105, 119, 103, 99, 100, 120]), random(6, 70)
    kernels.adapters.use(torch.tensor(slots, dtype=torch.int32, device=DEVICE))
    out = low_rank(ids.to(DEVICE), add.to(DEVICE, copy=True), 100).cpu()
    for row in (0, 1):
        part = parts[slots[row]]
        assert part is not None
        torch.testing.assert_close(out[row], add[row] + torch.from_numpy(part.up @ part.down[:, int(ids[row]) - 100]))
    assert torch.equal(out[2:], add[2:])  # no adapter, an id of another rank, an empty slot
