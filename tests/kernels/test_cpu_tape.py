"""The tape of the CPU backend: it holds all that a forward computes, or refuses to be recorded."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.core.errors import UnrecordableError
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch, ForwardOutput
from octavo.kernels.torch_backend import sum_as_tree

_cpu: Any = pytest.importorskip("octavo._cpu")
CpuKernels: Any = importlib.import_module("octavo.kernels.cpu.backend").CpuKernels
CpuArray: Any = importlib.import_module("octavo.kernels.cpu.array").CpuArray
torch_facade: Any = importlib.import_module("tests.kernels.torch_facade")
Arena: Any = importlib.import_module("octavo.kernels.cpu.tape").Arena
Communicator: Any = importlib.import_module("octavo.kernels.cpu.backend").SharedMemoryCommunicator
thread_group: Any = importlib.import_module("tests.thread_groups").thread_group


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks that are threads of one process cannot share the pool of threads."""
    threads = _cpu.num_threads()
    _cpu.set_threads(1)
    yield
    _cpu.set_threads(threads)


def make_kernels() -> Any:
    return torch_facade.make_kernels(1)


LARGEST = BatchSize(tokens=16, sequences=8, sampled=12, max_seq_len=32, block_size=16)


def step(ids: Tensor, sampled: list[int] | None = None) -> ForwardBatch:
    """The tokens at positions 3 and on of one sequence."""
    count = len(ids)
    batch: ForwardBatch = torch_facade.make_batch([count], [count + 3], torch.tensor([[4, 2]]), 16, token_ids=ids)
    if sampled is not None:
        batch.sampled_rows, batch.all_sampled = torch.tensor(sampled, dtype=torch.int64), False
    return batch


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda x: x * 3.0, TypeError),
        (lambda x: np.exp(x), TypeError),
        (lambda x: x[[1, 0]], UnrecordableError),
        (lambda x: x[:, :4].reshape(-1), UnrecordableError),
    ],
)
def test_what_is_no_operation_of_the_kernels_is_refused(spoil: Callable[[Any], Any], error: type[Exception]) -> None:
    kernels, table = CpuKernels(), CpuArray.over(np.ones((11, 8), np.float32))
    with pytest.raises(error):
        kernels.capture(lambda batch: ForwardOutput(spoil(kernels.embedding(batch.token_ids, table))), LARGEST)
    assert kernels.runner.recording is None


def test_views_are_not_operations() -> None:
    kernels = CpuKernels()
    kernels.set_threads(1)
    table, weight = (kernels.array(torch.randn(*shape).numpy()) for shape in ((11, 8), (4,)))

    def forward(batch: ForwardBatch) -> ForwardOutput:
        x = kernels.embedding(batch.token_ids, table).reshape(-1, 2, 4)
        normed = kernels.rms_norm(x[:, 1:], weight, 1e-6)
        return ForwardOutput(normed.reshape(len(batch.token_ids), -1))

    batch: Any = torch_facade.inward(step(torch.tensor([4, 1, 9])))
    expected = forward(batch).hidden.numpy()
    assert expected.any() and np.array_equal(kernels.capture(forward, LARGEST)(batch).hidden.numpy(), expected)


def test_a_recorded_embedding_is_of_token_ids_positions_or_types() -> None:
    kernels, table = make_kernels(), torch.randn(40, 8)
    ids = torch.tensor([4, 1, 9])
    batch = step(ids)
    batch.token_types = torch.tensor([1, 0, 1])
    for forward, rows in (
        (lambda batch: ForwardOutput(kernels.embedding(batch.token_ids, table)), ids),
        (lambda batch: ForwardOutput(kernels.embedding(batch.positions, table)), batch.positions),
        (lambda batch: ForwardOutput(kernels.embedding(batch.token_types, table)), batch.token_types),
    ):
        assert torch.equal(kernels.capture(forward, LARGEST)(batch).hidden, table[rows])
    with pytest.raises(UnrecordableError, match="token ids, positions or types"):
        kernels.capture(lambda batch: ForwardOutput(kernels.embedding(batch.slot_mapping[0], table)), LARGEST)


def test_ids_of_another_rank_give_zeros() -> None:
    kernels, table = make_kernels(), torch.randn(5, 8)
    expected = torch.zeros(4, 8)
    expected[1:3] = table[[0, 4]]
    assert torch.equal(kernels.embedding(torch.tensor([9, 10, 14, 15]), table, 10), expected)


def test_a_host_function_is_called_at_its_place_with_the_rows_of_the_step() -> None:
    kernels, table = make_kernels(), torch.randn(11, 8)
    weight = kernels.pack([torch.randn(4, 8)])
    seen = []

    def double(x: Tensor) -> None:
        seen.append(len(x))
        x.mul_(2.0)

    def forward(batch: ForwardBatch) -> ForwardOutput:
        doubled = kernels.host_call(double, kernels.embedding(batch.token_ids, table))
        return ForwardOutput(weight(doubled, torch.float32))

    replay = kernels.capture(forward, LARGEST)
    assert seen == []
    for ids in (torch.tensor([3, 5]), torch.tensor([1, 1, 7, 2])):
        assert torch.equal(replay(step(ids)).hidden, forward(step(ids)).hidden)
    assert seen == [2, 2, 4, 4]


def test_what_a_host_function_raises_ends_the_step() -> None:
    kernels, table = make_kernels(), torch.randn(11, 8)

    def fail(x: Tensor) -> None:
        raise ConnectionError("the other rank is gone")

    replay = kernels.capture(
        lambda batch: ForwardOutput(kernels.host_call(fail, kernels.embedding(batch.token_ids, table))), LARGEST
    )
    with pytest.raises(ConnectionError, match="the other rank is gone"):
        replay(step(torch.tensor([1])))


def in_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    """What the functions return, each called by a thread of its own."""
    results: list[Any] = [None] * len(functions)

    def call(i: int) -> None:
        try:
            results[i] = functions[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("slot_floats", [16, 1 << 12])
def test_collectives_of_threads(size: int, slot_floats: int) -> None:
    import mmap

    memory = mmap.mmap(-1, Communicator.bytes_for(size, slot_floats))
    groups = [Communicator(memory, rank, size) for rank in range(size)]
    parts = [[torch.randn(n, 10) * 10.0**rank for n in (1, 7, 30)] for rank in range(size)]
    bias, add = torch.randn(10), torch.randn(30, 10) * 10

    def rank(kernels: Any, group: Any, own: list[Tensor]) -> list[Tensor]:
        kernels.group = group
        return [
            result
            for x in own
            for result in (
                kernels.all_gather(x),
                kernels.all_reduce(x.clone()),
                kernels.all_reduce(x.clone(), bias, add[: len(x)]),
            )
        ]

    found = in_threads([partial(rank, make_kernels(), g, own) for g, own in zip(groups, parts, strict=True)])
    for results in found:
        for i in range(3):
            own = [each[i] for each in parts]
            assert torch.equal(results[3 * i], torch.cat(own, dim=1))
            total = sum_as_tree(own)
            assert torch.equal(results[3 * i + 1], total)
            assert torch.equal(results[3 * i + 2], total + bias + add[: len(total)])


def test_a_missing_rank_times_out() -> None:
    first, _ = thread_group(2, timeout=0.05)
    with pytest.raises(RuntimeError, match="rank 1 of 2 has not come"):
        first.all_reduce(np.ones((1, 3), np.float32))


def run_once(replay: Forward, ids: Tensor) -> Tensor:
    return replay(step(ids)).hidden.clone()


def test_collectives_are_part_of_a_recorded_step() -> None:
    table = torch.randn(12, 8)
    groups = thread_group(2)
    replays = []
    for rank, group in enumerate(groups):
        kernels = make_kernels()
        kernels.group = group

        def forward(batch: ForwardBatch, rank: int = rank, kernels: Any = kernels) -> ForwardOutput:
            share = table[6 * rank : 6 * rank + 6]
            whole = kernels.all_reduce(kernels.embedding(batch.token_ids, share, 6 * rank))
            return ForwardOutput(kernels.all_gather(whole))

        replays.append(kernels.capture(forward, LARGEST))
    for ids in (torch.tensor([3, 11, 6]), torch.tensor([0])):
        for result in in_threads([partial(run_once, replay, ids) for replay in replays]):
            assert torch.equal(result, table[ids].repeat(1, 2))


def test_what_follows_the_sampled_rows_runs_over_them_alone() -> None:
    kernels, table, norm = make_kernels(), torch.randn(11, 8), torch.rand(8)
    weight = kernels.pack([torch.randn(5, 8)])

    def forward(batch: ForwardBatch) -> ForwardOutput:
        hidden = kernels.rms_norm(kernels.embedding(batch.token_ids, table), norm, 1e-6)
        sampled = kernels.rms_norm(kernels.take_sampled(hidden, batch), norm, 1e-6)
        return ForwardOutput(hidden, weight(sampled, torch.float32))

    replay = kernels.capture(forward, LARGEST)
    for sampled in ([0, 3], [], [2, 1, 1, 0, 3, 3, 3, 3], [3]):
        batch = step(torch.tensor([4, 1, 9, 0]), sampled)
        found, expected = replay(batch), forward(batch)
        assert torch.equal(found.hidden, expected.hidden)
        assert found.logits is not None and expected.logits is not None
        assert torch.equal(found.logits, expected.logits)


RECORD = """
import sys
import numpy as np
from octavo.kernels.cpu.backend import CpuKernels
from octavo.kernels.forward_batch import BatchSize, ForwardOutput

kernels = CpuKernels()
table = kernels.array(np.zeros((5, 4), np.float32))
size = BatchSize(tokens=16, sequences=8, sampled=12, max_seq_len=32, block_size=16)
kernels.capture(lambda batch: ForwardOutput(kernels.embedding(batch.token_ids, table)), size)
assert "torch" not in sys.modules
"""


def test_steps_are_recorded_without_torch() -> None:
    # Another process has the kernels of this machine, which lack sets that tests emulate.
    environ = {**os.environ, "OCTAVO_CPU_ISA": ""}
    subprocess.run([sys.executable, "-c", RECORD], check=True, timeout=120, env=environ)


def test_an_array_may_have_the_memory_of_another_that_lives() -> None:
    arena = Arena()

    def take() -> Any:
        return arena.take((4, 8), DType.FLOAT32, _cpu.Rows.tokens)

    first = take()
    with arena.shared([first]):
        second = take()
        assert take().address != first.address
    address = first.address
    assert second.address == address
    del first
    assert take().address != address, "the second one has it still"
    del second
    assert take().address == address
