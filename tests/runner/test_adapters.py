"""Adapters of a worker: loads beside steps, slots, and what the results say."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM
from octavo.core.errors import InsufficientMemoryError
from octavo.core.failures import ADAPTER
from octavo.core.plan import NewSequence, StepPlan, StepResult, TableChange
from octavo.core.request import AdapterRef, Generate, LoRARequest, adapter_preparation
from octavo.core.sampling_params import SamplingParams
from octavo.loader.adapters import AdapterTargets
from octavo.models.config_files import read_model_config
from octavo.runner import adapters as lora_preparer
from octavo.runner.input_batch import InputBatch
from tests.runner.plan_worker import PROMPT, Samples, Worker, make_adapter, samples

pytestmark = pytest.mark.usefixtures("quick_collections")

PARAMS = SamplingParams(temperature=0.0, logprobs=1)


@pytest.fixture(scope="module")
def targets(network: Path) -> AdapterTargets:
    return AdapterTargets(read_model_config(network))


@pytest.fixture
def refs(tmp_path: Path, targets: AdapterTargets) -> list[AdapterRef]:
    return [make_adapter(tmp_path / f"adapter-{seed}", targets, seed) for seed in range(3)]


@pytest.fixture
def worker(network: Path) -> Worker:
    return Worker(network, kernels="reference", enable_lora=True, max_loras=2, max_cpu_loras=4)


def load(worker: Worker, *refs: AdapterRef) -> StepResult:
    """Waits for the adapters as an idle engine does; the result that says that the last of them has ended."""
    known: set[str] = set()
    result = worker.step(prepare=list(map(adapter_preparation, refs)), awaits_prepared=True)
    while True:
        known |= {*result.prepared, *result.prepare_errors}
        if known >= {ref.key for ref in refs}:
            return result
        result = worker.step(awaits_prepared=True)


def run(worker: Worker, *keys: str | None, count: int = 3) -> list[Samples]:
    """What sequences of these adapters sample side by side; then they are forgotten."""
    ids = list(range(len(keys)))
    new = [NewSequence(i, PROMPT, len(PROMPT), 0, Generate(PARAMS, 0), key) for i, key in enumerate(keys)]
    tables = [TableChange(i, 0, list(range(4 * i, 4 * i + 4))) for i in ids]
    results = [worker.step(new=new, table_changes=tables, seq_ids=ids, num_tokens=[len(PROMPT)] * len(ids))]
    results += [worker.step(seq_ids=ids, num_tokens=[1] * len(ids)) for _ in range(count - 1)]
    worker.step(forget=ids)
    return [[samples(result)[i] for result in results] for i in ids]


def test_a_batch_mixes_adapters_and_none(worker: Worker, refs: list[AdapterRef]) -> None:
    assert load(worker, *refs[:2]).prepare_errors == {}
    placed = worker.step(place=[(0, refs[0].key), (1, refs[1].key)])
    assert placed.prepare_seconds > 0
    mixed = run(worker, refs[0].key, None, refs[1].key, refs[0].key)
    alone = [run(worker, key)[0] for key in (refs[0].key, None, refs[1].key)]
    for ours, expected in zip(mixed, [*alone, alone[0]], strict=True):
        worker.assert_same(ours, expected)
    assert len({str([token for token, _ in one]) for one in alone}) == 3, "adapters change the answer"


def test_tokens_have_the_slot_of_their_sequence(worker: Worker, refs: list[AdapterRef]) -> None:
    load(worker, *refs[:2])
    worker.step(place=[(0, refs[0].key), (1, refs[1].key)])
    loras = worker.runner.loaded.loras
    assert loras is not None
    batch = InputBatch(max_num_seqs=4, max_model_len=16, block_size=4, features=[loras])
    task = Generate(PARAMS, 0)
    for seq_id, key in ((1, refs[1].key), (2, None)):
        batch.add(NewSequence(seq_id, [5, 6, 7], 3, 0, task, key))
        batch.change_table(TableChange(seq_id, 0, [seq_id]))
    batch.fork(1, 4)
    inputs = batch.build(StepPlan(step=1, seq_ids=[1, 2, 4], num_tokens=[2, 1, 1]))
    assert inputs.seq_ids == [2, 4, 1]
    assert inputs.arrays["adapters"].tolist() == [-1, 1, 1, 1]
    assert inputs.arrays["adapters"].dtype == np.int32
    assert inputs.has_adapters
    assert not batch.build(StepPlan(step=2, seq_ids=[2], num_tokens=[1])).has_adapters
    batch.forget(1)
    batch.forget(4)
    batch.add(NewSequence(9, [5], 1, 0, task))
    inputs = batch.build(StepPlan(step=3, seq_ids=[9], num_tokens=[1]))
    assert inputs.arrays["adapters"].tolist() == [-1]
    assert not inputs.has_adapters


def test_after_eviction_and_reload_an_adapter_is_the_same(worker: Worker, refs: list[AdapterRef]) -> None:
    load(worker, *refs)
    worker.step(place=[(0, refs[0].key)])
    before = run(worker, refs[0].key)
    worker.step(place=[(0, refs[1].key), (1, refs[2].key)])
    other = run(worker, refs[1].key)
    worker.step(place=[(1, refs[0].key)])
    assert run(worker, refs[0].key) == before != other
    worker.step(drop=[refs[0].key])
    with pytest.raises(RuntimeError, match="has no slot"):
        run(worker, refs[0].key)
    load(worker, refs[0])
    worker.step(place=[(0, refs[0].key)])
    assert run(worker, refs[0].key) == before


def test_a_plan_that_comes_again_does_no_harm(worker: Worker, refs: list[AdapterRef]) -> None:
    assert load(worker, refs[0]).prepared == [refs[0].key]
    worker.step(place=[(0, refs[0].key)])
    before = run(worker, refs[0].key)
    again = worker.step(drop=[refs[1].key], prepare=[adapter_preparation(refs[0])], place=[(0, refs[0].key)])
    assert again.prepared == [refs[0].key]
    assert run(worker, refs[0].key) == before


def test_an_adapter_that_cannot_be_loaded_is_an_error_of_its_own(worker: Worker, refs: list[AdapterRef]) -> None:
    bad = refs[1]
    file = Path(bad.path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    result = load(worker, bad, refs[0])
    seen = {**result.prepare_errors}
    assert set(seen) <= {bad.key}
    worker.step(place=[(0, refs[0].key)])
    run(worker, refs[0].key, None)
    failure = load(worker, bad).prepare_errors[bad.key]
    assert failure.kind == ADAPTER and str(Path(bad.path).parent) not in failure.text
    with pytest.raises(RuntimeError, match="is not prepared"):
        worker.step(place=[(1, bad.key)])


class SlowReads:
    """Reads wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._go = threading.Semaphore(0)
        self._read: Callable[..., Any] = lora_preparer.read_adapter
        monkeypatch.setattr(lora_preparer, "read_adapter", self)

    def __call__(self, *args: Any) -> Any:
        assert self._go.acquire(timeout=60)
        return self._read(*args)

    def let_go(self, count: int = 1) -> None:
        self._go.release(count)


def test_steps_go_on_while_an_adapter_is_read(
    worker: Worker, refs: list[AdapterRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(worker, None)
    reads = SlowReads(monkeypatch)
    result = worker.step(prepare=[adapter_preparation(refs[0])])
    assert result.prepared == []
    assert run(worker, None) == expected
    assert worker.step(awaits_prepared=True).prepared == [], "a step waits for a while, not for ever"
    reads.let_go()
    assert load(worker, refs[0]).prepared == [refs[0].key]


def test_what_is_dropped_while_it_is_read_is_not_kept(
    worker: Worker, refs: list[AdapterRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = SlowReads(monkeypatch)
    worker.step(prepare=[adapter_preparation(refs[0]), adapter_preparation(refs[1])])
    worker.step(drop=[refs[0].key])
    worker.step(prepare=[adapter_preparation(refs[0])])  # the same adapter again
    reads.let_go(3)
    seen: list[str] = []
    while len(seen) < 2:
        result = worker.step(awaits_prepared=True)
        assert not result.prepare_errors
        seen += result.prepared
    assert sorted(seen) == sorted([refs[0].key, refs[1].key])
    worker.step(place=[(0, refs[0].key)])
    run(worker, refs[0].key)


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_keep_their_slots_through_a_sleep(worker: Worker, refs: list[AdapterRef], level: int) -> None:
    load(worker, refs[0], refs[1])
    worker.step(place=[(1, refs[0].key)])
    before = run(worker, refs[0].key, None)
    worker.runner.sleep(level)
    worker.runner.wake_up()
    assert run(worker, refs[0].key, None) == before
    worker.step(place=[(0, refs[1].key)])
    assert run(worker, refs[0].key, None) == before


def test_prompts_are_scored_with_their_adapter(worker: Worker, refs: list[AdapterRef]) -> None:
    load(worker, refs[0])
    worker.step(place=[(0, refs[0].key)])

    def scores(key: str | None) -> list[float]:
        task = Generate(SamplingParams(temperature=0.0, prompt_logprobs=0), 0)
        new = NewSequence(7, PROMPT, len(PROMPT), 0, task, key)
        table = TableChange(7, 0, [0, 1, 2, 3])
        result = worker.step(new=[new], table_changes=[table], seq_ids=[7], num_tokens=[len(PROMPT)])
        worker.step(forget=[7])
        return [position.logprob for position in result.extras[7].prompt_logprobs]

    assert scores(refs[0].key) != scores(None)


def test_memory_of_adapters_is_reserved(network: Path) -> None:
    plain = Worker(network, kernels="reference")
    with_adapters = Worker(
        network, kernels="reference", enable_lora=True, max_loras=2, max_cpu_loras=4, max_lora_rank=8
    )
    loaded = with_adapters.runner.loaded
    network_bytes = lora_preparer.adapter_bytes(layer for _, layer in loaded.network.lora_layers())
    # Both matrices of seven in each of two layers, of embedding and head, in float32 and of a rank of 16.
    qkvo = 2 * (32 + 32) + 2 * (32 + 16)
    assert network_bytes == 4 * 16 * (2 * (qkvo + 3 * (32 + 64)) + 2 * (32 + 64))
    assert loaded.preparations.reserved_bytes(1 << 40) == 4 * network_bytes
    with pytest.raises(InsufficientMemoryError, match=r"4 adapters of rank 8 take up to .* lower max_cpu_loras"):
        loaded.preparations.reserved_bytes(network_bytes)
    (line,) = with_adapters.runner.startup_facts().preparations
    assert line.startswith("adapters: 2 slots, at most 4 in host memory, of ranks up to 8")
    assert plain.runner.startup_facts().preparations == []


def test_the_thread_that_reads_ends_with_the_worker(network: Path, refs: list[AdapterRef]) -> None:
    worker: Worker | None = Worker(network, kernels="reference", enable_lora=True)
    assert worker is not None
    before = {thread for thread in threading.enumerate() if thread.name.startswith("lora")}
    load(worker, refs[0])
    (thread,) = {thread for thread in threading.enumerate() if thread.name.startswith("lora")} - before
    del worker
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


# --- the same answers in every layout of workers, with more adapters than slots and host memory hold ------------------

LAYOUTS: list[dict[str, Any]] = [
    {"async_scheduling": True},
    {"batching": "prefill_first"},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
]


def answers(network: Path, adapters: list[LoRARequest], **options: Any) -> list[list[int]]:
    """Ten prompts with four adapters and none, two slots, and three places in host memory."""
    defaults = {"dtype": "float32", "num_threads": 1, "skip_tokenizer_init": True}
    kept = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "num_gpu_blocks_override": 64}
    llm = LLM(str(network), **{**defaults, **kept, **options})
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    which = [adapters[i % 5] if i % 5 < 4 else None for i in range(10)]
    found = llm.generate([[1 + i % 7, 2, 3, 4 + i] for i in range(10)], params, lora_request=which)
    stats = llm.llm_engine.stats().adapters
    assert stats is not None and (stats.in_slots, stats.in_host, stats.loads) == (2, 3, 4)
    return [list(output.outputs[0].token_ids) for output in found]


@pytest.mark.parametrize("layout", [*LAYOUTS[:-1], pytest.param(LAYOUTS[-1], marks=pytest.mark.slow)], ids=str)
def test_answers_with_adapters_are_the_same_in_every_layout(
    network: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    targets = AdapterTargets(read_model_config(network))
    adapters = [LoRARequest(f"a{i}", i + 1, str(tmp_path / f"a{i}")) for i in range(4)]
    for i in range(4):
        make_adapter(tmp_path / f"a{i}", targets, i)
    alone = answers(network, adapters)
    assert len(set(map(tuple, alone))) > 5
    assert answers(network, adapters, **layout) == alone
