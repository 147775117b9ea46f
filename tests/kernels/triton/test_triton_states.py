"""The GPU kernels of recurrent states: against float64 and the reference, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput, make_batch, padding_batch
from octavo.kernels.interface import DeltaHeads, Kernels, LayerCache
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.triton.backend import TritonKernels
from octavo.kernels.triton.cache import TritonLayerCache
from tests.kernels import test_gated_delta as delta
from tests.kernels import test_states as conv

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Columns of a head's state: one program, and a part of another.
VALUE_DIM = 12
#: The interpreter is slow.
ON_GPU = pytest.mark.slow if DEVICE == "cpu" else ()


@pytest.mark.parametrize(
    ("dtype", "taps", "silu"),
    [("bfloat16", 4, True), *(pytest.param("float32", taps, taps == 6, marks=ON_GPU) for taps in (3, 6, 2))],
)
def test_causal_conv(dtype: str, taps: int, silu: bool) -> None:
    conv.test_causal_conv(TritonKernels(DEVICE), dtype, taps, silu)
    rng, kind, rows = np.random.default_rng(0), DType(dtype), (sum(conv.LENGTHS), 70)
    x, *gates = (rng.standard_normal(rows).astype(kind.numpy).astype(np.float32) for _ in range(3))
    weight = rng.standard_normal((taps, 70)).astype(np.float32)
    runs = [conv.run(TritonKernels(DEVICE), cuts, x, gates, weight, kind, None, silu) for cuts in conv.CUTS[:2]]
    assert np.array_equal(runs[0][0], runs[1][0])
    assert all(np.array_equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bfloat16", {}),
        pytest.param("float32", {}, marks=ON_GPU),
        ("float32", {"beta_scale": 2.0, **delta.KIMI}),
    ],
    ids=["bfloat16", "float32", "Kimi"],
)
def test_gated_delta_rule(dtype: str, options: dict[str, Any]) -> None:
    """Against float64, and the same bits however the sequences are cut into steps."""
    kind = DType(dtype)
    x = delta.make_inputs(VALUE_DIM, kind, per_channel=bool(options))
    expected, after = delta.expected_of(x, VALUE_DIM, **options)
    runs = [delta.run(TritonKernels(DEVICE), cuts, x, VALUE_DIM, kind, **options) for cuts in conv.CUTS[:2]]
    out, states = runs[0]
    rounding = 1e-2 if dtype == "bfloat16" else 1e-4
    np.testing.assert_allclose(out, expected.reshape(out.shape), rtol=rounding, atol=2e-5)
    for sequence, length in enumerate(conv.LENGTHS):
        for i, state in enumerate(states[sequence]):
            wanted = after[sequence][min(length, (i + 1) * conv.STATE_TOKENS) - 1]
            np.testing.assert_allclose(state, wanted.ravel(), rtol=1e-4, atol=1e-5)
    for again, same in runs[1:]:
        assert np.array_equal(again, out)
        assert all(np.array_equal(a, b) for a, b in zip(same, states, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sigmoid_gate(dtype: str) -> None:
    delta.test_sigmoid_gate(TritonKernels(DEVICE), dtype)


@pytest.mark.parametrize("input", [-100.0, -20.0, -10.0, -1.0, 0.0, 3.0, 19.0, 21.0, 200.0])
def test_small_decays_are_exact(input: float) -> None:
    """The state after a token of zeros is exp(-softplus(input)) times the one before it, whatever the size of input."""
    kernels = TritonKernels(DEVICE)
    layer = Layer.make(kernels, heads=(1, 1), dims=(1, 1), taps=2)
    layer.cache.key.fill_(1.0)
    batch = make_batch([1], [2], np.zeros((1, 1), np.int32), 4, kernels)
    row = torch.zeros(1, 3, device=DEVICE)
    kernels.gated_delta_rule(
        row, row[:, :1], row[:, :1], torch.full_like(row[:, :1], input), layer.heads, layer.cache, batch
    )
    decay = layer.heads.decay.item(), layer.heads.dt_bias.item()
    expected = np.exp(decay[0] * np.logaddexp(0.0, np.float64(np.float32(input)) + decay[1]))
    state = layer.cache.key[0, 0, 0, 0].item()
    assert state == pytest.approx(expected, rel=3e-6)
    if input < -5:  # what is lost is as exact
        assert 1.0 - state == pytest.approx(1.0 - expected, rel=1e-3, abs=1.3e-7)


class Layer(NamedTuple):
    """The convolution and the gated delta rule of a layer, one after the other."""

    kernels: Kernels
    cache: LayerCache
    heads: DeltaHeads
    weight: Tensor

    @classmethod
    def make(
        cls, kernels: Kernels, heads: tuple[int, int], dims: tuple[int, int], taps: int,
        blocks: int = 4, state_tokens: int = 8,
    ) -> Layer:  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        channels = 2 * heads[0] * dims[0] + heads[1] * dims[1]
        numbers = (taps - 1) * channels + heads[1] * dims[0] * dims[1]
        (cache,) = kernels.make_group_cache(KVSpec.state(numbers), 1, blocks, 1)
        cache.state_tokens = state_tokens
        cache.key.view(blocks, -1).copy_(0.1 * torch.randn(blocks, numbers, generator=generator))
        decay, dt_bias, norm = (torch.rand(n, generator=generator).to(DEVICE) for n in (heads[1], heads[1], dims[1]))
        weight = torch.randn(taps, channels, generator=generator).to(DEVICE)
        return cls(kernels, cache, DeltaHeads(*heads, *dims, 1e-6, -decay, dt_bias, norm), weight)

    @property
    def widths(self) -> list[int]:
        values = self.heads.value_heads * self.heads.value_dim
        return [self.weight.shape[1], values, self.heads.value_heads, self.heads.value_heads]

    def __call__(self, rows: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Results of the convolution and of the rule for rows [T, sum of widths]."""
        qkv, z, b, a = rows.split(self.widths, 1)
        convolved = self.kernels.causal_conv(qkv, self.weight, None, self.cache, batch, activation="silu")
        offset = (len(self.weight) - 1) * self.weight.shape[1]
        return convolved, self.kernels.gated_delta_rule(
            convolved, z, b, a, self.heads, self.cache, batch, offset=offset
        )

    def inputs(self, tokens: int, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(tokens, sum(self.widths), generator=generator).to(dtype).to(DEVICE)


def test_padding_writes_no_state() -> None:
    """Rows behind a smaller batch than the captured one; a real sequence has the block that they name."""
    kernels = TritonKernels(DEVICE)
    layer, alone = (Layer.make(kernels, (1, 2), (4, 6), 3) for _ in range(2))
    rows = layer.inputs(4, torch.float32)
    before = layer.cache.key.clone()
    padding = padding_batch(BatchSize(4, 4, 4, 32, 4), kernels)
    outputs = layer(rows, padding)
    assert torch.equal(layer.cache.key, before)
    assert all(output.isfinite().all() for output in outputs)
    batch = make_batch([1], [6], np.array([[0, 0]], np.int32), 4, kernels)
    padding.seq_lens[:1], padding.positions[:1] = batch.seq_lens, batch.positions
    for found, wanted in zip(layer(rows, padding), alone(rows[:1], batch), strict=True):
        assert torch.equal(found[:1], wanted)
    assert torch.equal(layer.cache.key, alone.cache.key)
    assert not torch.equal(layer.cache.key, before)


def test_states_are_copied_and_swapped_like_other_blocks() -> None:
    kernels = TritonKernels(DEVICE)
    spec = KVSpec.state(70)
    caches, host = kernels.make_group_cache(spec, 2, 4, 1), kernels.make_host_group_cache(spec, 2, 3, 1)
    assert isinstance(caches[0], TritonLayerCache)
    assert caches[0].pool.shape[1] == 2 * kernels.block_bytes(spec, 1) == 2 * 384
    assert caches[0].value.data_ptr() == caches[0].key.data_ptr()
    values = torch.randn(2, 4, 70)
    for cache, numbers in zip(caches, values, strict=True):
        cache.key.view(4, 70).copy_(numbers)
    kernels.copy_blocks(caches, [(1, 3), (2, 0)])
    kernels.swap_blocks(caches, host, [(3, 0)])
    kernels.swap_blocks(host, caches, [(0, 2)])
    for cache, numbers in zip(caches, values, strict=True):
        assert torch.equal(cache.key.view(4, 70).cpu(), numbers[[2, 1, 1, 1]])


# At the shapes of Qwen3.5 0.8B, on a GPU.

QWEN: dict[str, Any] = {"heads": (16, 16), "dims": (128, 128), "taps": 4, "state_tokens": 512}


def tables_of(sequences: int, blocks: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(sequences * blocks).reshape(sequences, blocks).astype(np.int32)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("counts", "ends", "dtype"),
    [
        ([1], [1], torch.bfloat16),
        ([1], [700], torch.bfloat16),
        ([1] * 64, [512 + 7 * i for i in range(64)], torch.bfloat16),
        ([1] * 7, [513, 512, 1, 2, 3, 4, 1024], torch.float32),
        ([512], [512], torch.bfloat16),
        ([1, 1, 700, 3, 2, 33], [9, 1025, 1100, 514, 2, 545], torch.bfloat16),
        ([2048], [2048], torch.float32),
    ],
    ids=["first", "one", "64", "edges", "prefill", "mixed", "long"],
)
def test_the_shapes_of_a_model(counts: list[int], ends: list[int], dtype: torch.dtype) -> None:
    """Against the reference on the same device; a second run has the same bits, and so has each sequence alone."""
    triton, reference = TritonKernels(DEVICE), ReferenceKernels(DEVICE)
    tables = tables_of(len(counts), 4)
    layers = [Layer.make(k, **QWEN, blocks=tables.size) for k in (triton, triton, triton, reference)]
    rows = layers[0].inputs(sum(counts), dtype)
    batch = make_batch(counts, ends, tables, 512, triton)
    found, again, wanted = (layer(rows, batch) for layer in (layers[0], layers[1], layers[3]))
    near = 3e-2 if dtype == torch.bfloat16 else 2e-4
    for ours, same, theirs in zip(found, again, wanted, strict=True):
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=near, atol=near)
    states = [layer.cache.key.reshape(tables.size, -1) for layer in layers]
    assert torch.equal(states[0], states[1])
    torch.testing.assert_close(states[0], states[3], rtol=near, atol=near)
    first = 0
    for s, (count, end) in enumerate(zip(counts, ends, strict=True)):
        alone = make_batch([count], [end], tables[s : s + 1], 512, triton)
        for ours, one in zip(found, layers[2](rows[first : first + count], alone), strict=True):
            assert torch.equal(ours[first : first + count], one)
        first += count
    assert torch.equal(states[0], states[2])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[256] * 4, [511, 2, 511], [1] * 20 + [1004]])
def test_any_cut_of_a_prompt_has_the_same_bits(sizes: list[int]) -> None:
    kernels, tables = TritonKernels(DEVICE, deterministic=True), tables_of(1, 4)
    whole, cut = (Layer.make(kernels, **QWEN, blocks=4) for _ in range(2))
    rows, start = whole.inputs(1024, torch.bfloat16), 0
    wanted = whole(rows, make_batch([1024], [1024], tables, 512, kernels))
    for size in sizes:
        found = cut(rows[start : start + size], make_batch([size], [start + size], tables, 512, kernels))
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs[start : start + size])
        start += size
    assert start == 1024
    assert torch.equal(whole.cache.key, cut.cache.key)


@pytest.mark.gpu
def test_graphs_of_decode_steps_have_the_bits_of_eager_ones() -> None:
    """Batches grow and shrink; what a larger one leaves behind is neither read nor written."""
    kernels, tables = TritonKernels("cuda"), tables_of(20, 4)
    eager, graphed = (Layer.make(kernels, **QWEN, blocks=tables.size) for _ in range(2))
    rows = eager.inputs(20, torch.bfloat16)

    def forward_of(layer: Layer) -> Callable[[ForwardBatch], ForwardOutput]:
        return lambda batch: ForwardOutput(layer(rows[: len(batch.token_ids)], batch)[1])

    forward, captured = (
        forward_of(eager),
        kernels.capture(forward_of(graphed), BatchSize(64, 20, 20, 2048, 512)),
    )
    lengths = [1 + 97 * i % 1500 for i in range(20)]
    for step, count in enumerate([3, 20, 5, 1, 17, 20, 2]):
        ends = [length + step for length in lengths[:count]]
        batch = make_batch([1] * count, ends, tables[:count], 512, kernels)
        assert torch.equal(captured(batch).hidden, forward(batch).hidden)
        assert torch.equal(graphed.cache.key, eager.cache.key)


def test_drafts_beside_states_are_refused() -> None:
    with pytest.raises(ConfigError, match="speculative_config: the triton backend"):
        TritonKernels(DEVICE).block_bytes(KVSpec.state(70, draft_tokens=2), 1)
