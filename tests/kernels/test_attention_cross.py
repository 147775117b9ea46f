"""Cross attention: over another context than that of the tokens, of which each sees all."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.config.kv_spec import KVSpec, LayerGroup
from octavo.core.dtypes import DType
from octavo.core.errors import UnsupportedModelError
from octavo.kernels.forward_batch import make_batch
from octavo.kernels.interface import AttentionSpec, Kernels
from tests.kernels.backends import host_backends

HEADS, KV_HEADS, DIM, SIZE = 6, 2, 16, 4
SPEC = AttentionSpec(DIM**-0.5, causal=False, cross=True)
#: Tokens of three contexts, and of each sequence that attends to one: which, tokens computed before, tokens now.
CONTEXTS = [1, 37, 300]
SEQUENCES = [(1, 90, 1), (1, 0, 1), (2, 3, 1), (0, 0, 5), (1, 4, 9), (2, 60, 40)]


class World:
    """Contexts in shuffled blocks of one cache, in which every other number is NaN."""

    def __init__(self, backend: Kernels, seed: int = 0) -> None:
        self.backend = backend
        rng = np.random.default_rng(seed)
        counts = [-(-tokens // SIZE) for tokens in CONTEXTS]
        blocks = sum(counts) + 40
        spec = KVSpec("full", KV_HEADS, DIM, "float32")
        self.cache = backend.make_cache([LayerGroup(spec, (0,))], [blocks], SIZE)[0]
        free = rng.permutation(blocks).tolist()
        shape = blocks * SIZE, KV_HEADS, DIM
        self.write(np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32), np.arange(shape[0]))
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        self.own = [free.pop() for _ in range(40)]
        self.keys, self.values = (
            [rng.standard_normal((tokens, KV_HEADS, DIM), np.float32) for tokens in CONTEXTS] for _ in range(2)
        )
        for table, keys, values in zip(self.tables, self.keys, self.values, strict=True):
            positions = np.arange(len(keys))
            self.write(keys, values, np.array(table)[positions // SIZE] * SIZE + positions % SIZE)
        self.queries = [rng.standard_normal((end - begin, HEADS, DIM), np.float32) for begin, end in _spans()]

    def write(self, keys: np.ndarray, values: np.ndarray, slots: np.ndarray) -> None:
        b = self.backend
        with b.mode():
            b.reshape_and_cache(b.wrap(keys), b.wrap(values), self.cache, b.wrap(slots.astype(np.int64)))

    def attend(self, which: list[int], cut: slice = slice(None)) -> list[Tensor]:
        """The attention of some sequences in one step, of those queries of each."""
        b, queries = self.backend, [self.queries[i][cut] for i in which]
        starts = [SEQUENCES[i][1] + range(SEQUENCES[i][2])[cut].start for i in which]
        counts = [len(q) for q in queries]
        contexts = [SEQUENCES[i][0] for i in which]
        longest = max(len(self.tables[c]) for c in contexts)
        batch = make_batch(
            counts,
            [start + count for start, count in zip(starts, counts, strict=True)],
            np.array([self.own] * len(which), np.int32),
            SIZE,
            b,
            cross_lens=[CONTEXTS[c] for c in contexts],
            cross_tables=np.array([(self.tables[c] + [0] * longest)[:longest] for c in contexts], np.int32),
        )
        with b.mode():
            result = b.to_numpy(b.paged_attention(b.array(np.concatenate(queries)), self.cache, batch, SPEC)).copy()
        return list(torch.from_numpy(result).split(counts))

    def expected(self, i: int) -> Tensor:
        """In float64."""
        context = SEQUENCES[i][0]
        q = torch.from_numpy(self.queries[i]).double()
        k, v = (
            torch.from_numpy(x[context]).double().repeat_interleave(HEADS // KV_HEADS, 1)
            for x in (self.keys, self.values)
        )
        weights = torch.einsum("qhd,khd->hqk", q, k).mul(SPEC.scale).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


def _spans() -> list[tuple[int, int]]:
    return [(begin, begin + count) for _, begin, count in SEQUENCES]


@pytest.mark.parametrize("backend", host_backends(), ids=lambda backend: backend.name)
def test_every_token_sees_the_whole_context_wherever_it_stands(backend: Kernels) -> None:
    world = World(backend)
    for i, found in enumerate(world.attend([*range(len(SEQUENCES))])):
        torch.testing.assert_close(found.double(), world.expected(i), atol=1e-5, rtol=1e-5)


def test_the_same_bits_alone_in_company_in_chunks_and_on_any_number_of_threads() -> None:
    if len(backends := host_backends()) < 2:
        pytest.skip("the CPU kernels are not compiled")
    world = World(backends[1])
    together = world.attend([*range(len(SEQUENCES))])
    for threads in (1, 2, 3):
        backends[1].set_threads(threads)
        for i, expected in enumerate(together):
            assert torch.equal(world.attend([i])[0], expected)
        parts = [world.attend([5], slice(begin, begin + 7))[0] for begin in range(0, 40, 7)]
        assert torch.equal(torch.cat(parts), together[5])
    backends[1].set_threads(None)


def test_what_is_not_computed_is_refused() -> None:
    if len(backends := host_backends()) == 2:
        world = World(backends[1])
        with pytest.raises(ValueError, match="cross attention"):
            operations = importlib.import_module("octavo.kernels.cpu.backend")
            q = backends[1].zeros((1, HEADS, DIM), DType.FLOAT32)
            operations.attention_op(q, world.cache, q, AttentionSpec(1.0, cross=True))
    triton = importlib.import_module("octavo.kernels.triton.backend").TritonKernels
    with pytest.raises(UnsupportedModelError, match="cross attention"):
        triton.check_attention(object.__new__(triton), SPEC)
