"""Multi-head latent attention on a GPU, against the reference."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

import numpy as np
import torch
from torch import Tensor

from octavo.config.kv_spec import KVSpec, group_layers
from octavo.core.dtypes import DType
from octavo.kernels.forward_batch import ForwardBatch, make_batch
from octavo.kernels.interface import AttentionSpec, Kernels, LayerCache
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.triton.backend import TritonKernels
from octavo.kernels.triton.experts import TritonHeads

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 4
#: Tokens of each sequence in the step, and its length after it.
COUNTS, LENGTHS = [1, 1, 5, 13], [1, 22, 9, 13]
#: (heads, nope, rope, latent)
SMALL = (5, 12, 8, 24)
SIZES = [SMALL, pytest.param((128, 128, 64, 512), marks=pytest.mark.gpu)]


class Step:
    """A step over a latent cache that has random rows of the tokens before it."""

    def __init__(self, kernels: Kernels, sizes: tuple[int, int, int, int], only: int | None = None) -> None:
        """``only``: the number of the one sequence of the step."""
        heads, nope, rope, latent = self.sizes = sizes
        generator = torch.Generator().manual_seed(0)
        self.kernels = kernels
        self.absorb = kernels.pack_heads(torch.randn(heads, latent, nope, generator=generator).numpy(), DType.FLOAT32)
        spec = KVSpec("latent", 1, latent + rope, "float32")
        (self.cache,) = kernels.make_cache(group_layers([spec]), [40], BLOCK)
        angles = torch.rand(64, rope // 2, generator=generator)
        self.cos_sin = kernels.array(torch.cat((angles.cos(), angles.sin()), 1).numpy(), DType.FLOAT32)
        tables = np.random.default_rng(0).permutation(40)[:24].reshape(4, 6).astype(np.int32)
        before = [length - count for count, length in zip(COUNTS, LENGTHS, strict=True)]
        rows = torch.randn(sum(LENGTHS), heads * (nope + rope) + latent + rope, generator=generator)
        earlier, later = rows.split([sum(before), sum(COUNTS)])
        self.run(earlier, [count for count in before if count], [count for count in before if count], tables[[1, 2]])
        if only is None:
            self.out = self.run(later, COUNTS, LENGTHS, tables)
        else:
            self.out = self.run(later.split(COUNTS)[only], COUNTS[only:][:1], LENGTHS[only:][:1], tables[only:][:1])

    def run(self, rows: Tensor, counts: list[int], lengths: list[int], tables: Any) -> Tensor:
        heads, nope, rope, latent = self.sizes
        parts = rows.split((heads * (nope + rope), latent, rope), 1)
        q, latents, k_rope = (self.kernels.array(part.contiguous().numpy()) for part in parts)
        batch: ForwardBatch = make_batch(counts, lengths, tables, BLOCK, self.kernels)
        queries = self.kernels.latent_rotary_and_cache(
            q.reshape(len(rows), heads, nope + rope), latents, k_rope, self.absorb, batch, self.cos_sin, self.cache
        )
        spec = AttentionSpec((nope + rope) ** -0.5, value_dim=latent)
        out: Tensor = self.kernels.paged_attention(queries, self.cache, batch, spec)
        assert out.shape == (len(rows), heads, latent)
        return out.cpu()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_latent_attention_is_that_of_the_reference(sizes: Any, deterministic: bool) -> None:
    expected = Step(ReferenceKernels(), sizes)
    found = Step(TritonKernels(DEVICE, deterministic=deterministic), sizes)
    torch.testing.assert_close(found.out, expected.out, atol=1e-4, rtol=1e-4)


def test_a_sequence_alone_has_the_same_bits() -> None:
    kernels = TritonKernels(DEVICE, deterministic=True)
    together = Step(kernels, SMALL).out.split(COUNTS)
    for number, rows in enumerate(together):
        assert torch.equal(Step(kernels, SMALL, only=number).out, rows)


def test_a_block_holds_each_number_once() -> None:
    kernels = TritonKernels(DEVICE)
    spec = KVSpec("latent", 1, 576, "bfloat16")
    assert kernels.block_bytes(spec, 16) == 16 * 576 * 2
    (cache,) = kernels.make_cache(group_layers([spec]), [3], 16)
    assert isinstance(cache, LayerCache) and cache.key.data_ptr() == cache.value.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_of_heads(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 20, 12, generator=generator).to(DEVICE, dtype)
    x = torch.randn(19, 3, 12, generator=generator).to(DEVICE, dtype)
    found = TritonHeads(weight)(x)
    expected = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    torch.testing.assert_close(found.double(), expected, atol=1e-5 if dtype == torch.float32 else 6e-2, rtol=0)
    for row in (0, 7, 18):
        assert torch.equal(TritonHeads(weight)(x[row : row + 1]), found[row : row + 1])
    assert TritonHeads(weight)(x[:0]).shape == (0, 3, 20)
