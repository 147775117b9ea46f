"""How the free memory is shared between the KV cache and the blocks of preempted requests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo.config.engine_config import EngineConfig, make_config
from octavo.config.kv_spec import GroupShape, KVLayout, window_blocks
from octavo.config.options import ParallelLayout
from octavo.core.errors import ConfigError, InsufficientMemoryError
from octavo.models.config_files import read_model_config
from octavo.runner import memory
from octavo.runner.loaded_model import LoadedModel, Ranks
from octavo.runner.memory import CacheSizing, WorkerShare

GIB = 1 << 30


Groups = Sequence[tuple[int, int | None] | GroupShape]


def options(**values: Any) -> EngineConfig:
    return make_config(model="m", max_num_seqs=10, **values)


def host_blocks(options: EngineConfig, block_bytes: int, free: int, workers: int = 1) -> int:
    """For sequences of 128 tokens in blocks of 16."""
    layout = KVLayout.of([(block_bytes, None)], options, 512)
    return memory.num_host_blocks(layout, options, free, 128, workers)[0]


def cache_blocks(
    options: EngineConfig, free: int, max_model_len: int, groups: Groups = ((1 << 20, None),)
) -> list[int]:
    layout = KVLayout.of(groups, options, 512)
    return memory.cache_size(layout, options, free, max_model_len).num_blocks


def test_swap_space_is_what_was_asked_for() -> None:
    assert host_blocks(options(swap_space=0.25), 1 << 24, 4 * GIB) == 16
    assert host_blocks(options(swap_space=0), 1 << 24, 4 * GIB) == 0
    assert host_blocks(options(num_host_blocks_override=7), 1 << 24, GIB) == 7


def test_the_default_is_four_gib_or_a_tenth_of_the_free_memory() -> None:
    assert host_blocks(options(), GIB // 8, 100 * GIB) == 32
    assert host_blocks(options(), GIB // 8, 10 * GIB) == 8
    assert host_blocks(options(), GIB // 8, 0) == 0


def test_nothing_is_set_aside_for_what_is_never_swapped() -> None:
    def blocks(**values: Any) -> int:
        return host_blocks(options(preemption_mode="recompute", **values), GIB // 8, 10 * GIB)

    assert (blocks(), blocks(swap_space=0.5), blocks(num_host_blocks_override=7)) == (0, 0, 0)
    assert (blocks(host_prefix_cache=True), blocks(host_prefix_cache=True, swap_space=0.5)) == (8, 4)


def test_no_more_than_the_running_sequences_could_use() -> None:
    """Ten sequences of 128 tokens in blocks of 16."""
    assert host_blocks(options(swap_space=1), 1000, 4 * GIB) == 80


def test_swap_space_that_does_not_fit_is_refused_with_what_is_free() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"swap_space=2.5 GiB is more than the 1.500 GiB"):
        host_blocks(options(swap_space=2.5), 1 << 24, 3 * GIB // 2)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "much"])
def test_swap_space_is_a_number_from_0(value: object) -> None:
    with pytest.raises(ConfigError, match="swap_space"):
        options(swap_space=value)


def test_host_blocks_are_left_out_of_what_the_kv_cache_gets(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are in the memory of the host here: together they must not promise more than there is."""
    free = 40 << 20
    monkeypatch.setattr(memory, "available_memory", lambda: free)

    def blocks(**values: Any) -> tuple[int, int, int]:
        engine = make_config(
            model=str(network),
            kernels="reference",
            gpu_memory_utilization=1.0,
            max_num_batched_tokens=64,
            max_num_seqs=64,
            block_size=64,
            **values,
        )
        # A long context, so that neither number is bounded by what the sequences could use.
        loaded = LoadedModel(engine, read_model_config(network), network, "float32")
        spare, sizing = free - memory.activation_bytes(loaded.config, engine, "reference"), CacheSizing(loaded)
        (on_device,), (on_host,) = sizing.cache_size(10**6, 64)[1], sizing.num_host_blocks(10**6, 64)
        return on_device, on_host, spare

    block_bytes, position_bytes = 2 * 2 * 64 * 2 * 8 * 4, 8 * 4

    def beside_rotary_table(spare: int) -> int:
        positions = spare // (block_bytes // 64 + position_bytes)
        return (spare - positions * position_bytes) // block_bytes

    device, host, spare = blocks(swap_space=0.0)
    assert (device, host) == (beside_rotary_table(spare), 0)
    device, host, spare = blocks(swap_space=2 / 1024)
    assert host == (2 << 20) // block_bytes
    assert device == beside_rotary_table(spare - host * block_bytes)


def test_the_cache_has_the_size_that_was_asked_for() -> None:
    asked = options(kv_cache_memory_bytes="64MiB")
    assert asked.kv_cache_memory_bytes == 64 << 20
    on_gpu = memory.cache_size(KVLayout.of([(1 << 20, None)], asked, 512), asked, 60 * GIB, 10**6, total=80 * GIB)
    assert (on_gpu.num_blocks, on_gpu.max_model_len) == ([64], 64 * 16)
    assert cache_blocks(asked, GIB, 10**6) == [64]
    assert cache_blocks(asked, GIB, 32) == [20], "no more than ten sequences could use"
    with pytest.raises(InsufficientMemoryError, match=r"kv_cache_memory_bytes=67108864 .* is more than the 0.031 GiB"):
        cache_blocks(asked, 32 << 20, 10**6)
    with pytest.raises(InsufficientMemoryError, match=r"more than the 0.031 GiB"):
        memory.cache_size(KVLayout.of([(1 << 20, None)], asked, 512), asked, 32 << 20, 10**6, total=GIB)
    with pytest.raises(InsufficientMemoryError, match=r"needs 0.125 GiB, but kv_cache_memory_bytes=67108864 is"):
        cache_blocks(options(kv_cache_memory_bytes=64 << 20, max_model_len=2048), GIB, 2048)


def test_a_long_sequence_needs_windows_only_where_there_are_windows() -> None:
    """Blocks of 16 tokens: 64 MiB hold 1,024 tokens of a layer that keeps all, and any number of one with a window."""
    asked = options(kv_cache_memory_bytes="64MiB", max_model_len=2048)
    window = [(1 << 20, 256)]
    assert cache_blocks(asked, GIB, 2048, window) == [64]
    mix = [(1 << 18, None), (3 << 18, 256)]  # 32 MiB of the first, and the window's blocks
    full, windowed = cache_blocks(asked, GIB, 2048, mix)
    assert full >= 128 and windowed > window_blocks(256, 16)
    assert full * (1 << 18) + windowed * (3 << 18) <= 64 << 20
    with pytest.raises(InsufficientMemoryError, match=r"sequence of 16384 tokens needs 0.265 GiB"):
        cache_blocks(options(kv_cache_memory_bytes="64MiB", max_model_len=16384), GIB, 16384, mix)
    longest = memory.cache_size(KVLayout.of(mix, options(), 512), options(gpu_memory_utilization=0.0625), GIB, 10**6)
    assert 2048 < longest.max_model_len < 16384


def test_the_states_of_a_sequence_are_in_the_figure_that_is_refused() -> None:
    """States of 48 MiB after every 512 tokens, beside blocks of 512 KiB."""
    mix = [GroupShape(1 << 19), GroupShape(48 << 20, 2, 512)]
    for values, figure in (
        ({"max_model_len": 4096}, r"sequence of 4096 tokens needs 0\.359 GiB, of which 5 recurrent states take 0\.234"),
        ({}, r"one block needs 0\.047 GiB, of which 1 recurrent state takes 0\.047 GiB"),
    ):
        with pytest.raises(InsufficientMemoryError, match=figure + r".*raise kv_cache_memory_bytes"):
            cache_blocks(options(kv_cache_memory_bytes="32MiB", **values), GIB, 4096, mix)
    blocks, states = cache_blocks(options(kv_cache_memory_bytes="900MiB", max_model_len=4096), GIB, 4096, mix)
    assert blocks >= 256 and states >= 5 and blocks / 2 + states * 48 <= 900


def test_checkpoints_of_all_sequences_have_room() -> None:
    groups = [GroupShape(1 << 10), GroupShape(1 << 20, 2, 512)]
    assert KVLayout.of(groups, options(), 512).split(GIB, 16384) == [10 * 1024, 10 * (32 + 2)]
    alone = KVLayout.of(groups, options(enable_prefix_caching=False), 512)
    assert alone.split(GIB, 16384) == [10 * 1024, 10 * window_blocks(2, 512) + 1], "those of the running sequences"


def test_blocks_that_were_asked_for_and_do_not_fit_are_refused_with_the_figures() -> None:
    asked = options(num_gpu_blocks_override=600)
    assert cache_blocks(asked, GIB, 10**6) == [600]
    with pytest.raises(
        InsufficientMemoryError,
        match=r"num_gpu_blocks_override=600 takes 0.586 GiB, but only 0.500 GiB are free beside the weights, the "
        r"largest step and the swap space; at most 512 fit",
    ):
        cache_blocks(asked, GIB // 2, 10**6)
    layout = KVLayout.of([(1 << 20, None)], asked, 512)
    assert memory.cache_size(layout, asked, GIB, 10**6, total=2 * GIB).num_blocks == [600]
    with pytest.raises(InsufficientMemoryError, match=r"only 0.250 GiB are free beside the weights, the largest"):
        memory.cache_size(layout, asked, GIB // 4, 10**6, total=2 * GIB)
    with pytest.raises(InsufficientMemoryError, match=r"at most 512 fit"):
        cache_blocks(asked, GIB, 10**6, ((1 << 20, None), (1 << 20, 64)))
    with pytest.raises(InsufficientMemoryError, match=r"num_host_blocks_override=7 takes .* at most 3 fit"):
        host_blocks(options(num_host_blocks_override=7), GIB // 8, GIB // 2 - 1)


def test_a_device_with_memory_of_its_own_has_no_more_host_blocks_than_blocks_by_default() -> None:
    def blocks(**values: Any) -> list[int]:
        given = options(**values)
        layout = KVLayout.of([(1 << 20, None), (1 << 18, 64)], given, 512)
        return memory.num_host_blocks(layout, given, 100 * GIB, 128, device_blocks=[20, 9])

    assert blocks() == [20, 9]
    for asked in ({"swap_space": 1}, {"host_prefix_cache": True}):
        on_host = blocks(**asked)
        assert on_host[0] == 80 and on_host[1] > 9, "as was asked for"


def test_windows_alone_set_no_limit_to_the_length_of_a_sequence() -> None:
    few, endless = options(num_gpu_blocks_override=24), 10**12
    layout = KVLayout.of([(1 << 20, 256)], few, 512)
    assert memory.cache_size(layout, few, GIB, 32768) == memory.CacheSize(32768, [24])
    assert memory.cache_size(layout, few, GIB, endless).max_model_len == 1 << 20, "but for the tables of positions"
    at_most_half = memory.cache_size(layout, options(gpu_memory_utilization=1.0), GIB, endless, position_bytes=1 << 20)
    assert at_most_half.num_blocks == [10 * window_blocks(256, 16) + 32]


@pytest.mark.parametrize("value", [0, -1, 1.5, "much", "-1GB"])
def test_the_size_of_the_cache_is_a_number_of_bytes(value: object) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        options(kv_cache_memory_bytes=value)


def test_workers_of_one_machine_divide_its_memory_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 10 * GIB)
    alone, shares = WorkerShare(), [WorkerShare(rank, 3) for rank in range(3)]
    assert (alone.free_memory(), alone.num_threads(5), alone.num_threads(None)) == (10 * GIB, 5, None)
    assert [share.free_memory() for share in shares] == [10 * GIB // 3] * 3
    assert [share.num_threads(5) for share in shares] == [2, 2, 1]
    assert [share.num_threads(2) for share in shares] == [1, 1, 1], "each computes"
    processors = len(os.sched_getaffinity(0))
    assert sum(share.num_threads(None) or 0 for share in shares) == max(3, processors)


def test_workers_of_one_machine_divide_the_swap_space() -> None:
    assert host_blocks(options(swap_space=0.5), 1 << 24, GIB // 2, workers=2) == 16
    assert host_blocks(options(), GIB // 8, 50 * GIB, workers=2) == 16, "four GiB in all"
    assert host_blocks(options(), GIB // 8, 5 * GIB, workers=2) == 4, "a tenth of the free memory"
    with pytest.raises(InsufficientMemoryError, match=r"swap_space=2.5 GiB is more than the 1.500 GiB"):
        host_blocks(options(swap_space=2.5), 1 << 24, 3 * GIB // 4, workers=2)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 2), (2, 1), (4, 1)])
def test_the_kv_cache_is_that_of_the_ranks_own_heads(ranks: int, kv_heads: int, network: Path) -> None:
    place = Ranks(ParallelLayout(ranks - 1, tensor_parallel_size=ranks))
    engine = make_config(model=str(network), kernels="reference", block_size=16, num_gpu_blocks_override=3)
    kv_layers = LoadedModel(engine, read_model_config(network), network, "float32", ranks=place).layers
    assert kv_layers.block_bytes() == 2 * 2 * 16 * kv_heads * 8 * 4
    layers = kv_layers.make([3])
    assert sum(cache.key.nbytes + cache.value.nbytes for cache in layers) == 3 * kv_layers.block_bytes()
