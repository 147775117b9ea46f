"""Blocks that go to KV stores and come back, beside steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.config.engine_config import make_config
from octavo.config.kv_spec import KVSpec, group_layers
from octavo.core.errors import ConfigError
from octavo.core.plan import Fetch, StepPlan, StepResult, TableChange
from octavo.executor.uniproc import without_clock
from octavo.kernels import load_kernels
from octavo.kvstore.namespace import store_key
from octavo.kvstore.store import KVStore
from octavo.runner.block_store import BlockStore, BufferPool, Stores, namespace_facts
from octavo.runner.cache_engine import CacheEngine, DraftedBlocks, KVLayers
from octavo.runner.loaded_model import LoadedModel
from octavo.runner.preparers import WorkerPreparations
from tests.runner.memory_store import MemoryStore
from tests.runner.plan_worker import PROMPT, Worker, greedy, introduce, samples

FULL, WINDOWED = KVSpec("full", 2, 8, "float32"), KVSpec("sliding", 1, 8, "float32", 4)
BLOCK_SIZE, BLOCKS, HOST_BLOCKS = 4, 8, 4
#: Numbers that plans give the blocks: those of the second group come after those of the first.
SECOND = BLOCKS
NAMESPACE = bytes(range(32))
MIB = 1 << 20


@pytest.fixture(params=["cpu", "reference"])
def kernels(request: pytest.FixtureRequest) -> Any:
    if request.param == "cpu":
        pytest.importorskip("octavo._cpu")
    return load_kernels(request.param, "cpu")


class Engine:
    """A KV cache of two groups with stores behind it. Each block of a layer is full of a number of its own."""

    def __init__(self, kernels: Any, *tiers: KVStore, drafter: Sequence[KVSpec] = (), **options: Any) -> None:
        groups = group_layers([FULL, WINDOWED, FULL])
        self.layers = KVLayers(kernels, groups, BLOCK_SIZE, drafter, stores_drafter=bool(drafter))
        self.kernels, self.tiers = kernels, tiers
        self.namespaces = [NAMESPACE]
        self.cache = CacheEngine(self.layers, [BLOCKS, BLOCKS], [HOST_BLOCKS, HOST_BLOCKS])
        self.store = self.cache.store = BlockStore(self.layers.stored_bytes(), kernels, self._open, **options)
        self.steps = 0
        for layer, cache in enumerate(self.cache.device):
            for array in (cache.key, cache.value):
                for block in range(BLOCKS):
                    kernels.write(array[block], np.full(array[block].shape, 100 * layer + block + 1))

    def _open(self, known: bytes | None) -> Stores | None:
        return None if self.namespaces[-1] == known else Stores(self.namespaces[-1], self.tiers)

    def step(self, **fields: Any) -> StepResult:
        """What ``ModelRunner.submit`` does around moves."""
        self.steps += 1
        plan, result = StepPlan(step=self.steps, **fields), StepResult(self.steps)
        self.store.begin(plan.fetch)
        WorkerPreparations({}).apply(plan, result, self.store.pending)
        self.cache.move(plan)
        result.not_stored = self.store.take_refused()
        self.store.drop(plan.drop_fetches)
        self.store.report(result)
        return result

    def fetch(self, fetch_id: int, *blocks: tuple[int, bytes]) -> int:
        """The number of blocks that a fetch reports."""
        result = self.step(fetch=[Fetch(fetch_id, list(blocks))])
        return self.wait_for(lambda: self.step(awaits_prepared=True).fetched, result.fetched)[fetch_id]

    def wait_for(self, look: Callable[[], Any], first: Any = None) -> Any:
        end = time.monotonic() + 20
        while not (found := first or look()):
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.001)
        return found

    def flush(self) -> None:
        """Waits until all is written."""
        self.wait_for(lambda: self.store._written.room == self.store._written.limit)

    def numbers(self, group: int) -> list[int]:
        """The number that each device block holds, in every layer of its group alike; -1: they differ."""
        found = []
        for layer, cache in enumerate(self.cache.device):
            if cache.group == group:
                arrays = [
                    self.kernels.to_numpy(array).reshape(BLOCKS, -1).astype(int) for array in (cache.key, cache.value)
                ]
                assert all((values == values[:, :1]).all() for values in arrays)
                found += [(values[:, 0] - 100 * layer - 1).tolist() for values in arrays]
        return found[0] if all(numbers == found[0] for numbers in found) else [-1]


@pytest.fixture
def make(kernels: Any) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make_engine(*tiers: KVStore, **options: Any) -> Engine:
        engines.append(Engine(kernels, *tiers, **options))
        return engines[-1]

    yield make_engine
    for engine in engines:
        for tier in engine.tiers:
            if isinstance(tier, MemoryStore):
                tier.gate.set()
        engine.store.close()


def test_blocks_of_all_groups_come_back_in_another_engine(make: Any) -> None:
    store = MemoryStore()
    first = make(store)
    first.step(blocks_to_store=[(2, b"two"), (SECOND + 5, b"five"), (3, b"three"), (0, b"zero")])
    first.flush()
    second = make(store)
    wanted = [(0, b"three"), (1, b"five"), (0, b"zero"), (0, b"two")]
    assert second.fetch(1, *wanted) == 4
    assert second.numbers(0) == second.numbers(1) == [*range(BLOCKS)], "nothing is placed before a plan says so"
    second.step(blocks_fetched=[(1, 0, 7), (1, 1, SECOND + 1), (1, 3, 5)], drop_fetches=[1])
    assert second.numbers(0) == [0, 1, 2, 3, 4, 2, 6, 3]
    assert second.numbers(1) == [0, 5, 2, 3, 4, 5, 6, 7]
    assert second.store._fetched.room == second.store._fetched.limit


def test_a_step_stores_first_and_places_between_swaps_and_copies(make: Any) -> None:
    engine = make(MemoryStore())
    engine.step(blocks_to_store=[(6, b"six")])
    engine.flush()
    assert engine.fetch(1, (0, b"six")) == 1
    engine.step(blocks_to_swap_out=[(7, 0)])
    engine.step(
        blocks_to_store=[(1, b"one")],
        blocks_to_swap_out=[(2, 1)],
        blocks_to_swap_in=[(0, 1)],
        blocks_fetched=[(1, 0, 2)],
        drop_fetches=[1],
        blocks_to_copy=[(2, 3), (1, 0)],
    )
    assert engine.numbers(0) == [7, 7, 6, 6, 4, 5, 6, 7]
    engine.flush()
    assert engine.fetch(2, (0, b"one")) == 1
    engine.step(blocks_fetched=[(2, 0, 4)], blocks_to_swap_in=[(1, 5)], drop_fetches=[2])
    assert engine.numbers(0) == [7, 7, 6, 6, 1, 2, 6, 7]


def test_a_fetch_ends_at_the_first_block_that_is_missing(make: Any) -> None:
    engine = make(MemoryStore())
    engine.step(blocks_to_store=[(1, b"one"), (2, b"two"), (SECOND + 1, b"one")])
    engine.flush()
    assert engine.fetch(1, (0, b"one"), (0, b"lost"), (0, b"two")) == 1
    assert engine.fetch(2, (1, b"two"), (0, b"two")) == 0, "the group is a part of the name"
    assert engine.fetch(3, (1, b"one"), (0, b"two")) == 2
    with pytest.raises(RuntimeError, match="fetch 1 that were not fetched"):
        engine.step(blocks_fetched=[(1, 1, 4)])
    with pytest.raises(RuntimeError, match="fetch 9 that were not fetched"):
        engine.step(blocks_fetched=[(9, 0, 4)])


def test_a_fetch_is_reported_once_and_not_if_it_was_dropped(make: Any) -> None:
    store = MemoryStore()
    engine = make(store)
    assert engine.fetch(1, (0, b"x")) == 0
    assert not engine.step().fetched
    store.gate.clear()
    engine.step(fetch=[Fetch(2, [(0, b"x")]), Fetch(3, [(0, b"x")])])
    engine.step(drop_fetches=[2, 3, 4])
    store.gate.set()
    assert engine.fetch(5, (0, b"x")) == 0, "later ones come after those that were dropped"
    assert engine.store.pending == []


def test_seconds_of_fetches_stand_beside_their_blocks(make: Any) -> None:
    engine = make(MemoryStore())
    engine.step(blocks_to_store=[(1, b"one")])
    engine.flush()
    engine.step(fetch=[Fetch(1, [(0, b"one")]), Fetch(2, [(0, b"two")])])
    results: list[StepResult] = []
    while sum(len(result.fetched) for result in results) < 2:
        results.append(engine.step(awaits_prepared=True))
    assert [pair for result in results for pair in result.fetched.items()] == [(1, 1), (2, 0)]
    times = [time for result in results for time in result.fetch_times]
    assert [count for count, _ in times] == [1, 0]
    assert all(0 < seconds < 10 for _, seconds in times)


def test_all_fetches_of_a_plan_are_looked_up_before_one_is_read(make: Any) -> None:
    calls: list[str] = []

    class Recorded(MemoryStore):
        def contains(self, keys: Sequence[bytes]) -> int:
            calls.append("contains")
            return super().contains(keys)

        def read(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
            calls.append("read")
            return super().read(keys, values)

    engine = make(Recorded())
    engine.step(blocks_to_store=[(1, b"one")])
    engine.flush()
    engine.step(fetch=[Fetch(1, [(0, b"one")]), Fetch(2, [(0, b"x")]), Fetch(3, [(0, b"one")])])
    assert [fetch.done.result(10)[0] for fetch in engine.store._fetches.values()] == [1, 0, 1]
    assert calls == [*["contains"] * 3, *["read"] * 2]


def test_the_tiers_complete_each_other_and_the_nearest_gets_all(make: Any) -> None:
    disk, shared = MemoryStore("disk"), MemoryStore("shared")
    engine = make(disk, shared)
    engine.step(blocks_to_store=[(i, b"%d" % i) for i in range(6)])
    engine.flush()
    assert disk.values == shared.values
    assert len(disk.values) == 6
    keys = [store_key(NAMESPACE, 0, b"%d" % i) for i in range(6)]
    for i in (1, 2, 5):
        del disk.values[keys[i]]
    for i in (0, 3, 5):
        del shared.values[keys[i]]
    assert engine.fetch(1, *((0, b"%d" % i) for i in range(6))) == 5
    engine.step(blocks_fetched=[(1, i, 7 - i) for i in range(5)], drop_fetches=[1])
    assert engine.numbers(0) == [0, 1, 2, 4, 3, 2, 1, 0]
    engine.flush()
    assert disk.values.keys() == set(keys[:5])


def test_what_does_not_fit_is_not_stored_and_reported(make: Any) -> None:
    store = MemoryStore()
    store.gate.clear()
    engine = make(store, write_bytes=MIB)
    engine.step(blocks_to_store=[(1, b"one"), (2, b"two")])  # takes a buffer
    assert engine.step(blocks_to_store=[(3, b"three")]).not_stored == [(0, b"three")]
    assert engine.numbers(0) == [*range(BLOCKS)]
    store.gate.set()
    engine.wait_for(lambda: [(tier.written, tier.dropped) for tier in engine.step().stores] == [(2, 0)])
    assert not engine.step(blocks_to_store=[(3, b"three")]).not_stored
    engine.wait_for(lambda: [(tier.written, tier.dropped) for tier in engine.step().stores] == [(3, 0)])


def test_a_fetch_waits_for_blocks_that_are_being_written(make: Any) -> None:
    store = MemoryStore()
    store.gate.clear()
    engine = make(store)
    engine.step(blocks_to_store=[(1, b"one")])
    engine.step(fetch=[Fetch(1, [(0, b"one")])])
    assert not engine.store.pending[0].done()
    store.gate.set()
    assert engine.wait_for(lambda: engine.step(awaits_prepared=True).fetched) == {1: 1}


def test_a_fetch_waits_for_memory_and_takes_no_more_than_there_is(make: Any) -> None:
    block = 4 * MIB  # two layers, keys and values
    spec = KVSpec("full", 1, block // 4 // 4 // BLOCK_SIZE, "float32")
    store = MemoryStore()
    kernels = load_kernels("reference", "cpu")
    layers = KVLayers(kernels, group_layers([spec, spec]), BLOCK_SIZE)
    assert layers.stored_bytes() == [block]
    waiting = BlockStore([block], kernels, lambda known: Stores(NAMESPACE, [store]), fetch_bytes=12 * MIB)
    names = [b"%d" % i for i in range(5)]
    for name in names:
        store.values[store_key(NAMESPACE, 0, name)] = bytes(block)

    def result() -> dict[int, int]:
        report = StepResult(1)
        waiting.report(report)
        return report.fetched

    waiting.begin([Fetch(1, [(0, name) for name in names])])
    waiting.pending[0].result(10)
    assert result() == {1: 3}
    waiting.begin([Fetch(2, [(0, names[0])])])
    time.sleep(0.05)
    assert result() == {}
    waiting.drop([1])
    waiting.pending[0].result(10)
    assert result() == {2: 1}
    waiting.close()


def test_buffers_are_used_again_once_copies_of_them_have_ended() -> None:
    made: list[int] = []
    finished: list[str] = []

    def allocate(count: int) -> Any:
        made.append(count)
        return np.empty(count, np.uint8)

    pool = BufferPool(4 * MIB, allocate)
    first, second = pool.take(3 * MIB - 5, wait=False), pool.take(10, wait=False)
    assert first is not None
    assert second is not None
    assert made == [3 * MIB, MIB]
    assert pool.room == 0
    assert pool.take(1, wait=False) is None
    first.readers.append(lambda: finished.append("first"))
    pool.give(first)
    assert finished == []
    assert pool.take(2 * MIB, wait=False) is first
    assert finished == ["first"]
    pool.give(first)
    assert pool.take(MIB, wait=False) is not first, "a third of it is too little"
    assert made == [3 * MIB, MIB, MIB]
    waiting = threading.Thread(target=lambda: finished.append(str(pool.take(4 * MIB, wait=True))))
    waiting.start()
    pool.close()
    waiting.join(10)
    assert finished == ["first", "None"]


def test_other_weights_have_other_blocks(make: Any) -> None:
    engine = make(MemoryStore())
    engine.step(blocks_to_store=[(1, b"one")])
    engine.flush()
    engine.store.distrust_weights()
    engine.step(blocks_to_store=[(2, b"two")])
    assert engine.fetch(1, (0, b"one")) == 0
    engine.store.trust_weights()  # as they were
    assert engine.fetch(2, (0, b"one"), (0, b"two")) == 1
    engine.store.distrust_weights("somebody has written to them")
    engine.namespaces.append(bytes(32))
    engine.store.trust_weights()
    engine.step(blocks_to_store=[(2, b"two")])
    engine.flush()
    assert engine.fetch(3, (0, b"one")) == 0
    assert engine.fetch(4, (0, b"two")) == 1


def test_memory_is_freed_once_all_is_written(make: Any) -> None:
    store = MemoryStore()
    engine = make(store)
    store.gate.clear()
    engine.step(blocks_to_store=[(1, b"one")])
    threading.Timer(0.02, store.gate.set).start()
    engine.store.free()
    assert len(store.values) == 1
    engine.flush()
    assert not engine.store._written._free


def test_stores_that_cannot_be_opened_are_off(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = make()
    engine.namespaces = []  # raises IndexError
    engine.store.trust_weights()
    assert engine.fetch(1, (0, b"one")) == 0
    assert "the KV stores are off: IndexError" in caplog.text


def test_closing_writes_what_waits_and_takes_no_longer_than_it_may(make: Any) -> None:
    store = MemoryStore()
    engine = make(store)
    for i in range(BLOCKS):
        engine.step(blocks_to_store=[(i, b"%d" % i)])
    engine.store.close()
    assert len(store.values) == BLOCKS
    assert store.closed
    hanging = MemoryStore()
    engine = make(hanging)
    hanging.gate.clear()
    engine.step(blocks_to_store=[(1, b"one")])
    start = time.monotonic()
    engine.store.close(0.1)
    assert time.monotonic() - start < 2


def test_a_stage_without_layers_of_a_group_has_its_blocks() -> None:
    """A pipeline stage may have none, and says of the others' blocks that it has them."""
    kernels, store = load_kernels("reference", "cpu"), MemoryStore()
    spec = group_layers([FULL, WINDOWED], range(1, 2))
    layers = KVLayers(kernels, spec, BLOCK_SIZE)
    cache = CacheEngine(layers, [BLOCKS, BLOCKS], [0, 0])
    cache.store = blocks = BlockStore(layers.stored_bytes(), kernels, lambda known: Stores(NAMESPACE, [store]))
    cache.move(StepPlan(step=1, blocks_to_store=[(1, b"one"), (SECOND + 1, b"one")]))
    for count, wanted in ((1, [(0, b"x")]), (3, [(0, b"x"), (1, b"one"), (0, b"y")]), (1, [(0, b"x"), (1, b"z")])):
        blocks.begin([Fetch(count, wanted)])
        assert blocks.pending[-1].result(10)[0] == count
        cache.move(StepPlan(step=2, blocks_fetched=[(count, 0, 3)]))
        report = StepResult(1)
        blocks.report(report)
        blocks.drop([count])
    blocks.close()
    assert len(store.values) == 1


def test_layers_of_a_head_are_kept_and_those_of_a_draft_model_are_not(kernels: Any) -> None:
    groups = group_layers([FULL, FULL])
    with_head = KVLayers(kernels, groups, BLOCK_SIZE, [FULL], stores_drafter=True)
    draft_model = KVLayers(kernels, groups, BLOCK_SIZE, [FULL])
    alone = KVLayers(kernels, groups, BLOCK_SIZE)
    assert draft_model.stored_bytes() == alone.stored_bytes() == [alone.block_bytes()]
    assert with_head.stored_bytes() == [with_head.block_bytes()]
    assert len(with_head.stored(with_head.make([2]))) == 3
    assert len(draft_model.stored(draft_model.make([2]))) == 2


def test_a_draft_model_computes_fetched_blocks_again() -> None:
    batch: Any = type("Batch", (), {"block_size": 4, "first_block": [0, 8]})
    drafted = DraftedBlocks(batch, 0)
    drafted._filled[:] = True
    drafted.apply(StepPlan(step=1, blocks_fetched=[(1, 0, 3)], blocks_to_copy=[(3, 5)]))
    assert np.flatnonzero(~drafted._filled).tolist() == [3, 5]


def test_a_step_without_work_waits_for_a_fetch_and_not_for_long(make: Any) -> None:
    store = MemoryStore()
    engine = make(store)
    assert engine.fetch(1, (0, b"x")) == 0  # the stores are open
    store.gate.clear()
    engine.step(fetch=[Fetch(2, [(0, b"x")])])
    start = time.perf_counter()
    assert not engine.step(awaits_prepared=True).fetched
    assert 0.015 < time.perf_counter() - start < 2
    threading.Timer(0.005, store.gate.set).start()
    end = time.monotonic() + 10
    while not (result := engine.step(awaits_prepared=True)).fetched:
        assert time.monotonic() < end
    assert result.fetched == {2: 0}


# --- a whole worker ---------------------------------------------------------------------------------------------------

COMPILED = pytest.mark.skipif("not __import__('importlib').util.find_spec('octavo._cpu')", reason="not built")


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=COMPILED), "reference"])
def test_a_worker_continues_from_blocks_of_another(
    network: Path, tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    options: dict[str, Any] = {"kernels": backend, "kv_disk": str(tmp_path / "kv")}
    first = Worker(network, **options)
    new, params = introduce(1, PROMPT, greedy(logprobs=3)), greedy(logprobs=3)
    result = first.step(new=[new], table_changes=[TableChange(1, 0, [0, 1, 2])], seq_ids=[1], num_tokens=[len(PROMPT)])
    expected = [samples(result)[1]]
    first.step(blocks_to_store=[(0, b"0" * 16), (1, b"1" * 16)])
    expected += [samples(first.step(seq_ids=[1], num_tokens=[1]))[1]]
    first.runner.close_stores()

    second = Worker(network, **options)
    second.step(fetch=[Fetch(4, [(0, b"0" * 16), (0, b"1" * 16), (0, b"2" * 16)])])
    end = time.monotonic() + 20
    while not (result := second.step(awaits_prepared=True)).fetched:
        assert time.monotonic() < end
    assert result.fetched == {4: 2}
    new = introduce(1, PROMPT, params, num_computed=8)
    result = second.step(
        blocks_fetched=[(4, 0, 20), (4, 1, 11)],
        drop_fetches=[4],
        new=[new],
        table_changes=[TableChange(1, 0, [20, 11, 2])],
        seq_ids=[1],
        num_tokens=[len(PROMPT) - 8],
    )
    found = [samples(result)[1], samples(second.step(seq_ids=[1], num_tokens=[1]))[1]]
    second.assert_same(found, expected)
    second.runner.close_stores()
    third = Worker(network, **options, kv_cache_dtype="bfloat16")
    third.step(fetch=[Fetch(1, [(0, b"0" * 16)])])
    while not (result := third.step(awaits_prepared=True)).fetched:
        assert time.monotonic() < end
    assert result.fetched == {1: 0}, "another type of the cache"
    third.runner.close_stores()


@COMPILED
def test_facts_are_those_that_decide_bits(network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))

    def facts(**options: Any) -> dict[str, Any]:
        runner = Worker(network, **options).runner
        runner.close_stores()
        return namespace_facts(runner.loaded)

    plain = facts(kernels="cpu")
    assert facts(kernels="cpu", num_threads=2, max_num_batched_tokens=32, kv_disk=str(tmp_path / "kv")) == plain
    for options in (
        {"kernels": "cpu", "kv_cache_dtype": "bfloat16"},
        {"kernels": "cpu", "block_size": 8},
        {"kernels": "cpu", "quantization": "int8"},
        {"kernels": "cpu", "load_format": "dummy"},
        {"kernels": "reference"},
    ):
        assert facts(**options) != plain, options


def test_sleep_that_drops_weights_reads_names_anew(network: Path, tmp_path: Path) -> None:
    worker = Worker(network, kernels="reference", kv_disk=str(tmp_path / "kv"))
    store = worker.runner._store
    assert store is not None
    worker.runner.sleep(1)
    assert store._weights == 0
    worker.runner.sleep(2)
    assert store._weights is None
    worker.runner.wake_up()
    assert store._weights == 1
    worker.runner.distrust_weights("a test")
    assert store._weights is None
    worker.runner.close_stores()


def test_options_that_cannot_work_are_refused(network: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_disk needs enable_prefix_caching"):
        Worker(network, kv_disk=str(tmp_path), enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="kv_store needs enable_prefix_caching"):
        Worker(network, kv_store="redis://localhost", enable_prefix_caching=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        Worker(network, kernels="reference", kv_disk=str(tmp_path / "file"))


@pytest.mark.parametrize("name", ["kv_disk", "kv_store"])
def test_models_and_executors_that_cannot_use_stores_refuse_them(tmp_path: Path, name: str) -> None:
    place = {"kv_disk": str(tmp_path / "kv"), "kv_store": "redis://user:secret@localhost"}[name]
    options = make_config(model="m", load_format="dummy", kernels="reference", **{name: place})
    with pytest.raises(ConfigError, match=f"{name} is for models that generate text"):
        options.for_encoder("cpu")
    with pytest.raises(ConfigError, match=f"{name} is not supported with encoder-decoder models"):
        options.for_encoder_decoder("cpu", 128)
    with pytest.raises(ConfigError, match=f"{name} depends on time"):
        without_clock(options, policy_uses_clock=False)


def test_a_worker_without_stores_has_no_thread_for_them(network: Path) -> None:
    worker = Worker(network, kernels="reference")
    assert worker.runner._store is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("octavo-kv")]
    assert isinstance(worker.runner.loaded, LoadedModel)
