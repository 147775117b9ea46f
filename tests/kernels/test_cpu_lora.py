"""Low-rank products of the CPU backend: against float64, bit for bit against themselves, and on the tape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.core.dtypes import DType
from tests.kernels.backends import cpu_settings

_cpu: Any = pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput  # noqa: E402
from octavo.kernels.interface import Activation, LowRankShape  # noqa: E402
from octavo.kernels.torch_backend import torch_dtype  # noqa: E402
from octavo.layers.layer import LayerContext  # noqa: E402
from octavo.layers.linear import RowParallelLinear  # noqa: E402
from tests.busy_machine import PATIENCE  # noqa: E402
from tests.kernels import torch_facade  # noqa: E402
from tests.lora_cases import Adapter, exact, make_adapter, random  # noqa: E402
from tests.thread_groups import thread_group  # noqa: E402

DTYPES = [DType.FLOAT32, DType.BFLOAT16]
OUTPUTS = [40, 16, 23]
#: The ranks of each adapter's parts.
RANKS = [(8, 8, 8), (1, 0, 64), (3, 15, 0), (2, 4, 32)]


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    with cpu_settings(threads=2):
        yield


@pytest.fixture(params=_cpu.available_isas().floats)
def isa(request: pytest.FixtureRequest) -> str:
    _cpu.choose_isa(request.param)
    return str(request.param)


def make_kernels(threads: int = 2) -> Any:
    isa = _cpu.isa()
    kernels = torch_facade.make_kernels(threads)
    _cpu.choose_isa(isa)
    return kernels


def filled(kernels: Any, inputs: int, dtype: DType, outputs: Sequence[int] = OUTPUTS) -> Any:
    low_rank = kernels.adapters.make_low_rank(LowRankShape(inputs, tuple(outputs), len(RANKS) + 1, 64, dtype))
    for slot, adapter in enumerate(adapters_of(inputs, outputs)):
        low_rank.place(slot, low_rank.pack(adapter))
    return low_rank


def adapters_of(inputs: int, outputs: Sequence[int]) -> list[Adapter]:
    return [make_adapter(inputs, outputs, ranks[: len(outputs)], seed) for seed, ranks in enumerate(RANKS)]


def use(kernels: Any, slots: Sequence[int]) -> None:
    kernels.adapters.use(torch.tensor(slots, dtype=torch.int32))


def call(low_rank: Any, x: Tensor, add: Tensor | None = None) -> Tensor:
    out = low_rank(x, None if add is None else add.clone())
    assert out is not None
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Zeros of either sign differ."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [64, 7, 131])
def test_rows_of_several_adapters(isa: str, inputs: int, dtype: DType, x_dtype: DType) -> None:
    kernels = make_kernels()
    low_rank, adapters = filled(kernels, inputs, dtype), [*adapters_of(inputs, OUTPUTS), None]
    for rows in (1, 5, 64, 200):
        slots = [(3 * row) % 6 - 1 for row in range(rows)]
        x = random(rows, inputs + 3, seed=rows).to(torch_dtype(x_dtype))[:, :inputs]
        use(kernels, slots)
        added, bound = exact(adapters, OUTPUTS, slots, x, dtype)
        assert ((call(low_rank, x).double() - added).abs() <= bound).all()
        add = random(rows, sum(OUTPUTS), seed=1)
        assert ((call(low_rank, x, add).double() - (added + add)).abs() <= bound + 1e-6 * add.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_any_company(isa: str, dtype: DType) -> None:
    kernels = make_kernels()
    low_rank = filled(kernels, 131, dtype)
    x, add = random(90, 131), random(90, sum(OUTPUTS), seed=1)
    slots = torch.tensor([(5 * row) % 6 - 1 for row in range(90)])
    alone = []
    for row in range(90):
        use(kernels, slots[row : row + 1].tolist())
        alone.append((call(low_rank, x[row : row + 1]), call(low_rank, x[row : row + 1], add[row : row + 1])))
    for threads in (1, 2, 3):
        kernels.set_threads(threads)
        for seed, count in enumerate((90, 61, 17, 4, 3, 2)):
            chosen = torch.randperm(90, generator=torch.Generator().manual_seed(seed))[:count]
            use(kernels, slots[chosen].tolist())
            assert same_bits(call(low_rank, x[chosen]), torch.cat([alone[row][0] for row in chosen]))
            assert same_bits(call(low_rank, x[chosen], add[chosen]), torch.cat([alone[row][1] for row in chosen]))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_rows_without_adapters_have_the_bits_of_a_product_alone(
    isa: str, quantization: str | None, gated: bool, out_dtype: DType
) -> None:
    kernels = make_kernels()
    low_rank = filled(kernels, 64, DType.BFLOAT16, (24, 24))
    parts = [random(24, 64, seed=i).bfloat16() for i in (1, 2)]
    weight = kernels.pack(parts, random(48, seed=3).bfloat16(), quantization, gated=gated)
    x = random(30, 64).bfloat16()
    x[7] = 0
    x[9] = -1e-38
    slots = [row % 3 - 1 for row in range(30)]
    use(kernels, slots)
    activation: Activation | None = "silu" if gated else None
    plain = weight(x, out_dtype, activation=activation)
    added = weight(x, out_dtype, low_rank(x), activation)
    bits = torch.int32 if out_dtype is DType.FLOAT32 else torch.int16
    for row, slot in enumerate(slots):
        assert torch.equal(plain[row].view(bits), added[row].view(bits)) == (slot < 0 or row == 7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings(isa: str, dtype: DType) -> None:
    kernels = make_kernels()
    low_rank = kernels.adapters.make_low_rank_embedding(LowRankShape(20, (37,), 3, 8, dtype))
    parts = [make_adapter(20, [37], [rank], rank)[0] for rank in (1, 8)]
    for slot, part in enumerate(parts):
        assert part is not None
        low_rank.place(slot, low_rank.pack(part))
    slots = [0, 1, -1, 1, 2, 1]
    ids, add = torch.tensor([105, 119, 103, 99, 100, 120]), random(6, 37)
    use(kernels, slots)
    out = low_rank(ids, add.clone(), 100)
    for row in (0, 1):
        part = parts[slots[row]]
        assert part is not None
        down, up = (torch.from_numpy(matrix.astype(dtype.numpy).astype(np.float32)) for matrix in part)
        torch.testing.assert_close(out[row], add[row] + up @ down[:, ids[row] - 100])
    assert torch.equal(out[2:], add[2:])  # no adapter, an id of another rank, an empty slot


# ---- on the tape ----------------------------------------------------------------------------------------------------


def batch_of(slots: Sequence[int], token_ids: Tensor | None = None) -> ForwardBatch:
    ones = [1] * len(slots)
    tables = torch.zeros(len(slots), 1)
    return torch_facade.make_batch(ones, ones, tables, 16, adapters=slots, token_ids=token_ids)


class Network:
    """An embedding, a projection, another added to the residual stream, and a head, all with adapters."""

    def __init__(self, dtype: DType) -> None:
        self.kernels, self.dtype = make_kernels(), dtype
        kernels = self.kernels
        self.table, self.up, self.down, self.head = (
            random(*shape, seed=i).to(torch_dtype(dtype)) / 8
            for i, shape in enumerate([(20, 64), (96, 64), (64, 96), (20, 64)])
        )
        self.weights = [kernels.pack([matrix]) for matrix in (self.up, self.down, self.head)]
        shapes = [(64, 96), (96, 64), (64, 20)]
        self.low_ranks = [
            kernels.adapters.make_low_rank(LowRankShape(inputs, (outputs,), 2, 8, dtype), sampled=outputs == 20)
            for inputs, outputs in shapes
        ]
        self.of_embedding = kernels.adapters.make_low_rank_embedding(LowRankShape(20, (64,), 2, 8, dtype))

    def place(self, slot: int, seed: int | None) -> None:
        for low_rank in self.low_ranks:
            made = None if seed is None else make_adapter(low_rank.inputs, low_rank.outputs, [1 + seed % 8], seed)
            low_rank.place(slot, None if made is None else low_rank.pack(made))
        made = None if seed is None else make_adapter(20, [64], [1 + seed % 8], seed)
        self.of_embedding.place(slot, None if made is None else self.of_embedding.pack(made[0]))

    def __call__(self, batch: ForwardBatch) -> ForwardOutput:
        kernels = self.kernels
        kernels.adapters.begin(batch)
        residual = self.of_embedding(batch.token_ids, kernels.embedding(batch.token_ids, self.table))
        up, down, head = self.weights
        of_up, of_down, of_head = self.low_ranks
        hidden = up(residual, self.dtype, of_up(residual), "silu")
        residual = down(hidden, DType.FLOAT32, of_down(hidden, residual))
        sampled = kernels.take_sampled(residual, batch)
        return ForwardOutput(residual, head(sampled, DType.FLOAT32, of_head(sampled)))


def run(forward: Callable[[ForwardBatch], ForwardOutput], batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    output = forward(batch)
    assert output.logits is not None
    return output.hidden.clone(), output.logits.clone()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recorded_step_is_the_step_run_at_once(dtype: DType) -> None:
    network = Network(dtype)
    recorded = network.kernels.capture(network, BatchSize(40, 40, 40, 16, 16))
    ids = torch.arange(7) * 3 % 20
    seen = []
    for slots, adapters in [
        ([-1] * 7, (None, None)),
        ([0, -1, 1, 1, 0, -1, 0], (1, 2)),
        ([-1] * 7, (1, 2)),
        ([0, -1, 1, 1, 0, -1, 0], (7, 2)),  # another adapter in the slot
        ([0, -1, 1, 1, 0, -1, 0], (7, None)),
    ]:
        for slot, seed in enumerate(adapters):
            network.place(slot, seed)
        batch = batch_of(slots, ids)
        batch.sampled_rows, batch.all_sampled = torch.tensor([6, 2, 5]), False
        now, replayed = run(network, batch), run(recorded, batch)
        assert all(same_bits(a, b) for a, b in zip(now, replayed, strict=True))
        seen.append(replayed)
    assert same_bits(seen[0][0], seen[2][0])
    assert same_bits(seen[0][1], seen[2][1])
    for row in (1, 5):
        assert all(same_bits(hidden[row], seen[0][0][row]) for hidden, _ in seen)
    assert not same_bits(seen[1][0][0], seen[3][0][0])
    assert same_bits(seen[1][0][2], seen[3][0][2])
    assert same_bits(seen[4][1][1], seen[0][1][1])  # the adapter of its slot is gone
    assert same_bits(seen[3][1][2], seen[0][1][2])
    assert not same_bits(seen[3][1][0], seen[0][1][0])


def test_two_ranks_add_up_to_one() -> None:
    weight, x, residual = random(48, 64), random(9, 64, seed=1), random(9, 48, seed=2)
    adapter = {"": (random(8, 64, seed=3).numpy(), random(48, 8, seed=4).numpy())}
    slots = [row % 3 - 1 for row in range(9)]
    groups = thread_group(2, timeout=PATIENCE)
    every = [make_kernels(1) for _ in range(3)]

    def rank(index: int, size: int) -> Tensor:
        kernels = every[index]
        kernels.group = groups[index] if size > 1 else None
        kernels.adapters.use(torch.tensor(slots, dtype=torch.int32))
        context = LayerContext(kernels, DType.FLOAT32, tp_rank=index % size, tp_size=size, max_loras=2, max_lora_rank=8)
        layer = RowParallelLinear(context, 64, 48, False)
        layer.load("weight", weight.numpy())
        for slot in (0, 1):
            layer.place_lora(slot, layer.pack_lora(adapter))
        return layer.add_to(residual.clone(), x[:, layer.columns])

    whole = rank(2, 1)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda index: rank(index, 2), range(2))
    assert same_bits(first, second)
    torch.testing.assert_close(first, whole, atol=1e-4, rtol=1e-4)
    without = [row for row, slot in enumerate(slots) if slot < 0]
    assert same_bits(first[without], whole[without])
