"""The GPU backend's attention against float64 arithmetic, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.errors import UnsupportedModelError
from octavo.kernels.forward_batch import ForwardBatch, make_batch
from octavo.kernels.interface import AttentionSpec

pytest.importorskip("triton")

from octavo.kernels.triton import attention
from octavo.kernels.triton.attention import paged_attention
from octavo.kernels.triton.backend import TritonKernels
from octavo.kernels.triton.cache import TritonLayerCache, make_cache

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A step: per sequence the tokens computed before and in this step, and the shapes."""

    lengths: list[tuple[int, int]]
    block_size: int = 16
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    window: int | None = None
    cap: float = 0.0
    #: Slopes of ALiBi, 2^-1, 2^-2 and so on.
    alibi: bool = False
    seed: int = 0
    #: Tokens of each context that follow those of the step.
    after: int = 0
    #: Whether tokens see none after them; if so, whether some see those of a run of their own.
    causal: bool = True
    spans: bool = False
    #: Whether the window, if there is one, is a chunk.
    chunked: bool = False
    #: Sinks of the heads, from one that takes nearly all to one that takes nearly nothing.
    sinks: bool = False


@st.composite
def cases(draw: st.DrawFn) -> Case:
    decodes = draw(st.lists(st.integers(0, 100), max_size=2))
    prefills = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=2))
    return Case(
        lengths=[(before, 1) for before in decodes] + prefills,
        block_size=draw(st.sampled_from([1, 3, 16, 16, 32, 128])),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 17])),
        head_dim=8 * draw(st.sampled_from([1, 2, 3, 5])),
        window=draw(st.none() | st.integers(1, 100)),
        cap=draw(st.sampled_from([0.0, 0.0, 2.0])),
        alibi=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
        after=draw(st.sampled_from([0, 0, 5, 70])),
        chunked=draw(st.booleans()),
        sinks=draw(st.booleans()),
    )


@dataclass
class Step:
    """The tensors of a case, and what the cache holds of each sequence."""

    batch: ForwardBatch
    cache: TritonLayerCache
    q: Tensor
    keys: list[Floats]
    values: list[Floats]


def build(case: Case, dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None) -> Step:
    """Lays the sequences into shuffled blocks; what no sequence owns is NaN, block 0 among it."""
    generator = torch.Generator().manual_seed(case.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    size = case.block_size
    totals = [before + new + case.after for before, new in case.lengths]
    needed = [-(-total // size) for total in totals]
    caches = make_cache(2, sum(needed) + 2, size, case.kv_heads, case.head_dim, cache_dtype or dtype, DEVICE)
    caches[0].pool.fill_(0xFF)  # NaN, but in int8, whose scales are
    cache = caches[1]
    free = (1 + torch.randperm(sum(needed) + 1, generator=generator)).tolist()
    tables = torch.zeros(len(totals), max(needed, default=0) + 1, dtype=torch.int32)
    keys, values, starts = [], [], [0]
    slots: list[int] = []
    positions: list[int] = []
    for s, (before, new) in enumerate(case.lengths):
        blocks = [free.pop() for _ in range(needed[s])]
        tables[s, : needed[s]] = torch.tensor(blocks)
        own = torch.tensor([blocks[p // size] * size + p % size for p in range(totals[s])], dtype=torch.int64)
        write(cache.key, cache.key_scale, own.to(DEVICE), random(totals[s], case.kv_heads, case.head_dim))
        write(cache.value, cache.value_scale, own.to(DEVICE), random(totals[s], case.kv_heads, case.head_dim))
        keys.append(held(cache.key, cache.key_scale, own))
        values.append(held(cache.value, cache.value_scale, own))
        slots += own.tolist()[before : before + new]
        positions += range(before, before + new)
        starts.append(starts[-1] + new)
    batch = make_batch(
        [new for _, new in case.lengths],
        totals,
        tables.numpy(),
        size,
        TritonKernels(DEVICE),
        starts=[before for before, _ in case.lengths],
    )
    assert (batch.slot_mapping[0].tolist(), batch.positions.tolist()) == (slots, positions)
    if case.spans:
        until = runs(case, np.random.default_rng(case.seed))
        batch.sees_until, batch.has_spans = torch.from_numpy(until).to(DEVICE), True
    return Step(batch, cache, random(starts[-1], case.kv_heads * case.group, case.head_dim), keys, values)


def runs(case: Case, rng: np.random.Generator) -> NDArray[np.int32]:
    """``ForwardBatch.sees_until`` of random runs; the last one of a sequence may end after the step's tokens."""
    until = []
    for before, new in case.lengths:
        start, end = 0, before + new + case.after
        seen = np.full(end, -1, np.int32)
        while start < end:
            stop = min(end, start + int(rng.integers(1, 50)))
            if rng.integers(2):
                seen[start:stop] = stop - 1
            start = stop
        until.append(seen[before : before + new])
    return np.concatenate([*until, np.zeros(0, np.int32)])


def write(array: Tensor, scale: Tensor | None, slots: Tensor, x: Tensor) -> None:
    """Puts x [tokens, kv_heads, head_dim] into its slots."""
    blocks, offsets = slots // array.shape[2], slots % array.shape[2]
    if scale is not None:
        largest = x.float().abs().amax(-1) / (127 if array.dtype == torch.int8 else 448)
        scale[blocks, :, offsets] = largest
        x = x.float() / largest[:, :, None]
    if array.dtype == torch.int8:
        x = x.round()
    raw = torch.uint8 if array.itemsize == 1 else array.dtype  # torch has no indexed writes of fp8
    array.view(raw)[blocks, :, offsets] = x.to(array.dtype).view(raw)


def held(array: Tensor, scale: Tensor | None, slots: Tensor) -> Floats:
    """[tokens, kv_heads, head_dim]: what the cache says its slots hold."""
    blocks, offsets = (slots // array.shape[2]).to(DEVICE), (slots % array.shape[2]).to(DEVICE)
    numbers = array.double()[blocks, :, offsets]
    if scale is not None:
        numbers = numbers * scale.double()[blocks, :, offsets, None]
    return numbers.cpu().numpy()


def attend(case: Case, step: Step, scale: float) -> Floats:
    """Attention of every token and head by itself."""
    out = np.zeros(tuple(step.q.shape))
    q, row, until = step.q.double().cpu().numpy(), 0, step.batch.sees_until.tolist()
    for (before, new), key, value in zip(case.lengths, step.keys, step.values, strict=True):
        for position in range(before, before + new):
            oldest = 0 if case.window is None else max(0, position - case.window + 1)
            if case.window is not None and case.chunked:
                oldest = position // case.window * case.window
            last = max(position, until[row]) if case.causal else len(key) - 1
            for head in range(q.shape[1]):
                kv = head // case.group
                scores = key[oldest : last + 1, kv] @ q[row, head] * scale
                if case.cap:
                    scores = case.cap * np.tanh(scores / case.cap)
                if case.alibi:
                    scores += 2.0 ** -(head + 1) * np.arange(oldest - position, last - position + 1)
                weights = np.exp(scores - scores.max())
                total = weights.sum()
                if case.sinks:
                    total += np.exp(float(sinks_of(q.shape[1])[head]) - scores.max())
                out[row, head] = weights @ value[oldest : last + 1, kv] / total
            row += 1
    return out


def sinks_of(heads: int) -> Tensor:
    return torch.linspace(9, -9, heads, device=DEVICE)


def compute(case: Case, step: Step, scale: float, deterministic: bool) -> Tensor:
    slopes = tuple(2.0 ** -(head + 1) for head in range(step.q.shape[1])) if case.alibi else None
    chunked = case.chunked and case.window is not None
    spec = AttentionSpec(
        scale, case.window, case.cap or None, slopes, case.causal, sees_spans=case.spans, chunked=chunked
    )
    if case.sinks:
        spec = replace(spec, sinks=sinks_of(step.q.shape[1]))
    return paged_attention(step.q, step.cache, step.batch, spec, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@settings(max_examples=3, deadline=None)
@given(cases())
def test_attention_is_that_of_each_token_over_its_own_context(deterministic: bool, case: Case) -> None:
    check_attention(deterministic, case)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@settings(max_examples=50, deadline=None)
@given(cases())
def test_attention_of_many_cases_is_that_of_each_token_over_its_own_context(deterministic: bool, case: Case) -> None:
    check_attention(deterministic, case)


def check_attention(deterministic: bool, case: Case) -> None:
    step = build(case)
    scale = case.head_dim**-0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "PIECE", 64)
        out = compute(case, step, scale, deterministic)
    assert out.shape == step.q.shape and out.dtype == torch.float32
    np.testing.assert_allclose(out.cpu().numpy(), attend(case, step, scale), atol=3e-6, rtol=2e-5)


#: Weights are rounded to the type of the activations before they meet the values, and so is the result.
BOUNDS = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        *((torch.bfloat16, cache) for cache in (None, torch.float32, torch.int8, torch.float8_e4m3fn)),
        (torch.float16, None),
        *(
            pytest.param(torch.float16, cache, marks=pytest.mark.slow)
            for cache in (torch.float32, torch.int8, torch.float8_e4m3fn)
        ),
    ],
)
def test_types_of_activations_and_caches(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, deterministic: bool
) -> None:
    case = Case([(150, 1), (3, 1), (97, 20)], kv_heads=1, group=3, head_dim=40, seed=1)
    step = build(case, dtype, cache_dtype)
    out = compute(case, step, 40**-0.5, deterministic)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.double().cpu().numpy(), attend(case, step, 40**-0.5), atol=2 * BOUNDS[dtype])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cache_of_another_16_bit_type_loses_nothing(deterministic: bool) -> None:
    case = Case([(40, 1), (0, 20)])
    step = build(case, torch.bfloat16, torch.float16)
    out = compute(case, step, 0.25, deterministic)
    np.testing.assert_allclose(out.double().cpu().numpy(), attend(case, step, 0.25), atol=2**-7)


@pytest.mark.parametrize(
    ("parts", "window"), [(2, 70), (3, None), pytest.param(18, None, marks=pytest.mark.slow), (7, 1)]
)
def test_a_context_may_be_cut_into_any_number_of_parts(parts: int, window: int | None) -> None:
    case = Case([(300, 1), (0, 1), (63, 1), (64, 1)], kv_heads=1, head_dim=8, window=window, sinks=parts == 2)
    step = build(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "count_parts", lambda *_: parts)
        out = compute(case, step, 0.4, False)
    np.testing.assert_allclose(out.cpu().numpy(), attend(case, step, 0.4), atol=3e-6, rtol=2e-5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_padding_rows_are_zero_and_change_nothing(deterministic: bool) -> None:
    """As in a captured graph, where lengths are said to be the greatest there are."""
    case = Case([(90, 1), (20, 1)])
    step = build(case)
    expected = compute(case, step, 0.25, deterministic)
    batch = step.batch
    padded = replace(
        batch,
        query_start_loc=torch.arange(5, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.cat((batch.seq_lens, torch.zeros(2, dtype=torch.int32, device=DEVICE))),
        block_tables=torch.nn.functional.pad(batch.block_tables, (0, 60, 0, 2)),
        slot_mapping=torch.nn.functional.pad(batch.slot_mapping, (0, 2), value=-1),
        positions=torch.nn.functional.pad(batch.positions, (0, 2), value=77),
        num_decodes=4,
        max_seq_len=1000,
    )
    wide = torch.full((4, *step.q.shape[1:]), math.nan, device=DEVICE)
    wide[:2] = step.q
    wide[2:] = 1.0
    out = paged_attention(wide, step.cache, padded, AttentionSpec(0.25), deterministic=deterministic)
    assert not out[2:].any()
    if deterministic:
        assert torch.equal(out[:2], expected)
    torch.testing.assert_close(out[:2], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_queries_amid_their_context_see_up_to_themselves(deterministic: bool) -> None:
    case = Case([(90, 1), (4, 3)], after=70)
    step = build(case)
    assert step.batch.positions.tolist() == [90, 4, 5, 6] and step.batch.seq_lens.tolist() == [161, 77]
    out = compute(case, step, 0.25, deterministic)
    np.testing.assert_allclose(out.cpu().numpy(), attend(case, step, 0.25), atol=3e-6, rtol=2e-5)


def test_attention_that_is_not_computed_is_refused() -> None:
    kernels = TritonKernels(DEVICE)
    kernels.check_attention(AttentionSpec(1.0, 16, 5.0, (0.5,)))
    kernels.check_attention(AttentionSpec(1.0, causal=False))
    with pytest.raises(UnsupportedModelError, match="causal"):
        kernels.check_attention(AttentionSpec(1.0, 16, causal=False))


@pytest.mark.parametrize("deterministic", [False, True])
def test_queries_may_be_strided_views(deterministic: bool) -> None:
    case = Case([(4, 1), (2, 3)], seed=7)
    step = build(case)
    wide = torch.cat((step.q, step.q), dim=1)[:, : step.q.shape[1]]
    assert not wide.is_contiguous()
    expected = compute(case, step, 1.0, deterministic)
    step.q = wide
    assert torch.equal(compute(case, step, 1.0, deterministic), expected)


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_empty_step_is_computed_to_nothing(deterministic: bool) -> None:
    case = Case([])
    assert compute(case, build(case), 1.0, deterministic).shape == (0, 4, 16)


@dataclass(frozen=True)
class Fold:
    """How a sequence's tokens are computed: in chunks, with so many programs a context."""

    chunks: list[int]
    parts: int


def folded(case: Case, whole: Step, total: int, fold: Fold, others: list[tuple[int, int]]) -> Tensor:
    """Attention of the first ``total`` tokens of the step's only sequence, a chunk per step, beside other sequences."""
    rows, before = [], 0
    other = build(replace(case, lengths=others, seed=9), whole.q.dtype)
    blocks = whole.cache.pool.shape[0]
    pool = torch.cat((whole.cache.pool, other.cache.pool))
    cache = make_cache(2, len(pool), case.block_size, case.kv_heads, case.head_dim, whole.q.dtype, DEVICE)[1]
    cache.pool.copy_(pool)
    for chunk in fold.chunks:
        alone = chunk == 1  # a decode goes before the others, a prefill after it
        width = max(whole.batch.block_tables.shape[2], other.batch.block_tables.shape[2])

        def table(step: Step, first: int, width: int = width) -> Tensor:
            blocks = step.batch.block_tables
            return torch.nn.functional.pad(blocks + first, (0, width - blocks.shape[2]))

        q = whole.q[before : before + chunk]
        tables = [table(whole, 0), table(other, blocks)]
        lens = [torch.tensor([before + chunk], dtype=torch.int32, device=DEVICE), other.batch.seq_lens]
        counts = [torch.tensor([chunk], dtype=torch.int32, device=DEVICE), other.batch.query_start_loc.diff()]
        order = [0, 1] if alone else [1, 0]
        counted = torch.cat([counts[i] for i in order]).cumsum(0)
        queries = [q, other.q]
        positions = [whole.batch.positions[before : before + chunk], other.batch.positions]
        batch = replace(
            other.batch,
            query_start_loc=torch.nn.functional.pad(counted, (1, 0)).to(torch.int32),
            seq_lens=torch.cat([lens[i] for i in order]),
            block_tables=torch.cat([tables[i] for i in order], dim=1),
            positions=torch.cat([positions[i] for i in order]),
            num_decodes=other.batch.num_decodes + alone,
            max_seq_len=max(before + chunk, other.batch.max_seq_len),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "PIECE", 64)
            patch.setattr(attention, "count_parts", lambda *_: fold.parts)
            out = paged_attention(
                torch.cat([queries[i] for i in order]),
                cache,
                batch,
                AttentionSpec(0.25, case.window),
                deterministic=True,
            )
        rows.append(out[:chunk] if alone else out[len(other.q) :])
        before += chunk
    assert before == total
    return torch.cat(rows)


def check_folds(case: Case, dtype: torch.dtype, folds: list[tuple[Fold, list[tuple[int, int]]]]) -> None:
    """All folds of the case's only sequence give the bits of the first, which is right."""
    total = case.lengths[0][1]
    whole = build(case, dtype)
    results = [folded(case, whole, total, *fold) for fold in folds]
    bound = {torch.float32: 3e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
    np.testing.assert_allclose(results[0].double().cpu().numpy(), attend(case, whole, 0.25), atol=bound)
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize(
    ("dtype", "window", "group"),
    [
        (torch.bfloat16, 90, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (torch.float32, 90, 3),
                (torch.float16, None, 3),
                (torch.float16, 90, 1),
                (torch.bfloat16, None, 1),
            )
        ),
    ],
)
def test_fixed_order_gives_the_same_bits_in_any_chunks_and_batch(
    dtype: torch.dtype, window: int | None, group: int
) -> None:
    case = Case([(0, 132)], window=window, group=group, kv_heads=1, seed=2)
    folds = [
        (Fold([132], 1), []),
        (Fold([100, 1, 31], 1), [(5, 1), (70, 1), (3, 9)]),
        (Fold([63, 2, 66, 1], 3), [(30, 1)]),
    ]
    check_folds(case, dtype, folds)


# --- what only a GPU is fast enough for ------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_fixed_order_of_a_large_model(head_dim: int) -> None:
    case = Case([(0, 1100)], group=4, kv_heads=2, head_dim=head_dim, seed=3)
    folds = [
        (Fold([1100], 1), []),
        (Fold([1000, 1, 99], 1), [(500, 1), (70, 1), (3, 90)]),
        (Fold([3, 700, 1, 395, 1], 8), [(30, 1)] * 20),
    ]
    check_folds(case, torch.bfloat16, folds)


def attend_at_once(case: Case, step: Step, scale: float) -> Tensor:
    """As ``attend``, a sequence at a time on the device."""
    rows, parts = step.q.double().split([new for _, new in case.lengths]), []
    for (before, new), q, key, value in zip(case.lengths, rows, step.keys, step.values, strict=True):
        k, v = torch.from_numpy(key).to(DEVICE), torch.from_numpy(value).to(DEVICE)
        grouped = q.view(new, case.kv_heads, case.group, case.head_dim)
        scores = torch.einsum("tkgd,skd->kgts", grouped, k) * scale
        columns, positions = (
            torch.arange(before + new, device=DEVICE),
            torch.arange(before, before + new, device=DEVICE),
        )
        unseen = columns > positions[:, None]
        if case.window is not None:
            unseen |= columns <= positions[:, None] - case.window
        weights = scores.masked_fill_(unseen, float("-inf")).softmax(-1)
        parts.append(torch.einsum("kgts,skd->tkgd", weights, v).reshape(new, -1, case.head_dim))
    return torch.cat(parts)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 16), (128, 128), (96, 32), (256, 16)])
def test_long_contexts_and_large_heads(
    head_dim: int, block_size: int, cache_dtype: torch.dtype | None, window: int | None, deterministic: bool
) -> None:
    lengths = [(8191, 1), (3000, 1), (64, 1), (0, 1500), (2000, 333)]
    case = Case(lengths, block_size, kv_heads=8, group=4, head_dim=head_dim, window=window, seed=4)
    step = build(case, torch.bfloat16, cache_dtype)
    out = compute(case, step, head_dim**-0.5, deterministic)
    torch.testing.assert_close(out.double(), attend_at_once(case, step, head_dim**-0.5), atol=2**-7, rtol=2**-6)
    assert torch.equal(out, compute(case, step, head_dim**-0.5, deterministic))
