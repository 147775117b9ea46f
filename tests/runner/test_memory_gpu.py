"""Memory of a GPU, with one that only counts: what the largest step takes, and the blocks that are left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from octavo.config.engine_config import EngineConfig, make_config
from octavo.config.kv_spec import KVLayout, group_layers
from octavo.core.dtypes import DType
from octavo.core.errors import InsufficientMemoryError
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch, padding_batch
from octavo.kernels.interface import LayerCache
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.torch_backend import CudaMemory, in_use, measure_peak
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model
from octavo.models.config_files import read_model_config
from octavo.runner import memory
from octavo.runner.loaded_model import LoadedModel
from octavo.runner.memory import CacheSizing, largest_step
from octavo.runner.model_runner import ModelRunner

GIB = 1 << 30


class CountedMemory:
    """A device on which the weights stay, steps take and give back, and the first one leaves a workspace behind."""

    def __init__(self, weights: int, step: int, workspace: int, others: int) -> None:
        self.held, self.step, self.workspace, self.others = weights, step, workspace, others
        self.kept = 0
        self.highest = weights

    def run(self) -> None:
        self.held += self.workspace
        self.workspace = 0
        self.highest = max(self.highest, self.held + self.step)
        self.kept = self.step

    def reset_peak(self) -> None:
        self.kept = 0
        self.highest = self.held

    def peak(self) -> int:
        return self.highest

    def outside(self) -> int:
        return self.others

    def total(self) -> int:
        return 80 * GIB

    def free(self) -> int:
        return self.total() - self.held - self.others


def test_the_peak_counts_weights_workspaces_the_step_and_others_and_gives_the_step_back() -> None:
    device = CountedMemory(weights=16 * GIB, step=3 * GIB, workspace=GIB // 2, others=GIB)
    assert measure_peak(device.run, device) == 16 * GIB + GIB // 2 + 3 * GIB + GIB
    assert device.kept == 0


def test_a_peak_of_loading_does_not_count() -> None:
    device = CountedMemory(weights=GIB, step=GIB, workspace=0, others=0)
    device.highest = 50 * GIB
    assert measure_peak(device.run, device) == 2 * GIB


def test_a_step_that_does_not_fit_is_refused_with_what_to_lower() -> None:
    device = CountedMemory(weights=GIB, step=GIB, workspace=0, others=0)

    def too_large() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(InsufficientMemoryError, match=r"80\.00 GiB; lower these: CUDA out of memory"):
        measure_peak(too_large, device)


def options(**values: Any) -> EngineConfig:
    return make_config(model="m", max_num_seqs=1000, **values)


def gpu_blocks(options: EngineConfig, block_bytes: int, total: int, peak: int, max_model_len: int) -> int:
    layout = KVLayout.of([(block_bytes, None)], options, 2048)
    return memory.cache_size(layout, options, total - peak, max_model_len, total=total).num_blocks[0]


def test_the_cache_gets_what_the_share_of_the_card_leaves_beside_the_peak() -> None:
    block = 2 << 20

    def blocks(**values: Any) -> int:
        return gpu_blocks(options(**values), block, 80 * GIB, 20 * GIB, 100_000)

    assert blocks() == (72 - 20) * 512
    assert blocks(gpu_memory_utilization=0.5) == (40 - 20) * 512
    assert blocks(gpu_memory_utilization=1.0) == (80 - 20) * 512
    assert blocks(num_gpu_blocks_override=7) == 7


def test_no_more_blocks_than_the_sequences_could_use() -> None:
    assert gpu_blocks(options(), 1 << 20, 80 * GIB, GIB, 160) == 10 * 1000


def test_a_card_that_is_too_small_is_refused_with_the_sums() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"0\.9 of 16\.000 GiB, less 14\.390 GiB"):
        gpu_blocks(options(max_model_len=4096), 1 << 20, 16 * GIB, int(14.39 * GIB), 4096)
    with pytest.raises(InsufficientMemoryError, match="one block needs"):
        gpu_blocks(options(), 1 << 20, 16 * GIB, 15 * GIB, 4096)


def test_weights_are_checked_against_the_device_and_in_their_own_bits(network: Path) -> None:
    config = read_model_config(network)
    context = LayerContext(ReferenceKernels(), DType.BFLOAT16)
    file = network / "model.safetensors"
    whole = sum(tensor.numel() for tensor in load_file(file).values()) * 2
    memory.check_weights_fit(config, context, free=whole)
    with pytest.raises(InsufficientMemoryError, match="in bfloat16"):
        memory.check_weights_fit(config, context, free=whole - 1)
    for quantization, size in (("int4", 0.5), ("fp8", 1)):
        quantized = replace(context, quantization=quantization)
        c, head = config, 1 if quantization == "int4" else 2
        layer = (
            c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads) + 3 * c.hidden_size * c.intermediate_size
        )
        norms = c.hidden_size * (2 * c.num_layers + 1)
        needed = int(c.num_layers * layer * size) + c.vocab_size * c.hidden_size * (2 + head) + 2 * norms
        memory.check_weights_fit(config, quantized, free=needed)
        with pytest.raises(InsufficientMemoryError, match=f"in {quantization}"):
            memory.check_weights_fit(config, quantized, free=needed - 1)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 300),
    seqs=st.integers(1, 40),
    length=st.integers(1, 200),
    block_size=st.sampled_from([1, 3, 16]),
)
def test_the_largest_step_is_as_large_as_a_step_may_be(tokens: int, seqs: int, length: int, block_size: int) -> None:
    size = BatchSize(tokens, min(seqs, tokens), min(seqs, tokens), length, block_size)
    batch: Any = largest_step(size, ReferenceKernels())
    lens = batch.seq_lens.tolist()
    assert len(lens) == min(seqs, tokens)
    assert len(batch.token_ids) == sum(lens) == min(tokens, len(lens) * length)
    assert max(lens) <= length == batch.max_seq_len
    assert lens[: batch.num_decodes] == [1] * batch.num_decodes
    assert all(n > 1 for n in lens[batch.num_decodes :])
    assert batch.query_start_loc.diff().tolist() == lens
    assert batch.block_tables.shape == (1, len(lens), -(-length // block_size))
    assert 0 <= batch.slot_mapping.min() <= batch.slot_mapping.max() < block_size


def test_the_largest_step_runs_with_a_cache_of_one_block(network: Path) -> None:
    config, kernels = read_model_config(network), ReferenceKernels()
    model = load_model(network, config, LayerContext(kernels, DType.FLOAT32))
    for tokens, seqs in ((64, 5), (5, 8), (300, 2)):
        groups = group_layers(model.kv_specs)
        batch = largest_step(BatchSize(tokens, min(seqs, tokens), 1, 128, 16, len(groups)), kernels)
        caches = kernels.make_cache(groups, [1] * len(groups), 16)
        with torch.inference_mode():
            assert model.forward(batch, caches).shape == (len(batch.token_ids), config.hidden_size)


def small_model(network: Path, **values: Any) -> LoadedModel:
    """For steps of 64 tokens."""
    defaults = {"kernels": "reference", "max_num_batched_tokens": 64, "max_num_seqs": 8, "num_threads": 1}
    engine = make_config(model=str(network), **{**defaults, **values})
    return LoadedModel(engine, read_model_config(network), network, "float32")


def test_the_largest_step_has_adapters_where_there_are_slots_for_them(
    network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their slots are memory of the layers; what their products set aside in a step is seen only if rows have them."""
    for values, expected in (({}, {-1}), ({"enable_lora": True, "max_loras": 3}, {0, 1, 2})):
        loaded = small_model(network, **values)
        run = loaded.forward
        batches: list[ForwardBatch] = []

        def noted(batch: ForwardBatch, caches: list[LayerCache], run: Any = run, batches: Any = batches) -> Any:
            batches.append(batch)
            return run(batch, caches)

        monkeypatch.setattr(loaded, "forward", noted)
        CacheSizing(loaded).largest_step(128).run()
        (batch,) = batches
        assert set(batch.adapters.tolist()) == expected
        assert batch.has_adapters == (expected != {-1})


def test_a_gpus_profile_counts_the_graphs_of_the_model_and_of_the_drafter(network: Path) -> None:
    loaded = small_model(network)
    device = CountedMemory(weights=GIB, step=GIB, workspace=0, others=GIB)

    def graph_bytes(forward: Forward, largest: BatchSize, in_use: Callable[[], int]) -> int:
        assert in_use() == 2 * GIB, "what is cached does not count"
        assert (
            forward(padding_batch(replace(largest, tokens=2, sequences=2, sampled=2), loaded.kernels)).logits
            is not None
        )
        return 7

    loaded.kernels.graph_bytes = graph_bytes  # type: ignore[method-assign]
    step = CacheSizing(loaded).largest_step(128)
    device.run()
    assert step.graph_bytes(lambda: in_use(device)) == 7
    caches = step._caches()[0]
    forward = loaded.forward
    loaded.drafter = cast(
        Any, SimpleNamespace(forward=lambda batch, _: forward(batch, caches), make_reader=lambda: None)
    )
    assert step.graph_bytes(lambda: in_use(device)) == 14
    loaded.network.is_recordable = False
    assert step.graph_bytes(lambda: in_use(device)) == 7


def test_the_estimate_of_a_cpus_largest_step_has_room_for_what_adapters_add(network: Path) -> None:
    """As much as the buffers of a recorded step grow by."""
    pytest.importorskip("octavo._cpu")
    buffers, estimates = [], []
    for values in ({}, {"enable_lora": True, "max_loras": 2}):
        loaded = small_model(network, kernels="cpu", max_num_seqs=64, **values)
        ModelRunner(loaded, [8], [0], 128)
        buffers.append(sum(buffer.nbytes for buffer in cast(Any, loaded.kernels).runner.arena._owned))
        estimates.append(memory.activation_bytes(loaded.config, loaded.options, loaded.kernels.name))
    assert 0 < buffers[1] - buffers[0] <= estimates[1] - estimates[0]
    assert buffers[1] <= estimates[1]


@pytest.mark.gpu
def test_the_driver_and_torch_count_the_same_memory() -> None:
    device = CudaMemory("cuda")
    device.reset_peak()
    before = device.free()

    def step() -> None:
        torch.empty(1 << 28, dtype=torch.uint8, device="cuda")

    peak = measure_peak(step, device)
    assert device.outside() + (1 << 28) <= peak <= device.total()
    assert abs(device.free() - before) < 64 << 20
