"""The paged attention of the CPU kernels against float64, and its results' independence of everything else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

_cpu: Any = pytest.importorskip("octavo._cpu")
from octavo.config.kv_spec import KVSpec  # noqa: E402
from octavo.kernels.cpu import backend  # noqa: E402
from octavo.kernels.interface import AttentionSpec  # noqa: E402
from tests.kernels import torch_facade  # noqa: E402
from tests.kernels.backends import cpu_settings  # noqa: E402
from tests.torch_types import engine_dtype  # noqa: E402

operations: Any = torch_facade.Facade(backend)
kernels = torch_facade.make_kernels()

F32, BF16, I8 = torch.float32, torch.bfloat16, torch.int8


@pytest.fixture(params=_cpu.available_isas().floats, autouse=True, scope="module")
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    with cpu_settings(isa=request.param):
        yield


def make_cache(
    layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, vectors: int = 2
) -> list[Any]:
    """``vectors``: 2, or 1 for a latent cache."""
    spec = KVSpec("full" if vectors == 2 else "latent", kv_heads, head_dim, engine_dtype(dtype))
    caches: list[Any] = kernels.make_group_cache(spec, layers, blocks, block_size)
    return caches


@dataclass
class Network:
    """What a layer's attention is like."""

    group: int = 3
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = BF16
    cache_dtype: torch.dtype = BF16
    window: int | None = None
    soft_cap: float = 0.0
    alibi: bool = False
    causal: bool = True
    #: Of a latent cache, with one KV head: how many numbers of a key are its value.
    latent: int | None = None
    #: Whether the window, if there is one, is a chunk.
    chunked: bool = False
    #: Whether heads have sinks, from one that takes nearly all to one that takes nearly nothing.
    sinks: bool = False

    @property
    def spec(self) -> AttentionSpec:
        slopes = tuple(2.0**-i for i in range(1, self.heads + 1)) if self.alibi else None
        cap, chunked = self.soft_cap or None, self.chunked and self.causal and self.window is not None
        scale = self.head_dim**-0.5
        spec = AttentionSpec(scale, self.window, cap, slopes, self.causal, self.latent, chunked=chunked)
        return replace(spec, sinks=np.linspace(9, -9, self.heads, dtype=np.float32)) if self.sinks else spec

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads


@dataclass
class Sequence:
    """All of a sequence's queries, keys and values, and the blocks of its cache."""

    q: Tensor
    k: Tensor
    v: Tensor
    blocks: list[int]


class World:
    """Sequences with shuffled blocks in a cache that was full of NaN."""

    def __init__(self, network: Network, lengths: list[int], seed: int, strength: float = 2.0) -> None:
        self.network = n = network
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // n.block_size) for length in lengths]
        total = sum(counts) + 2
        vectors = 1 if n.latent else 2
        [self.cache] = make_cache(1, total, n.block_size, n.kv_heads, n.head_dim, n.cache_dtype, vectors)
        assert (self.cache.key is self.cache.value) == bool(n.latent)
        for blocks in (self.cache.key, self.cache.value):
            blocks.fill_(0xFF)  # a NaN in every type and scale
        free = torch.randperm(total, generator=generator).tolist()
        self.sequences = []
        for length, count in zip(lengths, counts, strict=True):
            q = (torch.randn(length, n.heads, n.head_dim, generator=generator) * strength).to(n.dtype)
            k, v = (torch.randn(length, n.kv_heads, n.head_dim, generator=generator).to(n.dtype) for _ in range(2))
            self.sequences.append(Sequence(q, k, v, [free.pop() for _ in range(count)]))

    def step(self, chunks: list[tuple[int, int, int]], after: int = 0) -> list[Tensor]:
        """Writes and attends the tokens [begin, end) of sequences, (sequence, begin, end) each; results in order.

        Their contexts go on for ``after`` tokens, which were written before.
        """
        n = self.network
        parts = [(self.sequences[s], begin, end) for s, begin, end in chunks]
        counts = [end - begin for _, begin, end in chunks]
        tokens = sum(counts)
        # Rows of one tensor, as a projection leaves them, with something else before them.
        qkv = torch.full((tokens, 1 + n.heads + 2 * n.kv_heads, n.head_dim), float("nan"), dtype=n.dtype)
        q, k, v = qkv[:, 1:].split([n.heads, n.kv_heads, n.kv_heads], dim=1)
        if parts:
            for target, name in ((q, "q"), (k, "k"), (v, "v")):
                target.copy_(torch.cat([getattr(s, name)[begin:end] for s, begin, end in parts]))
        slots = torch.tensor(
            [s.blocks[t // n.block_size] * n.block_size + t % n.block_size for s, b, e in parts for t in range(b, e)],
            dtype=torch.int64,
        )
        query_start = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32)
        positions = torch.tensor([t for _, begin, end in parts for t in range(begin, end)], dtype=torch.int64)
        seq_lens = torch.tensor([end + after for _, _, end in parts], dtype=torch.int32)
        tables = torch.zeros(len(parts), 1 + max([len(s.blocks) for s, _, _ in parts], default=0), dtype=torch.int32)
        for row, (s, _, _) in zip(tables, parts, strict=True):
            row[: len(s.blocks)] = torch.tensor(s.blocks, dtype=torch.int32)
        out = torch.full((tokens, n.heads, n.latent or n.head_dim), float("nan"), dtype=n.dtype)
        step = _cpu.Step(
            tokens,
            len(parts),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            query_start=query_start.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            block_tables=tables.data_ptr(),
            block_table_stride=tables.stride(0),
        )
        parts_of_k = (k[:, :, : n.latent], k[:, :, n.latent :].clone()) if n.latent else (k, v)
        operations.write_op(*parts_of_k, self.cache).run(step)
        spec = n.spec
        operations.attention_op(q, self.cache, out, spec).run(step)
        return list(out.split(counts))

    def expected(self, s: int, begin: int, end: int, after: int = 0) -> tuple[Tensor, Tensor]:
        """The result in float64 [end - begin, H, D], and the size of the terms that it sums."""
        n, sequence, spec, context = self.network, self.sequences[s], self.network.spec, end + after
        q = sequence.q[begin:end].double()
        k, v = (
            as_cached(x[:context], n.cache_dtype).repeat_interleave(n.group, dim=1)
            for x in (sequence.k, sequence.k if n.latent else sequence.v)
        )
        v = v[:, :, : n.latent]
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        if n.soft_cap:
            scores = n.soft_cap * torch.tanh(scores / n.soft_cap)
        distance = torch.arange(begin, end)[:, None] - torch.arange(context)[None]
        if spec.alibi_slopes is not None:
            scores -= torch.tensor(spec.alibi_slopes, dtype=torch.float64)[:, None, None] * distance
        hidden = (distance < 0) & n.causal
        if n.window is not None:
            hidden |= distance >= n.window if n.causal else distance.abs() > n.window
            if spec.chunked:
                hidden |= (torch.arange(begin, end) // n.window)[:, None] != torch.arange(context)[None] // n.window
        scores = scores.masked_fill(hidden, -math.inf)
        if n.sinks:
            sinks = torch.from_numpy(spec.sinks).double()
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, end - begin, 1)), -1)
        weights = scores.softmax(-1)[..., :context]
        return torch.einsum("hqk,khd->qhd", weights, v), torch.einsum("hqk,khd->qhd", weights, v.abs())


def as_cached(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What the cache holds of x [L, K, D], in float64."""
    if dtype != I8:
        return x.to(dtype).double()
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 1e-37, 1 / scale, 0)
    return (x.float() * inverse).round().clamp(-127, 127).double() * scale.double()


def assert_right(world: World, chunks: list[tuple[int, int, int]], results: list[Tensor], after: int = 0) -> None:
    for chunk, actual in zip(chunks, results, strict=True):
        expected, size = world.expected(*chunk, after)
        # Scores of float32 have errors of some 1e-6 of their terms; int8 may round a tie otherwise in float32. Where
        # products are those of pairs, weights are rounded to bfloat16.
        caches = {"avx512_bf16": (BF16, I8), "amx_bf16": (BF16,)}.get(_cpu.float_isa(), ())
        by_pairs = actual.dtype == BF16 and world.network.cache_dtype in caches
        limit = (2**-8 if by_pairs else 3e-5) * size + (2**-8 * expected.abs() if actual.dtype == BF16 else 0) + 1e-30
        error = (actual.double() - expected).abs()
        assert not error.isnan().any() and bool((error <= limit).all()), (chunk, float((error / limit).max()))


networks = st.builds(
    Network,
    group=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 17).map(lambda i: 8 * i),
    block_size=st.one_of(st.integers(1, 33), st.sampled_from([16, 32, 64])),
    dtype=st.sampled_from([F32, BF16]),
    cache_dtype=st.sampled_from([F32, BF16, I8]),
    window=st.one_of(st.none(), st.integers(1, 400)),
    soft_cap=st.sampled_from([0.0, 0.0, 5.0]),
    alibi=st.booleans(),
    chunked=st.booleans(),
    sinks=st.booleans(),
)
latents = st.builds(
    Network,
    group=st.integers(1, 40),
    kv_heads=st.just(1),
    head_dim=st.integers(17, 80).map(lambda i: 2 * i),
    block_size=st.one_of(st.integers(1, 33), st.sampled_from([16, 32])),
    dtype=st.sampled_from([F32, BF16]),
    cache_dtype=st.sampled_from([F32, BF16, I8]),
    latent=st.integers(1, 32),
)
networks = st.one_of(networks, networks, latents)


seeds = st.integers(0, 2**31)


MIXED = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40), st.booleans()), max_size=4)


@settings(max_examples=15, deadline=None)
@given(networks, MIXED, seeds)
def test_mixed_batches(network: Network, parts: list[tuple[int, int, bool]], seed: int) -> None:
    check_mixed(network, parts, seed)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(networks, MIXED, seeds)
def test_many_mixed_batches(network: Network, parts: list[tuple[int, int, bool]], seed: int) -> None:
    check_mixed(network, parts, seed)


def check_mixed(network: Network, parts: list[tuple[int, int, bool]], seed: int) -> None:
    """Decodes and chunks of prefills together: (tokens before, tokens now, whether it is a decode)."""
    chunks = [(s, before, before + (1 if decode else now)) for s, (before, now, decode) in enumerate(parts)]
    world = World(network, [end for _, _, end in chunks], seed)
    world.step([(s, 0, begin) for s, begin, _ in chunks])
    assert_right(world, chunks, world.step(chunks))


AMID = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), max_size=3)


@settings(max_examples=10, deadline=None)
@given(networks, AMID, st.integers(0, 290), seeds)
def test_queries_amid_their_context(network: Network, parts: list[tuple[int, int]], after: int, seed: int) -> None:
    check_amid(network, parts, after, seed)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(networks, AMID, st.integers(0, 290), seeds)
def test_many_queries_amid_their_context(network: Network, parts: list[tuple[int, int]], after: int, seed: int) -> None:
    check_amid(network, parts, after, seed)


def check_amid(network: Network, parts: list[tuple[int, int]], after: int, seed: int) -> None:
    """They see up to themselves, with the bits that they have as the last ones; or, not causal, what follows, too."""
    for n in (network, replace(network, causal=False)):
        chunks = [(s, before, before + now) for s, (before, now) in enumerate(parts)]
        world = World(n, [end + after for _, _, end in chunks], seed)
        world.step([(s, 0, end + after) for s, _, end in chunks])
        results = world.step(chunks, after)
        assert_right(world, chunks, results, after)
        if n.causal:
            assert all(torch.equal(*pair) for pair in zip(world.step(chunks), results, strict=True))


def test_three_rows_of_twelve_tokens() -> None:
    world = World(Network(), [12], 0)
    [whole] = world.step([(0, 0, 12)])
    [rows] = world.step([(0, 4, 7)], after=5)
    assert torch.equal(rows, whole[4:7])


@pytest.mark.parametrize("window", [None, 256, 300])
@pytest.mark.parametrize("dtype", [BF16, I8])
def test_long_context(window: int | None, dtype: torch.dtype) -> None:
    network = Network(kv_heads=1, cache_dtype=dtype, window=window)
    world = World(network, [1100], 0)
    world.step([(0, 0, 1000)])
    for chunks in ([(0, 1000, 1001)], [(0, 1001, 1100)]):
        assert_right(world, chunks, world.step(chunks))


def test_a_sequence_of_one_token_is_its_value() -> None:
    world = World(Network(), [1], 0)
    [out] = world.step([(0, 0, 1)])
    assert torch.equal(out, world.sequences[0].v.repeat_interleave(3, dim=1))


def test_no_sequences() -> None:
    assert World(Network(), [], 0).step([]) == []


def test_huge_scores_do_not_overflow() -> None:
    world = World(Network(dtype=F32, cache_dtype=F32), [50], 0, strength=1e4)
    [out] = world.step([(0, 0, 50)])
    expected, _ = world.expected(0, 0, 50)
    # A softmax of such scores takes one value; which of two near ones, float32 cannot always tell.
    assert float(((out.double() - expected).abs() > 0.01).double().mean()) < 0.01


@pytest.mark.parametrize("cache_dtype", [F32, BF16, I8])
def test_a_later_nan_of_the_same_chunk_does_not_reach_earlier_tokens(cache_dtype: torch.dtype) -> None:
    network = Network(cache_dtype=cache_dtype)
    world = World(network, [40], 0)
    [clean] = world.step([(0, 0, 40)])
    world.sequences[0].k[21] = world.sequences[0].v[21] = float("nan")
    [dirty] = world.step([(0, 0, 40)])
    assert torch.equal(dirty[:21], clean[:21])
    assert dirty[21:].isnan().all()


@pytest.mark.parametrize("cache_dtype", [F32, BF16, I8])
@pytest.mark.parametrize("token", [10, 11])
def test_a_nan_before_the_window_does_not_reach_later_tokens(cache_dtype: torch.dtype, token: int) -> None:
    """Nor does the other token of its pair, where values are multiplied by pairs."""
    world = World(Network(cache_dtype=cache_dtype, window=20), [60], 0)
    [clean] = world.step([(0, 0, 60)])
    world.sequences[0].k[token] = world.sequences[0].v[token] = float("nan")
    [dirty] = world.step([(0, 0, 60)])
    assert torch.equal(dirty[:token], clean[:token]) and torch.equal(dirty[token + 20 :], clean[token + 20 :])
    assert dirty[token : token + 20].isnan().all()


@pytest.mark.parametrize("cache_dtype", [F32, BF16, I8])
@pytest.mark.parametrize("token", [30, 31])
def test_a_nan_outside_a_window_of_both_sides_does_not_reach_a_token(cache_dtype: torch.dtype, token: int) -> None:
    world = World(Network(cache_dtype=cache_dtype, window=9, causal=False), [60], 0)
    [clean] = world.step([(0, 0, 60)])
    assert_right(world, [(0, 0, 60)], [clean])
    world.sequences[0].k[token] = world.sequences[0].v[token] = float("nan")
    [dirty] = world.step([(0, 0, 60)])
    assert torch.equal(dirty[: token - 9], clean[: token - 9]) and torch.equal(dirty[token + 10 :], clean[token + 10 :])
    assert dirty[token - 9 : token + 10].isnan().all()


ENCODERS = [
    Network(group=1, kv_heads=12, head_dim=32, dtype=dtype, cache_dtype=dtype, window=window, causal=False)
    for dtype in (F32, BF16)
    for window in (None, 1, 20, 64, 300)
]


@pytest.mark.parametrize(
    "network",
    [
        n if (n.dtype, n.window) in ((F32, None), (F32, 20), (BF16, 64)) else pytest.param(n, marks=pytest.mark.slow)
        for n in ENCODERS
    ],
    ids=lambda n: f"{n.dtype}-{n.window}".removeprefix("torch."),
)
def test_a_text_is_the_same_alone_and_in_company(network: Network) -> None:
    """Whole texts, each in one step, in any order, with any number of threads."""
    lengths = [1, 8, 15, 16, 17, 100, 33, 257, 600, 2]
    world = World(network, lengths, 3)
    texts = [(s, 0, length) for s, length in enumerate(lengths)]
    _cpu.set_threads(1)
    whole = world.step(texts)
    assert_right(world, texts, whole)
    for threads in (1, 2, 3):
        _cpu.set_threads(threads)
        for text, expected in zip(texts, whole, strict=True):
            assert torch.equal(world.step([text])[0], expected)
        for actual, expected in zip(world.step(texts[::-1]), whole[::-1], strict=True):
            assert torch.equal(actual, expected)


# --- invariance -----------------------------------------------------------------------------------------------------

VARIANTS = [
    Network(),
    Network(group=1, kv_heads=3, head_dim=40, block_size=16, dtype=F32, cache_dtype=F32),
    Network(group=4, cache_dtype=I8, block_size=32),
    Network(group=7, kv_heads=1, head_dim=72, block_size=5),
    Network(window=37, soft_cap=4.0, alibi=True),
    Network(window=290, cache_dtype=I8, block_size=7),
    Network(window=100, chunked=True),
    Network(group=8, window=40, sinks=True),
    Network(group=6, kv_heads=1, head_dim=144, block_size=16, latent=128),
]


@pytest.mark.parametrize("network", VARIANTS, ids=range(len(VARIANTS)))
def test_a_token_is_the_same_in_any_chunk_batch_and_number_of_threads(network: Network) -> None:
    """Three sequences in one step, on one and two threads; alone in chunks of many sizes; and one token at a time."""
    lengths = [530, 17, 275]
    world = World(network, lengths, 1)
    everything = [(s, 0, length) for s, length in enumerate(lengths)]
    _cpu.set_threads(1)
    whole = world.step(everything)
    _cpu.set_threads(2)
    for one_thread, two_threads in zip(whole, world.step(everything), strict=True):
        assert torch.equal(one_thread, two_threads)

    begin, sizes = 0, iter([1, 1, 2, 3, 33, 7, 64, 1, 120, 31, 1, 2, 264])
    while begin < lengths[0]:
        end = begin + next(sizes)
        _cpu.set_threads(1 + begin % 2)
        others = [(2, begin % 200, begin % 200 + 3), (1, 16, 17)] if begin % 3 else []
        assert torch.equal(world.step([(0, begin, end), *others])[0], whole[0][begin:end])
        begin = end

    for position in [0, 1, 15, 16, 255, 256, 257, 300, 511, 512, 529]:
        _cpu.set_threads(1 + position % 2)
        [alone] = world.step([(0, position, position + 1)])
        assert torch.equal(alone, whole[0][position : position + 1])
        together = world.step([(2, 100, 101), (0, position, position + 1), (1, 3, 4)])
        assert torch.equal(together[1], alone)
        assert torch.equal(together[0], whole[2][100:101]) and torch.equal(together[2], whole[1][3:4])


# --- blocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, I8])
@pytest.mark.parametrize("threads", [1, 2])
def test_copied_blocks(dtype: torch.dtype, threads: int) -> None:
    """Several targets of one source, a chain and a cycle: each target gets what its source held before."""
    _cpu.set_threads(threads)
    caches = make_cache(3, 8, 16, 2, 64, dtype)
    for i, cache in enumerate(caches):
        for blocks in (cache.key, cache.value):
            blocks.copy_(torch.randint(256, blocks.shape, generator=torch.Generator().manual_seed(i)).byte())
    several = [(0, 7), (0, 2), (3, 6), (0, 5)]
    for pairs in ([(0, 7), (3, 6)], several, [(0, 1), (1, 2), (1, 3), (4, 5), (5, 4), (6, 6)]):
        before = [(cache.key.clone(), cache.value.clone()) for cache in caches]
        kernels.copy_blocks(caches, pairs)
        for cache, old in zip(caches, before, strict=True):
            for blocks, old_blocks in zip((cache.key, cache.value), old, strict=True):
                for source, target in pairs:
                    old_blocks = old_blocks.index_copy(0, torch.tensor([target]), blocks[target][None])
                    assert torch.equal(blocks[target], old[0 if blocks is cache.key else 1][source])
                assert torch.equal(blocks, old_blocks)


def test_swapped_blocks_go_to_another_cache() -> None:
    gpu, host = (make_cache(2, blocks, 16, 1, 64, BF16) for blocks in (5, 9))
    for cache in gpu:
        cache.key.fill_(1)[3].fill_(7)
        cache.value.fill_(2)[4].fill_(8)
    kernels.swap_blocks(gpu, host, [(3, 8), (4, 0)])
    for cache in host:
        assert cache.key[[8, 0]].unique(dim=1).flatten().tolist() == [7, 1]
        assert cache.value[[8, 0]].unique(dim=1).flatten().tolist() == [2, 8]
        assert not cache.key[1:8].any()
    kernels.swap_blocks(gpu, host, [])
    kernels.copy_blocks(gpu, [])


@pytest.mark.parametrize("pair", [(-1, 0), (0, 5), (5, 0)])
def test_copies_of_blocks_that_do_not_exist_are_refused(pair: tuple[int, int]) -> None:
    with pytest.raises(IndexError, match="cannot copy block"):
        kernels.copy_blocks(make_cache(1, 5, 16, 1, 8, BF16), [pair])


# --- the cache ------------------------------------------------------------------------------------------------------


def test_a_cache_takes_as_much_memory_as_its_tokens() -> None:
    for dtype, size in ((F32, 4), (BF16, 2)):
        [cache] = make_cache(1, 3, 16, 2, 64, dtype)
        assert cache.key.shape == cache.value.shape == (3, 16 * 2 * 64 * size)
        assert not cache.key.any() and cache.key.data_ptr() % 64 == 0
    [cache] = make_cache(1, 3, 16, 2, 64, I8)
    assert cache.key.shape == (3, 16 * 2 * (64 + 4))  # and a scale


@pytest.mark.parametrize(("dtype", "size"), [(F32, 4 * 592), (BF16, 2 * 592), (I8, 592 + 4)])
def test_a_latent_cache_has_one_vector_a_token_and_its_blocks_are_moved_once(dtype: torch.dtype, size: int) -> None:
    first, second = (make_cache(2, 4, 8, 1, 578, dtype, vectors=1) for _ in range(2))
    for i, cache in enumerate(first):
        assert cache.value is cache.key and cache.key.shape == (4, 8 * size)  # 578 padded to a multiple of 16
        cache.key.copy_(torch.arange(4)[:, None] + 10 * i)
    kernels.copy_blocks(first, [(0, 1), (1, 0)])  # done twice, they would be where they were
    assert [cache.key[:, 0].tolist() for cache in first] == [[1, 0, 2, 3], [11, 10, 12, 13]]
    kernels.swap_blocks(first, second, [(3, 0), (1, 2)])
    assert [cache.key[:, -1].tolist() for cache in second] == [[3, 0, 0, 0], [13, 0, 10, 0]]


def test_what_cannot_be_is_refused() -> None:
    from octavo.core.errors import ConfigError

    with pytest.raises(ConfigError, match="no KV cache of type"):
        make_cache(1, 1, 16, 1, 64, torch.float16)
    with pytest.raises(ValueError, match="head_dim must be even"):
        make_cache(1, 1, 16, 1, 7, BF16)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        _cpu.paged_attention(0, 0, 0, 0, 0, 4, 3, 64, 16, _cpu.Dtype.bf16, _cpu.Dtype.bf16, 1.0)
    for kv_heads, latent in ((2, 32), (1, 65)):
        with pytest.raises(ValueError, match="latent cache"):
            _cpu.paged_attention(
                0, 0, 0, 0, 0, 4, kv_heads, 64, 16, _cpu.Dtype.bf16, _cpu.Dtype.bf16, 1.0, latent=latent
            )
