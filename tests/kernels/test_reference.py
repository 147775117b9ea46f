"""The reference kernels against float64 arithmetic written token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.kernels import load_kernels, reference
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Activation, AttentionSpec, LayerCache
from octavo.kernels.reference import ReferenceKernels
from tests.kernels import torch_facade

KERNELS: Any = torch_facade.of_torch(ReferenceKernels())
SMALL = KVSpec("full", 1, 2, "float32")
Floats = NDArray[np.float64]


@dataclass
class Case:
    """A step: per sequence the tokens computed before and in this step, and the shapes."""

    lengths: list[tuple[int, int]]
    block_size: int
    kv_heads: int
    group: int
    head_dim: int
    window: int | None
    seed: int
    #: Tokens of each context that follow those of the step.
    after: int = 0
    soft_cap: float | None = None
    alibi: bool = False
    causal: bool = True
    #: Whether the window, if there is one, is a chunk.
    chunked: bool = False

    def spec(self, scale: float) -> AttentionSpec:
        """With a slope for each head, or none."""
        slopes = tuple(2.0**-i for i in range(self.kv_heads * self.group)) if self.alibi else None
        return AttentionSpec(scale, self.window, self.soft_cap, slopes, self.causal, chunked=self.chunked)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    decodes = draw(st.lists(st.integers(0, 20), max_size=4))
    prefills = draw(st.lists(st.tuples(st.integers(0, 11), st.integers(1, 9)), max_size=3))
    return Case(
        lengths=[(before, 1) for before in decodes] + prefills,
        block_size=draw(st.integers(1, 5)),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        head_dim=2 * draw(st.integers(1, 4)),
        window=draw(st.none() | st.integers(1, 9)),
        seed=draw(st.integers(0, 2**31)),
        after=draw(st.integers(0, 6)),
        soft_cap=draw(st.none() | st.just(1.5)),
        alibi=draw(st.booleans()),
        causal=(causal := draw(st.booleans())),
        chunked=causal and draw(st.booleans()),
    )


@dataclass
class Step:
    """The tensors of a case, and what each sequence's whole keys and values are."""

    batch: ForwardBatch
    cache: LayerCache
    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def build(case: Case, dtype: torch.dtype = torch.float32) -> Step:
    """Lays the sequences into shuffled blocks; every slot that no sequence owns is NaN, block 0 among them."""
    generator = torch.Generator().manual_seed(case.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    totals = [before + new + case.after for before, new in case.lengths]
    needed = [-(-total // case.block_size) for total in totals]
    spec = KVSpec("full", case.kv_heads, case.head_dim, str(dtype).removeprefix("torch."))
    cache = KERNELS.make_group_cache(spec, 1, sum(needed) + 2, case.block_size)[0]
    cache.key.fill_(math.nan)
    cache.value.fill_(math.nan)
    free = (1 + torch.randperm(sum(needed) + 1, generator=generator)).tolist()
    tables = torch.zeros(len(totals), max(needed, default=0) + 1, dtype=torch.int32)
    keys, values, starts = [], [], [0]
    slots: list[int] = []
    positions: list[int] = []
    for s, (before, new) in enumerate(case.lengths):
        blocks = [free.pop() for _ in range(needed[s])]
        tables[s, : needed[s]] = torch.tensor(blocks)
        own = [blocks[p // case.block_size] * case.block_size + p % case.block_size for p in range(totals[s])]
        keys.append(random(totals[s], case.kv_heads, case.head_dim))
        values.append(random(totals[s], case.kv_heads, case.head_dim))
        KERNELS.reshape_and_cache(keys[-1], values[-1], cache, torch.tensor(own))
        slots += own[before : before + new]
        positions += range(before, before + new)
        starts.append(starts[-1] + new)
    batch = torch_facade.make_batch(
        [new for _, new in case.lengths], totals, tables, case.block_size, starts=[before for before, _ in case.lengths]
    )
    assert (batch.slot_mapping[0].tolist(), batch.positions.tolist()) == (slots, positions)
    return Step(batch, cache, random(starts[-1], case.kv_heads * case.group, case.head_dim), keys, values)


def attend(case: Case, step: Step, scale: float) -> Floats:
    """Attention of every token and head by itself."""
    out = np.zeros(tuple(step.q.shape))
    q, row = step.q.double().numpy(), 0
    for (before, new), key, value in zip(case.lengths, step.keys, step.values, strict=True):
        k, v = key.double().numpy(), value.double().numpy()
        for position in range(before, before + new):
            context = np.arange(len(k))
            distance = context - position
            window = len(k) if case.window is None else case.window
            if case.causal:
                oldest = position // window * window if case.chunked else position - window + 1
                seen = context[(distance <= 0) & (context >= oldest)]
            else:
                seen = context[np.abs(distance) <= window]
            for head in range(q.shape[1]):
                kv = head // case.group
                scores = k[seen, kv] @ q[row, head] * scale
                if case.soft_cap:
                    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                if case.alibi:
                    scores += 2.0**-head * (seen - position)
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ v[seen, kv] / weights.sum()
            row += 1
    return out


@settings(max_examples=150, deadline=None)
@given(cases())
def test_attention_is_that_of_each_token_over_its_own_context(case: Case) -> None:
    step = build(case)
    scale = case.head_dim**-0.5
    out = KERNELS.paged_attention(step.q, step.cache, step.batch, case.spec(scale))
    assert out.shape == step.q.shape and out.dtype == torch.float32
    np.testing.assert_allclose(out.numpy(), attend(case, step, scale), atol=2e-6, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 40))
def test_attention_in_slices_is_the_same(case: Case, limit: int) -> None:
    step = build(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_MAX_ELEMENTS", limit)
        out = KERNELS.paged_attention(step.q, step.cache, step.batch, case.spec(0.5))
    np.testing.assert_allclose(out.numpy(), attend(case, step, 0.5), atol=2e-6, rtol=1e-5)


def test_attention_over_many_blocks_in_bfloat16_is_rounded_once() -> None:
    case = Case([(200, 1), (3, 1), (0, 150), (97, 30)], 16, 2, 3, 64, None, 1)
    step = build(case, torch.bfloat16)
    out = KERNELS.paged_attention(step.q, step.cache, step.batch, AttentionSpec(0.125))
    assert out.dtype == torch.bfloat16
    exact = torch.from_numpy(attend(case, step, 0.125)).to(torch.bfloat16).float()
    # Half a unit in the last place of bfloat16 can fall the other way.
    np.testing.assert_allclose(out.float().numpy(), exact.numpy(), rtol=2**-7, atol=1e-6)
    assert (out.float() == exact).double().mean() > 0.99


@pytest.mark.parametrize("causal", [True, False])
def test_queries_amid_their_context_see_up_to_themselves(causal: bool) -> None:
    case = Case([(4, 3), (6, 1)], 4, 2, 2, 8, None, 3, after=5, causal=causal)
    step = build(case)
    assert step.batch.positions.tolist() == [4, 5, 6, 6] and step.batch.seq_lens.tolist() == [12, 12]
    out = KERNELS.paged_attention(step.q, step.cache, step.batch, case.spec(0.5))
    np.testing.assert_allclose(out.numpy(), attend(case, step, 0.5), atol=2e-6, rtol=1e-5)


def test_attention_takes_queries_that_are_strided_views() -> None:
    case = Case([(4, 1), (2, 3)], 2, 2, 2, 4, None, 7)
    step = build(case)
    wide = torch.cat((step.q, step.q), dim=1)[:, :4]
    assert not wide.is_contiguous()
    expected = KERNELS.paged_attention(step.q, step.cache, step.batch, AttentionSpec(1.0))
    assert torch.equal(KERNELS.paged_attention(wide, step.cache, step.batch, AttentionSpec(1.0)), expected)


def test_cache_holds_what_was_written_and_nothing_else_changes() -> None:
    cache = KERNELS.make_group_cache(KVSpec("full", 2, 6, "bfloat16"), 2, 3, 4)[1]
    assert cache.key.shape == cache.value.shape == (3, 4, 2, 6)
    qkv = torch.randn(2, 5, 6).to(torch.bfloat16)
    k, v = qkv[:, :2], qkv[:, 2:4]
    KERNELS.reshape_and_cache(k, v, cache, torch.tensor([11, 2]))
    assert torch.equal(cache.key[2, 3], k[0]) and torch.equal(cache.value[0, 2], v[1])
    assert cache.key.view(-1, 12).any(1).sum() == 2
    KERNELS.reshape_and_cache(k, v, cache, torch.tensor([-1, 5]))
    assert torch.equal(cache.key[1, 1], k[1]) and torch.equal(cache.value[1, 1], v[1])
    assert cache.key.view(-1, 12).any(1).sum() == 3


def test_rotary_and_cache_is_both_in_turn() -> None:
    step = build(Case([(2, 1), (0, 3)], 4, 2, 2, 8, None, 3))
    table = torch.rand(16, 6)
    qkv = torch.randn(4, 8, 8)
    q, k, v = qkv.clone().split([4, 2, 2], dim=1)
    rotated = KERNELS.rotary_and_cache(q, k, v, step.batch, table, step.cache)
    q, k, v = qkv.split([4, 2, 2], dim=1)
    expected_q, expected_k = KERNELS.rotary(q, k, step.batch.positions, table)
    assert torch.equal(rotated, expected_q)
    for written, expected in ((step.cache.key, expected_k), (step.cache.value, v)):
        assert torch.equal(written.view(-1, 2, 8)[step.batch.slot_mapping[0]], expected)


def test_copy_blocks_copies_keys_and_values_of_every_layer() -> None:
    caches = KERNELS.make_group_cache(SMALL, 2, 4, 2)
    for cache in caches:
        cache.key.normal_()
        cache.value.normal_()
    before = [(cache.key.clone(), cache.value.clone()) for cache in caches]
    KERNELS.copy_blocks(caches, [(0, 3), (3, 1)])
    KERNELS.copy_blocks(caches, [])
    for cache, (key, value) in zip(caches, before, strict=True):
        assert torch.equal(cache.key, key[[0, 3, 2, 0]])
        assert torch.equal(cache.value, value[[0, 3, 2, 0]])
    KERNELS.copy_blocks(caches, [(2, 0), (2, 3)])
    for cache, (key, value) in zip(caches, before, strict=True):
        assert torch.equal(cache.key, key[[2, 3, 2, 2]])
        assert torch.equal(cache.value, value[[2, 3, 2, 2]])


def test_swap_blocks_copies_from_one_cache_to_another() -> None:
    device, host = (KERNELS.make_group_cache(SMALL, 2, blocks, 2) for blocks in (3, 5))
    for cache in device:
        cache.key.normal_()
        cache.value.normal_()
    KERNELS.swap_blocks(device, host, [(2, 4), (0, 1)])
    KERNELS.swap_blocks(device, host, [])
    for source, target in zip(device, host, strict=True):
        for blocks, copied in ((source.key, target.key), (source.value, target.value)):
            assert torch.equal(copied[[4, 1]], blocks[[2, 0]])
            assert not copied[[0, 2, 3]].any()


@pytest.mark.parametrize("pair", [(-1, 0), (3, 0), (0, 5), (0, -1)])
def test_swaps_of_blocks_that_do_not_exist_are_refused(pair: tuple[int, int]) -> None:
    device, host = (KERNELS.make_group_cache(SMALL, 1, blocks, 2) for blocks in (3, 5))
    with pytest.raises((IndexError, RuntimeError), match="index"):
        KERNELS.swap_blocks(device, host, [pair])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 5), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.integers(0, 2), st.integers(0, 99)
)
def test_rotary_turns_pairs_half_a_rotation_apart(
    tokens: int, heads: int, kv_heads: int, half: int, rest: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    head_dim = 2 * half + rest
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    positions = torch.randint(0, 50, (tokens,), generator=generator)
    angles = torch.rand(50, half, generator=generator, dtype=torch.float64) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    expected = [x.double().numpy().copy() for x in (q, k)]
    untouched = v.clone()
    for x in expected:
        for token in range(tokens):
            for i in range(half):
                c, s = math.cos(angles[positions[token], i]), math.sin(angles[positions[token], i])
                first, second = x[token, :, i].copy(), x[token, :, i + half].copy()
                x[token, :, i] = first * c - second * s
                x[token, :, i + half] = second * c + first * s
    for out, want in zip(KERNELS.rotary(q, k, positions, table), expected, strict=True):
        np.testing.assert_allclose(out.numpy(), want, atol=2e-6)
    assert torch.equal(v, untouched)


@pytest.mark.parametrize("sections", [(2, 3, 1), (1, 1, 1, 1, 1, 0, 1)])
def test_sections_of_a_head_turn_by_positions_of_their_own(sections: tuple[int, ...]) -> None:
    """Bit for bit as a head that is rotated by each position alone; positions of text are equal."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb

    positions, angles = torch.randint(0, 50, (3, 7)), torch.rand(50, 6) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    q, k = torch.randn(7, 4, 12), torch.randn(7, 2, 12)
    rotated = KERNELS.rotary(q.clone(), k.clone(), positions, table, sections)
    parts = torch.cat([angles[positions[i % 3]].split(sections, dim=1)[i] for i in range(len(sections))], dim=1)
    whole = torch.cat((parts, parts), dim=1)[None]
    want = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], whole.cos(), whole.sin())
    for ours, theirs in zip(rotated, want, strict=True):
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1))
    text = positions[:1].repeat(3, 1)
    for ours, plain in zip(
        KERNELS.rotary(q.clone(), k.clone(), text, table, sections),
        KERNELS.rotary(q.clone(), k.clone(), text[0], table),
        strict=True,
    ):
        assert torch.equal(ours, plain)


def test_norm_is_that_of_the_llama_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(7, 96).to(dtype)
        module = LlamaRMSNorm(96, eps=1e-5).to(dtype)
        weight = torch.randn(96).to(dtype)
        module.weight.data = weight
        with torch.inference_mode():
            # Sums may be taken in another order, and ours are rounded once less: one unit in the last place.
            rtol = 2**-7 if dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(KERNELS.rms_norm(x, weight, 1e-5), module(x), rtol=rtol, atol=0)
            # Of a residual stream in float32 the norm has the weight's type.
            torch.testing.assert_close(KERNELS.rms_norm(x.float(), weight, 1e-5), module(x), rtol=rtol, atol=0)


def test_norm_is_computed_in_float32() -> None:
    # 256 + 1 is no bfloat16: squares and sums in that type would be far off.
    x = (torch.randn(3, 512) * 20 + 100).to(torch.bfloat16)
    wide = x.double()
    expected = (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()).to(torch.bfloat16)
    out = KERNELS.rms_norm(x, torch.ones(512, dtype=torch.bfloat16), 1e-6)
    torch.testing.assert_close(out, expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(dtype: torch.dtype) -> None:
    x, weight, bias, add = torch.randn(5, 12).to(dtype), torch.randn(8, 12).to(dtype), torch.randn(8), torch.randn(5, 8)
    bias = bias.to(dtype)
    expected = x.double() @ weight.double().T + bias.double()
    close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
    packed = KERNELS.pack([weight[:3], weight[3:]], bias)
    assert packed(x).dtype == dtype
    torch.testing.assert_close(packed(x).double(), expected, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 2**-7)
    close(packed(x, torch.float32).double(), expected)
    close(packed(x, torch.float32, add=add.clone()).double(), expected + add)
    gated = KERNELS.pack(weight.chunk(2), bias, gated=True)
    gate, up = (expected + add).chunk(2, dim=1)
    functions: dict[Activation, Callable[..., Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": F.relu,
    }
    for name, function in functions.items():
        close(packed(x, torch.float32, add.clone(), name).double(), function(expected + add))
        close(gated(x, torch.float32, add.clone(), name).double(), function(gate) * up)
    assert gated(x[:0], activation="silu").shape == (0, 4)


def test_parts_of_any_types_and_strides_are_stacked_in_one() -> None:
    whole = torch.randn(8, 5)
    parts = [whole[:2].numpy(), whole[2:5].numpy().astype(DType.BFLOAT16.numpy), np.asfortranarray(whole[5:].numpy())]
    stacked, _ = ReferenceKernels().stack(parts, None, DType.BFLOAT16)
    assert stacked.dtype == torch.bfloat16 and torch.equal(stacked, whole.bfloat16())


def test_embedding() -> None:
    weight = torch.randn(7, 12)
    assert torch.equal(KERNELS.embedding(torch.tensor([6, 0, 6]), weight), weight[[6, 0, 6]])
    embedded = KERNELS.embedding(torch.tensor([3]), weight.bfloat16())
    assert embedded.dtype == torch.float32 and torch.equal(embedded[0], weight[3].bfloat16().float())


def test_empty_step_is_computed_to_nothing() -> None:
    step = build(Case([], 4, 2, 2, 8, None, 0))
    for window in (None, 3):
        assert KERNELS.paged_attention(step.q, step.cache, step.batch, AttentionSpec(1.0, window)).shape == (0, 4, 8)
    KERNELS.reshape_and_cache(step.q[:, :2], step.q[:, :2], step.cache, step.batch.slot_mapping[0])
    assert KERNELS.rms_norm(torch.zeros(0, 8), torch.ones(8), 1e-6).shape == (0, 8)


def test_backends_are_chosen_by_name() -> None:
    assert load_kernels("reference", "cpu").name == "reference"
    assert load_kernels("auto", "cpu").name in ("reference", "cpu")
    with pytest.raises(ConfigError, match=r"'refrence'.*auto, cpu, triton, reference"):
        load_kernels("refrence", "cpu")
