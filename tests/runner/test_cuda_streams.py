"""What is queued on a GPU's streams: moves of blocks in any order that the streams allow, copies of inputs, times.

The device is a fake that does queued work late, in a random order of all that streams and events leave open.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo.config.kv_spec import GroupShape
from octavo.core.plan import StepPlan, TableChange
from octavo.kernels.interface import LayerCache
from octavo.kernels.torch_backend import PinnedSend
from octavo.runner.cuda import CudaTimers, StreamedCacheEngine


class _Event:
    """Done when the stream that it was recorded on has come to it; its time is then the number of pieces done."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.done = True  # as if it had been recorded on an idle stream
        self.time = -1

    def record(self, stream: _Stream | None = None) -> None:
        self.done = False
        (stream or self.cuda.current).work.append(self._come)

    def _come(self) -> bool:
        self.done, self.time = True, self.cuda.pieces_done
        return True

    def query(self) -> bool:
        self.cuda.run_some()
        return self.done

    def synchronize(self) -> None:
        while not self.done:
            self.cuda.run_one()

    def elapsed_time(self, end: _Event) -> float:
        assert self.done
        assert end.done
        return float(end.time - self.time)


class _Stream:
    """Pieces of work; each says whether it could be done."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.work: deque[Callable[[], bool]] = deque()
        cuda.streams.append(self)

    def wait_event(self, event: _Event) -> None:
        self.work.append(lambda: event.done)

    def wait_stream(self, other: _Stream) -> None:
        event = _Event(self.cuda)
        event.record(other)
        self.wait_event(event)


class FakeCuda:
    """The part of ``torch.cuda`` that the runner uses."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.streams: list[_Stream] = []
        self.current = _Stream(self)
        self.pieces_done = 0

    def Stream(self) -> _Stream:
        return _Stream(self)

    def Event(self, enable_timing: bool = False) -> _Event:
        return _Event(self)

    def current_stream(self) -> _Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self) -> None:
        while any(stream.work for stream in self.streams):
            self.run_one()

    # --- the device ---

    def queue(self, piece: Callable[[], None]) -> None:
        def do() -> bool:
            piece()
            self.pieces_done += 1
            return True

        self.current.work.append(do)

    def run_one(self) -> None:
        """Tries the next piece of some stream."""
        stream = self.rng.choice([stream for stream in self.streams if stream.work])
        if stream.work[0]():
            stream.work.popleft()

    def run_some(self) -> None:
        for _ in range(self.rng.randrange(12)):
            if any(stream.work for stream in self.streams):
                self.run_one()


class FakeKernels:
    """Queues moves of blocks, each pair a piece of its own."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def swap_blocks(self, sources: list[Any], targets: list[Any], pairs: list[tuple[int, int]]) -> None:
        def move(source: int, target: int) -> None:
            targets[0][target] = sources[0][source]

        for source, target in pairs:
            self.cuda.queue(partial(move, source, target))

    def copy_blocks(self, caches: list[Any], pairs: list[tuple[int, int]]) -> None:
        def copy() -> None:
            values = [caches[0][source] for source, _ in pairs]
            for (_, target), value in zip(pairs, values, strict=True):
                caches[0][target] = value

        self.cuda.queue(copy)

    def read_blocks(self, caches: list[Any], blocks: list[int], rows: list[int]) -> None:
        def read(i: int, block: int) -> None:
            rows[i] = caches[0][block]

        for i, block in enumerate(blocks):
            self.cuda.queue(partial(read, i, block))

    def write_blocks(self, caches: list[Any], blocks: list[int], rows: list[int]) -> None:
        def write(block: int, value: int) -> None:
            caches[0][block] = value

        for block, value in zip(blocks, rows, strict=True):
            self.cuda.queue(partial(write, block, value))


class FakeStore:
    """A ``BlockStore`` of numbers: what was saved, and what is to be placed, by name."""

    def __init__(self, kernels: FakeKernels) -> None:
        self.kernels = kernels
        self.saved: list[tuple[bytes, list[int], int]] = []
        self.values: dict[int, int] = {}

    def save(self, caches: list[Any], group: int, blocks: list[int], digests: list[bytes]) -> None:
        rows = [0] * len(blocks)
        self.saved += [(digest, rows, i) for i, digest in enumerate(digests)]
        self.kernels.read_blocks(caches, blocks, rows)

    def place(self, caches: list[Any], group: int, blocks: list[int], places: list[tuple[int, int]]) -> None:
        self.kernels.write_blocks(caches, blocks, [self.values[fetch_id] for fetch_id, _ in places])


BLOCKS, HOST_BLOCKS = 14, 10


#: Tables of cross attention.
NO_CONTEXTS = np.zeros((0, 0), np.int32)


def tables(*rows: list[int]) -> NDArray[np.int32]:
    """Block tables of one group, as the runner gives them: rows of equal length."""
    longest = max(map(len, rows), default=0)
    return np.array([[row + row[:1] * (longest - len(row)) for row in rows]], dtype=np.int32)


def make(cuda: FakeCuda) -> StreamedCacheEngine:
    """One layer, of which a block is a number."""

    def caches(blocks: Sequence[int]) -> list[LayerCache]:
        return cast(list[LayerCache], [[0] * blocks[0]])

    kernels = FakeKernels(cuda)
    layers: Any = SimpleNamespace(
        kernels=kernels, make=caches, make_host=caches, shapes=lambda: [GroupShape(8)], stored=lambda caches: caches
    )
    engine = StreamedCacheEngine(layers, [BLOCKS], [HOST_BLOCKS], cuda=cuda)
    engine.store = cast(Any, FakeStore(kernels))
    return engine


class Model:
    """Sequences that come, grow, leave for the host and come back, and find in their blocks what they put there."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cuda = FakeCuda(self.rng)
        self.engine = make(self.cuda)
        self.free, self.host_free = list(range(BLOCKS)), list(range(HOST_BLOCKS))
        #: Blocks of each sequence on the device, or on the host, and what they hold.
        self.tables: dict[int, list[int]] = {}
        self.away: dict[int, list[int]] = {}
        self.contents: dict[int, list[int]] = {}
        self.numbers = iter(range(1, 10**6))
        self.wrong: list[str] = []
        self.swaps = self.stored = 0

    def step(self, number: int) -> None:
        rng, plan, host_freed, shared = self.rng, StepPlan(step=number), [], []
        store = cast(Any, self.engine.store)
        for table, contents in ((self.tables[s], self.contents[s]) for s in self.tables if rng.random() < 0.2):
            plan.blocks_to_store.append((table[0], b"%d" % contents[0]))
            self.stored += 1
        for seq in [s for s in self.tables if rng.random() < 0.25]:
            table = self.tables.pop(seq)
            if rng.random() < 0.7 and len(self.host_free) >= len(table):
                self.away[seq] = [self.host_free.pop(rng.randrange(len(self.host_free))) for _ in table]
                plan.blocks_to_swap_out += zip(table, self.away[seq], strict=True)
            else:
                del self.contents[seq]
            self.free += table
        gone = {host for _, host in plan.blocks_to_swap_out}
        for seq in [s for s in self.away if rng.random() < 0.4 and self.away[s][0] not in gone]:
            if len(self.free) >= len(self.away[seq]):
                hosts = self.away.pop(seq)
                self.tables[seq] = self._take(len(hosts))
                plan.blocks_to_swap_in += zip(hosts, self.tables[seq], strict=True)
                plan.table_changes.append(TableChange(seq, 0, list(self.tables[seq])))
                host_freed += hosts
        arrived = {block for _, block in plan.blocks_to_swap_in}
        for seq, table in self.tables.items():
            if self.free and table[-1] not in arrived and rng.random() < 0.2:  # copy on write
                (block,) = self._take(1)
                plan.blocks_to_copy.append((table[-1], block))
                plan.table_changes.append(TableChange(seq, len(table) - 1, [block]))
                shared.append(table[-1])
                table[-1] = block
        for seq, table in self.tables.items():
            if self.free and rng.random() < 0.3:
                plan.table_changes.append(TableChange(seq, len(table), self._take(1)))
                table += plan.table_changes[-1].blocks
                self.contents[seq].append(next(self.numbers))
        if len(self.free) > 1 and rng.random() < 0.2:  # begins with a block from the stores
            self.tables[number], self.contents[number] = self._take(2), [next(self.numbers), next(self.numbers)]
            store.values[number] = self.contents[number][0]
            plan.blocks_fetched.append((number, 0, self.tables[number][0]))
            plan.table_changes.append(TableChange(number, 0, list(self.tables[number])))
        elif self.free and rng.random() < 0.6:
            self.tables[number], self.contents[number] = self._take(1), [next(self.numbers)]
            plan.table_changes.append(TableChange(number, 0, list(self.tables[number])))
        self.swaps += len(plan.blocks_to_swap_out) + len(plan.blocks_to_swap_in)
        self.engine.move(plan)
        self.engine.computes_over(tables(*self.tables.values()), NO_CONTEXTS)
        for seq, table in self.tables.items():
            self._compute(seq, list(table), list(self.contents[seq]))
        self.host_free += host_freed
        self.free += shared
        self.cuda.run_some()

    def _take(self, count: int) -> list[int]:
        return [self.free.pop(self.rng.randrange(len(self.free))) for _ in range(count)]

    def _compute(self, seq: int, table: list[int], contents: list[int]) -> None:
        """The sequence reads all of its blocks but the last, and writes that."""
        blocks = cast(list[int], self.engine.device[0])

        def compute() -> None:
            found = [blocks[block] for block in table[:-1]]
            if found != contents[:-1]:
                self.wrong.append(f"sequence {seq} found {found} in {table[:-1]}, not {contents[:-1]}")
            blocks[table[-1]] = contents[-1]

        self.cuda.queue(compute)


@pytest.mark.parametrize("seed", range(60))
def test_no_order_of_the_device_spoils_a_block(seed: int) -> None:
    model = Model(seed)
    for number in range(60):
        model.step(number)
    model.cuda.synchronize()
    assert model.wrong == []
    assert model.swaps > 20
    saved = cast(Any, model.engine.store).saved
    assert [b"%d" % rows[i] for _, rows, i in saved] == [digest for digest, _, _ in saved]
    assert len(saved) == model.stored > 10


def plan(**fields: Any) -> StepPlan:
    return StepPlan(step=1, **fields)


def idle_cuda() -> FakeCuda:
    """Does nothing before it is waited for."""
    cuda = FakeCuda(random.Random(0))
    cuda.run_some = lambda: None  # type: ignore[method-assign]
    return cuda


def runs_at_once(cuda: FakeCuda) -> bool:
    """Whether what is queued on the compute stream now can be done while all other streams stand still."""
    done: list[bool] = []
    cuda.queue(lambda: done.append(True))
    work = cuda.current.work
    while work and work[0]():
        work.popleft()
    return bool(done)


def test_a_step_waits_only_for_the_swaps_that_it_needs() -> None:
    cuda = idle_cuda()
    engine = make(cuda)
    cast(Any, engine.store).values[7] = 70
    engine.move(plan(blocks_to_swap_out=[(1, 0), (2, 1)], table_changes=[TableChange(7, 0, [3])]))
    assert runs_at_once(cuda), "no step needs blocks 1 and 2 yet"
    engine.move(plan(table_changes=[TableChange(7, 1, [4, 5])], blocks_to_copy=[(1, 6)]))
    assert runs_at_once(cuda), "block 1 is only read"
    engine.move(plan(table_changes=[TableChange(8, 0, [9, 2])]))
    assert not runs_at_once(cuda)
    cuda.synchronize()
    for needs in (
        {"blocks_to_copy": [(5, 1)]},
        {"blocks_to_swap_in": [(4, 8)]},
        {"table_changes": [TableChange(7, 2, [1])]},
        {"blocks_fetched": [(7, 0, 1)]},
    ):
        engine.move(plan(blocks_to_swap_out=[(1, 0)], **needs))
        assert not runs_at_once(cuda)
        cuda.synchronize()


def travels_at_once(engine: StreamedCacheEngine, cuda: FakeCuda, host: int, block: int) -> bool:
    """Whether a block comes in while the compute stream stands still."""
    engine.move(plan(blocks_to_swap_in=[(host, block)]))
    work = cast(Any, engine._stream).work
    while work and work[0]():
        work.popleft()
    return not work


def test_a_block_travels_beside_the_steps_before_if_none_of_them_uses_where_it_goes() -> None:
    cuda = idle_cuda()
    engine = make(cuda)
    engine.move(plan(blocks_to_copy=[(1, 2)]))
    engine.computes_over(tables([3, 4], [5]), NO_CONTEXTS)
    cuda.queue(lambda: None)
    for used in (1, 2, 3, 4, 5):
        assert not travels_at_once(engine, cuda, 0, used)
        cuda.synchronize()
        engine.move(plan(blocks_to_copy=[(1, 2)]))
        engine.computes_over(tables([3, 4], [5]), NO_CONTEXTS)
        cuda.queue(lambda: None)
    assert travels_at_once(engine, cuda, 0, 6)
    assert not runs_at_once(cuda) or engine._swapped.done, "its own step waits for it"


def test_a_block_does_not_travel_to_where_one_is_still_stored_from_or_fetched_to() -> None:
    cuda = idle_cuda()
    engine = make(cuda)
    store = cast(Any, engine.store)
    store.values[7] = 70
    engine.move(plan(blocks_to_store=[(1, b"")], blocks_fetched=[(7, 0, 2)]))
    engine.computes_over(tables([3]), NO_CONTEXTS)
    for used in (1, 2):
        assert not travels_at_once(engine, cuda, 0, used)
        cuda.synchronize()
        engine.move(plan(blocks_to_store=[(1, b"")], blocks_fetched=[(7, 0, 2)]))
    assert travels_at_once(engine, cuda, 0, 6)
    cuda.synchronize()
    cast(list[int], engine.device[0])[5] = 50
    engine.move(plan(blocks_to_store=[(5, b"old")], blocks_to_swap_in=[(0, 5)]))
    work = cast(Any, engine._stream).work
    assert not work[0](), "what is in the block is read first"
    cuda.synchronize()
    (_, rows, i) = store.saved[-1]
    assert rows[i] == 50


def test_a_block_that_is_to_leave_waits_for_the_step_that_writes_it() -> None:
    cuda = idle_cuda()
    engine = make(cuda)
    engine.move(plan())
    engine.computes_over(tables([3]), NO_CONTEXTS)
    cuda.queue(lambda: None)
    engine.move(plan(blocks_to_swap_out=[(3, 0)]))
    stream = cast(Any, engine._stream)
    assert not stream.work[0](), "the compute stream has not come so far"


def test_every_swap_is_timed_even_one_that_outlasts_its_step() -> None:
    cuda = idle_cuda()
    engine = make(cuda)
    assert engine.move(plan(blocks_to_copy=[(1, 2)])) is None
    needed = engine.move(plan(blocks_to_swap_out=[(1, 0), (2, 1), (3, 2)], blocks_to_swap_in=[(4, 8)]))
    assert needed is not None
    assert engine.take_swaps() == [], "it is on its way"
    cuda.synchronize()
    assert needed() == pytest.approx(4 / 1e3)  # a piece a millisecond
    assert engine.move(plan(blocks_to_swap_out=[(1, 0)])) is None, "the step does not wait for it"
    assert engine.take_swaps() == [(32, pytest.approx(4 / 1e3))]
    cuda.synchronize()
    engine.move(plan())
    assert engine.take_swaps() == [(8, pytest.approx(1 / 1e3))]


# --- inputs ---------------------------------------------------------------------------------------------------------


class LoggedEvent:
    """Notes when it is recorded and waited for."""

    def __init__(self, log: list[tuple[str, int]], number: int) -> None:
        self.log, self.number = log, number

    def record(self) -> None:
        self.log.append(("copy", self.number))

    def synchronize(self) -> None:
        self.log.append(("wait", self.number))


class LoggedCuda:
    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.events = 0

    def Event(self) -> LoggedEvent:
        self.events += 1
        return LoggedEvent(self.log, self.events)


def test_arrays_arrive_as_they_are() -> None:
    send, rng = PinnedSend(torch.device("cpu"), LoggedCuda()), np.random.default_rng(0)
    for size in (0, 1, 3, 40, 3000, 70_000, 2):
        longs = [rng.integers(-(2**62), 2**62, size), rng.integers(0, 9, size + 1)]
        ints = [
            rng.integers(-(2**31), 2**31, (size + 1, 3), dtype=np.int32),
            rng.integers(0, 9, (5, size), dtype=np.int32)[:, ::2],
            rng.integers(0, 9, size, dtype=np.int32),
        ]
        sent: Sequence[NDArray[Any]] = [*longs, *ints]
        found = send(sent)
        assert [tensor.dtype for tensor in found] == [torch.int64] * 2 + [torch.int32] * 3
        for tensor, array in zip(found, sent, strict=True):
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 16 == 0
            assert np.array_equal(tensor.numpy(), array)


def test_a_buffer_is_filled_again_after_its_last_copy() -> None:
    cuda = LoggedCuda()
    send = PinnedSend(torch.device("cpu"), cuda)
    (first,) = send([np.arange(5)])
    for size in (4, 9, 100_000, 3):
        send([np.full(size, 7)])
    copies = [("copy", 1), ("copy", 2), ("wait", 1), ("copy", 3), ("wait", 2), ("copy", 4), ("wait", 3), ("copy", 5)]
    assert cuda.log == copies
    assert first.tolist() == [0, 1, 2, 3, 4]


# --- times ----------------------------------------------------------------------------------------------------------


def test_time_on_the_device_and_without_work() -> None:
    cuda = FakeCuda(random.Random(3))
    timers = CudaTimers(cuda)

    def queue(pieces: int) -> None:
        for _ in range(pieces):
            cuda.queue(lambda: None)

    stop = timers.start()
    queue(5)
    first = stop()
    queue(2)
    stop = timers.start()
    queue(3)
    second = stop()
    assert first.wait() == (pytest.approx(5 / 1e3), 0.0)
    assert second.wait() == (pytest.approx(3 / 1e3), pytest.approx(2 / 1e3))
