"""The GPU backend's KV cache: layout, writes with rotation and quantisation, copies and swaps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.kernels.reference import ReferenceKernels

pytest.importorskip("triton")

from octavo.kernels.triton.cache import (
    TritonLayerCache,
    block_bytes,
    copy_blocks,
    make_cache,
    make_host_cache,
    reshape_and_cache,
    rotary_and_cache,
    swap_blocks,
)

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

PLAIN = [torch.float32, torch.bfloat16, torch.float16]
QUANTIZED = [torch.int8, torch.float8_e4m3fn]
shapes = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3).map(lambda n: 8 * n))


def views(cache: TritonLayerCache) -> list[Tensor]:
    arrays = (cache.key, cache.value, cache.key_scale, cache.value_scale)
    return [array for array in arrays if array is not None]


def fill(caches: list[TritonLayerCache], seed: int) -> None:
    pool = caches[0].pool
    pool.copy_(torch.randint(0, 256, pool.shape, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("dtype", PLAIN + QUANTIZED)
@settings(max_examples=20, deadline=None)
@given(shape=shapes, layers=st.integers(1, 3), blocks=st.integers(0, 3))
def test_arrays_of_a_pool_are_apart(dtype: torch.dtype, shape: tuple[int, int, int], layers: int, blocks: int) -> None:
    block_size, kv_heads, head_dim = shape
    caches = make_cache(layers, blocks, block_size, kv_heads, head_dim, dtype, DEVICE)
    assert len(caches) == layers
    size = block_bytes(block_size, kv_heads, head_dim, dtype)
    assert size % 128 == 0
    assert caches[0].pool.shape == (blocks, layers * size)
    arrays = [array for cache in caches for array in views(cache)]
    assert not any(array.float().any() for array in arrays)
    for i, array in enumerate(arrays):
        array.fill_(i + 1)
    for i, array in enumerate(arrays):
        assert (array.float() == i + 1).all()
    for cache in caches:
        assert cache.key.shape == cache.value.shape == (blocks, kv_heads, block_size, head_dim)
        assert (cache.key_scale is None) == (dtype in PLAIN)


def test_types_that_no_cache_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch.int16; known: torch.float32"):
        block_bytes(16, 1, 8, torch.int16)


def at(array: Tensor, slot: int) -> Tensor:
    """What a slot holds: [kv_heads, ...]."""
    return array[slot // array.shape[2], :, slot % array.shape[2]]


def written(cache: TritonLayerCache, array: Tensor, scale: Tensor | None, slot: int) -> Tensor:
    numbers = at(array, slot).double()
    return numbers if scale is None else numbers * at(scale, slot).double()[:, None]


@pytest.mark.parametrize("dtype", PLAIN)
@settings(max_examples=8, deadline=None)
@given(shape=shapes, tokens=st.integers(0, 5), seed=st.integers(0, 99))
def test_writes_go_to_their_slots_and_nowhere_else(
    dtype: torch.dtype, shape: tuple[int, int, int], tokens: int, seed: int
) -> None:
    block_size, kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(tokens, 3 * kv_heads, head_dim, generator=generator).to(DEVICE, dtype)
    k, v = qkv[:, kv_heads : 2 * kv_heads], qkv[:, 2 * kv_heads :]
    cache = make_cache(2, 6, block_size, kv_heads, head_dim, dtype, DEVICE)[1]
    slots = torch.randperm(6 * block_size, generator=generator)[:tokens]
    slots[1::3] = -1
    before = cache.pool.clone()
    reshape_and_cache(k, v, cache, slots.to(DEVICE))
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(at(cache.key, slot), k[token]) and torch.equal(at(cache.value, slot), v[token])
            at(cache.key, slot).zero_()
            at(cache.value, slot).zero_()
    assert torch.equal(cache.pool, before)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_quantised_writes_are_the_nearest_numbers(dtype: torch.dtype) -> None:
    largest = 127.0 if dtype == torch.int8 else 448.0
    generator = torch.Generator().manual_seed(4)
    k, v = (torch.randn(9, 3, 40, generator=generator) * 7 for _ in range(2))
    k[2, 1] = 0.0
    v[3, 0, 5:] *= 1e-5
    cache = make_cache(1, 4, 5, 3, 40, dtype, DEVICE)[0]
    slots = torch.tensor([3, 0, 19, 7, -1, 8, 4, 5, 12])
    reshape_and_cache(k.to(DEVICE), v.to(DEVICE), cache, slots.to(DEVICE))
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for x, array, scale in ((k, cache.key, cache.key_scale), (v, cache.value, cache.value_scale)):
            assert scale is not None
            amax = x[token].abs().amax(-1)
            torch.testing.assert_close(at(scale, slot).cpu(), amax / largest, rtol=1e-6, atol=1e-30)
            scaled = x[token] * (largest / amax.clamp_min(1e-30))[:, None]
            wanted = scaled.round() if dtype == torch.int8 else scaled.to(dtype).float()
            got = at(array, slot).float().cpu()
            # A division that is off in the last place may tip a tie.
            assert (got == wanted).float().mean() > 0.97
            step = torch.ones_like(scaled) if dtype == torch.int8 else (scaled.abs() / 8).clamp_min(2**-9)
            assert ((got - scaled).abs() <= 0.501 * step).all()
    assert not at(cache.key, 1).float().any()


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.float16))],
)
@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    half=st.integers(1, 6),
    rest=st.integers(0, 3),
    cuts=st.lists(st.integers(0, 6), max_size=3),
    single=st.sampled_from((0, 0, 5, 6)),
    seed=st.integers(0, 99),
)
def test_rotation_is_the_reference_s(
    dtype: torch.dtype,
    tokens: int,
    kv_heads: int,
    group: int,
    half: int,
    rest: int,
    cuts: list[int],
    single: int,
    seed: int,
) -> None:
    """With as many sections of a head as ``cuts`` and one more, or none without them; or with three axes, and
    sections of one pair before those.
    """
    generator = torch.Generator().manual_seed(seed)
    ends = sorted(min(cut, half) for cut in cuts)
    sections = [end - start for start, end in zip([0, *ends], [*ends, half], strict=True)] if cuts else []
    axes = len(sections)
    if single:
        sections, half, axes = [1] * single + (sections or [half]), half + single, 3
    head_dim, heads, block_size = 2 * half + rest, group * kv_heads, 3
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    positions = torch.randint(0, 50, (axes, tokens) if axes else (tokens,), generator=generator)
    angles = torch.rand(50, half, generator=generator) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    slots = torch.randperm(4 * block_size, generator=generator)[:tokens]
    slots[:1] = -1
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    want_q, want_k = ReferenceKernels().rotary(q, k, positions, table, sections)
    cache = make_cache(1, 4, block_size, kv_heads, head_dim, dtype, DEVICE)[0]
    device_q, device_k, device_v = qkv.to(DEVICE).split([heads, kv_heads, kv_heads], dim=1)
    out = rotary_and_cache(
        device_q, device_k, device_v, positions.to(DEVICE), table.to(DEVICE), cache, slots.to(DEVICE), sections
    )
    assert out.shape == q.shape and out.is_contiguous()
    assert torch.equal(out.cpu(), want_q)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(at(cache.key, slot).cpu(), want_k[token])
            assert torch.equal(at(cache.value, slot).cpu(), v[token])
    used = sum(slot >= 0 for slot in slots.tolist())
    assert cache.key.float().abs().sum((1, 3)).count_nonzero() <= used


def test_rotation_of_a_large_model_s_heads_is_split_between_programs() -> None:
    generator = torch.Generator().manual_seed(5)
    qkv = torch.randn(3, 32 + 16, 128, generator=generator)
    positions, slots = torch.tensor([4, 0, 9]), torch.tensor([17, 2, 40])
    angles = torch.rand(10, 64, generator=generator)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    q, k, v = qkv.split([32, 8, 8], dim=1)
    want_q, want_k = ReferenceKernels().rotary(q, k, positions, table)
    cache = make_cache(1, 3, 16, 8, 128, torch.float32, DEVICE)[0]
    device_q, device_k, device_v = qkv.to(DEVICE).split([32, 8, 8], dim=1)
    out = rotary_and_cache(
        device_q, device_k, device_v, positions.to(DEVICE), table.to(DEVICE), cache, slots.to(DEVICE)
    )
    assert torch.equal(out.cpu(), want_q)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(at(cache.key, slot).cpu(), want_k[token])
        assert torch.equal(at(cache.value, slot).cpu(), v[token])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_blocks_are_copied_in_every_layer(dtype: torch.dtype) -> None:
    for pairs, order in (
        ([(0, 3), (1, 2)], [0, 1, 1, 0]),
        ([(2, 0), (2, 3)], [2, 1, 2, 2]),
        ([(0, 3), (3, 1)], [0, 3, 2, 0]),
        ([(0, 1), (1, 0)], [1, 0, 2, 3]),
        ([], [0, 1, 2, 3]),
    ):
        caches = make_cache(3, 4, 5, 2, 24, dtype, DEVICE)
        fill(caches, 1)
        before = caches[0].pool.clone()
        copy_blocks(caches, pairs)
        assert torch.equal(caches[0].pool, before[order])


def test_large_blocks_are_copied_whole() -> None:
    caches = make_cache(3, 3, 16, 8, 64, torch.bfloat16, DEVICE)
    fill(caches, 2)
    before = caches[0].pool.clone()
    copy_blocks(caches, [(2, 0)])
    assert torch.equal(caches[0].pool, before[[2, 1, 2]])


@given(st.permutations(range(6)), st.permutations(range(5)), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_blocks_are_swapped_to_the_host_and_back(sources: list[int], targets: list[int], count: int) -> None:
    device, host = make_cache(2, 6, 4, 2, 8, torch.int8, DEVICE), make_host_cache(2, 5, 4, 2, 8, torch.int8)
    fill(device, 3)
    pairs = list(zip(sources[:count], targets[:count], strict=True))
    before = device[0].pool.cpu().clone()
    swap_blocks(device, host, pairs)
    device[0].pool.zero_()
    swap_blocks(host, device, [(target, source) for source, target in pairs])
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    for source, target in pairs:
        assert torch.equal(host[0].pool[target], before[source])
        assert torch.equal(device[0].pool[source].cpu(), before[source])
    assert device[0].pool.any(1).sum() == host[0].pool.any(1).sum() == count


@pytest.mark.parametrize("pair", [(-1, 0), (3, 0), (0, 5), (0, -1)])
def test_moves_of_blocks_that_do_not_exist_are_refused(pair: tuple[int, int]) -> None:
    device, host = (make_cache(1, blocks, 2, 1, 8, torch.float32, DEVICE) for blocks in (3, 5))
    with pytest.raises(IndexError, match=r"block -?\d of 3 to block -?\d of 5"):
        swap_blocks(device, host, [pair])
    if max(pair) < 5:
        with pytest.raises(IndexError, match="index out of range"):
            copy_blocks(device, [pair])
