"""Products of heads and the queries of latent attention, against float64 and the reference kernels."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.config.kv_spec import KVSpec
from octavo.kernels.reference import ReferenceKernels
from tests.kernels.backends import cpu_settings

_cpu: Any = pytest.importorskip("octavo._cpu")
torch_facade: Any = importlib.import_module("tests.kernels.torch_facade")


@pytest.fixture(params=_cpu.available_isas().floats, autouse=True, scope="module")
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    with cpu_settings(isa=request.param):
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "n", "k"), [(1, 5, 7), (3, 20, 12), (5, 33, 64)])
def test_each_head_has_its_own_matrix_and_a_row_its_bits(dtype: torch.dtype, heads: int, n: int, k: int) -> None:
    kernels, weight = torch_facade.make_kernels(), random(heads, n, k, dtype=dtype)
    packed = kernels.pack_heads(weight)
    x = random(150, heads, k + 3, dtype=dtype, seed=1)[:, :, 2 : 2 + k]
    _cpu.set_threads(2)
    out = packed(x)
    exact = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    rounding = 2**-8 * exact.abs() if dtype == torch.bfloat16 else 0
    size = torch.einsum("thk,hnk->thn", x.double().abs(), weight.double().abs())
    assert bool(((out.double() - exact).abs() <= 1e-5 * size + rounding).all())
    _cpu.set_threads(1)
    for rows in (slice(0, 1), slice(70, 75), slice(149, 150)):
        assert torch.equal(packed(x[rows]), out[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_cached_vectors_of_latent_attention(dtype: torch.dtype) -> None:
    (heads, nope, rope, rank), tokens = (3, 10, 8, 24), 13
    name = str(dtype).removeprefix("torch.")
    spec = KVSpec("latent", 1, rank + rope, name)
    batch = torch_facade.make_batch([tokens], [tokens], torch.tensor([[2, 0, 3, 1]], dtype=torch.int32), 4)
    angles = random(tokens, rope // 2, seed=3)
    table = torch.cat((angles.cos(), angles.sin()), 1)

    def run(kernels: Any) -> tuple[Tensor, Tensor]:
        q, down = random(tokens, heads, nope + rope, dtype=dtype), random(tokens, 2 + rank + rope, dtype=dtype, seed=1)
        latent, k_rope = down[:, 2:].split([rank, rope], dim=1)
        absorb = kernels.pack_heads(random(heads, rank, nope, dtype=dtype, seed=2))
        [cache] = kernels.make_group_cache(spec, 1, 4, 4)
        assert cache.value is cache.key
        return kernels.latent_rotary_and_cache(q, latent.clone(), k_rope, absorb, batch, table, cache), cache.key

    (theirs, their_key), (ours, our_key) = (
        run(torch_facade.of_torch(ReferenceKernels())),
        run(torch_facade.make_kernels()),
    )
    absolute, relative = (1e-5, 1e-5) if dtype == torch.float32 else (0.06, 0.01)
    torch.testing.assert_close(ours, theirs, atol=absolute, rtol=relative)
    # Blocks are [block_size][vector padded to a multiple of 16].
    vectors = our_key.view(dtype).view(4, 4, -1)[:, :, : rank + rope]
    torch.testing.assert_close(vectors, their_key[:, :, 0], atol=absolute, rtol=relative)
    assert torch.equal(vectors[..., :rank], their_key[:, :, 0, :rank])
