"""Decode steps by graphs: which one, what is padded, what is copied where. What records the graphs is a fake."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput, make_batch
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.triton.backend import CudaGraphs, GraphedForward, graph_sizes

BLOCK, MAX_LEN, MAX_SEQS = 4, 40, 20


def test_sizes_are_close_where_steps_are_short() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert graph_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]
    assert graph_sizes(300)[-5:] == [224, 240, 256, 288, 300]


@pytest.mark.parametrize("largest", [1, 2, 5, 8, 9, 63, 64, 65, 255, 256, 257, 288, 1000])
def test_sizes_rise_to_the_largest_batch(largest: int) -> None:
    sizes = graph_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, largest)
    assert all(b - a <= (32 if a >= 256 else 16 if a >= 64 else 8) for a, b in itertools.pairwise(sizes))


class FakeGraphs:
    """Records as a graph does: shapes, addresses and Python numbers stay those of the recording."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.replayed: list[int] = []

    def __call__(self, run: Callable[[], ForwardOutput]) -> tuple[Callable[[], None], ForwardOutput]:
        run()
        output = run()
        size = output.hidden.shape[0]
        self.recorded.append(size)

        def replay() -> None:
            self.replayed.append(size)
            output.hidden.copy_(run().hidden)

        return replay, output


class Network:
    """Notes the batches; "hidden states" are what the inputs say, and what is in the slots of the sequence's blocks."""

    def __init__(self) -> None:
        self.calls: list[ForwardBatch] = []
        #: What the slots were at each call.
        self.written: list[list[int]] = []
        self.slots = torch.zeros(200, dtype=torch.int64)

    def __call__(self, batch: ForwardBatch) -> ForwardOutput:
        token_ids, [slots], [tables] = batch.token_ids, batch.slot_mapping, batch.block_tables
        self.calls.append(batch)
        self.written.append(slots.tolist())
        written = slots >= 0
        self.slots[slots[written]] = token_ids[written]
        sums = []
        for i in range(batch.num_decodes):
            seen = torch.arange(int(batch.seq_lens[i]))
            blocks = tables[i].long()[seen // BLOCK]
            sums.append(self.slots[blocks * BLOCK + seen % BLOCK].sum())
        sums += [torch.tensor(0)] * (len(token_ids) - batch.num_decodes)
        columns = [token_ids, batch.positions, *batch.rotary_positions, *([torch.stack(sums)] if sums else [])]
        return ForwardOutput(torch.stack(columns, dim=1).float())


def make(network: Network, graphs: FakeGraphs, at_start: bool = False, **options: Any) -> GraphedForward:
    largest = BatchSize(500, MAX_SEQS, MAX_SEQS, MAX_LEN, BLOCK, rotary_axes=3)
    forward = GraphedForward(network, graphs, largest, ReferenceKernels("cpu"), **options)
    if at_start:
        forward.capture_all()
    return forward


def decodes(rng: random.Random, count: int) -> ForwardBatch:
    """A step of so many sequences, each with any blocks from 1 on; block 0 is not used."""
    free = rng.sample(range(1, 50), 49)
    lens = [rng.randrange(1, 9) for _ in range(count)]
    width = max(-(-length // BLOCK) for length in lens)
    tables = torch.zeros(count, width, dtype=torch.int32)
    for i, length in enumerate(lens):
        for block in range(-(-length // BLOCK)):
            tables[i, block] = free.pop()
    ids = torch.tensor([rng.randrange(100) for _ in range(count)])
    rotary = np.array([[rng.randrange(100) for _ in range(count)] for _ in range(3)])
    kernels, token_ids = ReferenceKernels("cpu"), np.asarray(ids)
    return make_batch(
        [1] * count, lens, np.asarray(tables), BLOCK, kernels, token_ids=token_ids, rotary_positions=rotary
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_replay_is_the_forward(seed: int) -> None:
    """Batches grow and shrink; padding writes nothing and reads nothing, whatever a larger batch left behind."""
    rng, graphs, network, plain = random.Random(seed), FakeGraphs(), Network(), Network()
    forward = make(network, graphs)
    for count in [1, 20, 3, 3, 20, 17, 1, 9, *(rng.randrange(1, 21) for _ in range(10))]:
        batch = decodes(rng, count)
        expected = plain(batch)
        assert torch.equal(forward(batch).hidden, expected.hidden)
        assert torch.equal(network.slots, plain.slots)
    assert graphs.replayed[:8] == [1, 20, 4, 4, 20, 20, 1, 16]
    assert len(graphs.recorded) == len(set(graphs.recorded))


@pytest.mark.parametrize("at_start", [False, True])
def test_sizes_that_were_asked_for_are_captured_and_no_others(at_start: bool) -> None:
    rng, graphs, network, plain = random.Random(0), FakeGraphs(), Network(), Network()
    forward = make(network, graphs, at_start=at_start, sizes=[12, 2, 5, 5])
    for count in (1, 3, 12, 13, 20, 5):
        batch = decodes(rng, count)
        assert torch.equal(forward(batch).hidden, plain(batch).hidden)
    assert graphs.replayed == [2, 5, 12, 5], "larger batches run eagerly"
    assert graphs.recorded == ([12, 5, 2] if at_start else [2, 5, 12])


def test_padding_is_empty() -> None:
    network, rng = Network(), random.Random(0)
    forward = make(network, FakeGraphs())
    for count in (5, 18, 7, 5):
        forward(decodes(rng, count))
    batch = network.calls[-1]
    assert batch.slot_mapping[:, 5:].tolist() == [[-1] * 3]
    assert batch.seq_lens[5:].tolist() == [0] * 3
    assert batch.query_start_loc.tolist() == list(range(9))
    assert (batch.num_decodes, batch.max_seq_len) == (8, MAX_LEN)


def test_recording_touches_no_block() -> None:
    """Not even those of a larger batch before, whose inputs are still in the buffers."""
    network, rng = Network(), random.Random(0)
    forward = make(network, FakeGraphs())
    forward(decodes(rng, 20))
    network.written.clear()
    forward(decodes(rng, 2))
    assert network.written[:2] == [[-1, -1]] * 2
    assert min(network.written[2]) >= 0


def test_all_graphs_at_start_the_largest_first() -> None:
    graphs = FakeGraphs()
    forward = make(Network(), graphs, at_start=True)
    assert graphs.recorded == [20, 16, 8, 4, 2, 1]
    assert forward.capture_seconds > 0.0
    forward(decodes(random.Random(0), 6))
    assert (graphs.recorded[6:], graphs.replayed) == ([], [8])


@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 6), ({"sizes": [8]}, 1), ({"sizes": [2, 8]}, 2), ({"sizes": [2, 8], "adapters": True}, 4)],
)
def test_what_all_graphs_will_take_is_known_from_two(options: dict[str, Any], count: int) -> None:
    """Of a device on which the first graph brings a pool of a million bytes, and each takes a thousand of its own."""
    graphs, measured = FakeGraphs(), make(Network(), FakeGraphs(), at_start=True, **options)
    forward = make(Network(), graphs, **options)
    inputs = sum(array.nbytes for array in forward._inputs.arrays())
    found = forward.total_bytes(lambda: 5_000_000 + 1_000_000 * bool(graphs.recorded) + 1000 * len(graphs.recorded))
    assert found == inputs + 1_000_000 + 1000 * len(measured._graphs)
    assert len(measured._graphs) == count
    assert len(graphs.recorded) == min(2, count) and graphs.recorded[0] == max(forward._sizes)


@pytest.mark.parametrize("at_start", [False, True])
def test_steps_with_adapters_have_graphs_of_their_own(at_start: bool) -> None:
    graphs, network, rng = FakeGraphs(), Network(), random.Random(0)
    forward = make(network, graphs, at_start=at_start, sizes=[2, 8], adapters=True)
    for slots in ([-1] * 7, [0, -1, 3], [-1] * 6, [2] * 8, [1] * 5):
        batch = decodes(rng, len(slots))
        batch.adapters, batch.has_adapters = torch.tensor(slots, dtype=torch.int32), max(slots) >= 0
        forward(batch)
        seen = network.calls[-1]
        assert seen.adapters.tolist() == slots + [-1] * (8 - len(slots))
        assert seen.has_adapters == batch.has_adapters
    assert graphs.recorded == ([8, 8, 2, 2] if at_start else [8, 8])


def test_a_step_with_a_prompt_is_not_replayed() -> None:
    graphs, network = FakeGraphs(), Network()
    forward = make(network, graphs)
    batch = decodes(random.Random(0), 3)
    batch.num_decodes, batch.query_start_loc = 1, torch.tensor([0, 1, 3], dtype=torch.int32)
    forward(batch)
    batch = decodes(random.Random(0), 3)
    batch.all_sampled = False
    forward(batch)
    assert len(network.calls) == 2
    assert graphs.recorded == graphs.replayed == []


@pytest.mark.gpu
def test_cuda_graphs_repeat_what_was_recorded() -> None:
    record = CudaGraphs()
    x, y = torch.zeros(3, device="cuda"), torch.zeros(5, device="cuda")
    calls = []

    def run(value: Tensor) -> ForwardOutput:
        calls.append(value)
        return ForwardOutput(value * 2 + 1)

    replays = [record(partial(run, value)) for value in (x, y)]
    assert len(calls) == 4
    for value, (replay, output) in zip((x, y), replays, strict=True):
        for number in (3.0, 4.0):
            value.fill_(number)
            replay()
            assert output.hidden.tolist() == [2 * number + 1] * len(value)
