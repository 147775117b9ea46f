"""Attention of tokens that see each other in both directions, as those of an image do, among causal ones."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.config.kv_spec import KVSpec, LayerGroup
from octavo.kernels.forward_batch import make_batch
from octavo.kernels.interface import AttentionSpec, Kernels
from tests.kernels.backends import host_backends

HEADS, KV_HEADS, DIM, SIZE = 6, 2, 24, 4
#: Tokens of three sequences, and the runs of tokens of each that see each other.
LENGTHS = [90, 330, 40]
SPANS: list[list[tuple[int, int]]] = [[(3, 20), (30, 31), (60, 90)], [(2, 40), (240, 300)], []]


def until_of(sequence: int) -> np.ndarray:
    until = np.full(LENGTHS[sequence], -1, np.int32)
    for begin, end in SPANS[sequence]:
        until[begin:end] = end - 1
    return until


class World:
    """Three sequences in shuffled blocks; what is not written is NaN."""

    def __init__(self, backend: Kernels, window: int | None) -> None:
        self.backend = backend
        self.spec = AttentionSpec(DIM**-0.5, window, sees_spans=True)
        rng = np.random.default_rng(0)
        blocks = sum(-(-length // SIZE) for length in LENGTHS)
        self.cache = backend.make_cache([LayerGroup(KVSpec("full", KV_HEADS, DIM, "float32"), (0,))], [blocks], SIZE)[0]
        shape = blocks * SIZE, KV_HEADS, DIM
        nothing = np.full(shape, np.nan, np.float32)
        self.write(nothing, nothing, np.arange(len(nothing)))
        free = rng.permutation(blocks).tolist()
        self.tables = [[free.pop() for _ in range(-(-length // SIZE))] for length in LENGTHS]
        self.queries = [rng.standard_normal((length, HEADS, DIM), np.float32) for length in LENGTHS]
        self.keys, self.values = (
            [rng.standard_normal((length, KV_HEADS, DIM), np.float32) for length in LENGTHS] for _ in range(2)
        )
        for table, keys, values in zip(self.tables, self.keys, self.values, strict=True):
            at = np.arange(len(keys))
            self.write(keys, values, np.array(table)[at // SIZE] * SIZE + at % SIZE)

    def write(self, keys: np.ndarray, values: np.ndarray, slots: np.ndarray) -> None:
        b = self.backend
        with b.mode():
            b.reshape_and_cache(b.wrap(keys), b.wrap(values), self.cache, b.wrap(slots.astype(np.int64)))

    def attend(self, chunks: list[tuple[int, int, int]], *, spans: bool = True) -> list[Tensor]:
        """The attention of chunks (sequence, begin, end) in one step."""
        b = self.backend
        chunks = sorted(chunks, key=lambda chunk: chunk[2] - chunk[1] > 1)
        counts = [end - begin for _, begin, end in chunks]
        longest = max(map(len, self.tables))
        until = np.concatenate([until_of(s)[begin:end] for s, begin, end in chunks])
        batch = make_batch(
            counts,
            [end for _, _, end in chunks],
            np.array([(self.tables[s] + [0] * longest)[:longest] for s, _, _ in chunks], np.int32),
            SIZE,
            b,
            sees_until=until if spans else None,
        )
        q = b.array(np.concatenate([self.queries[s][begin:end] for s, begin, end in chunks]))
        with b.mode():
            result = b.to_numpy(b.paged_attention(q, self.cache, batch, self.spec)).copy()
        return list(torch.from_numpy(result).split(counts))

    def expected(self, sequence: int, *, spans: bool = True) -> Tensor:
        """In float64."""
        length, window = LENGTHS[sequence], self.spec.window
        at = torch.arange(length)
        last = at if not spans else torch.maximum(at, torch.from_numpy(until_of(sequence).astype(np.int64)))
        seen = at[None] <= last[:, None]
        if window is not None:
            seen &= at[None] > at[:, None] - window
        group = HEADS // KV_HEADS
        q = torch.from_numpy(self.queries[sequence]).double()
        k, v = (torch.from_numpy(x[sequence]).double().repeat_interleave(group, 1) for x in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", q, k).mul(self.spec.scale).masked_fill(~seen, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def cuts(sequence: int, at: list[int]) -> list[tuple[int, int, int]]:
    """Chunks that end at these positions, and at the end."""
    return [(sequence, begin, end) for begin, end in pairwise([0, *at, LENGTHS[sequence]])]


@pytest.mark.parametrize("backend", host_backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("window", [None, 7, 48])
def test_tokens_of_a_span_see_all_of_it(backend: Kernels, window: int | None) -> None:
    world = World(backend, window)
    for sequence, found in enumerate(world.attend([(s, 0, length) for s, length in enumerate(LENGTHS)])):
        torch.testing.assert_close(found.double(), world.expected(sequence), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", host_backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("window", [None, 7])
def test_a_step_without_spans_is_causal(backend: Kernels, window: int | None) -> None:
    world = World(backend, window)
    for sequence, found in enumerate(world.attend([(s, 0, n) for s, n in enumerate(LENGTHS)], spans=False)):
        torch.testing.assert_close(found.double(), world.expected(sequence, spans=False), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 7, 48])
def test_the_same_bits_alone_in_company_and_in_chunks_that_cut_no_span(window: int | None) -> None:
    if len(backends := host_backends()) < 2:
        pytest.skip("the CPU kernels are not compiled")
    world = World(backends[1], window)
    together = world.attend([(s, 0, length) for s, length in enumerate(LENGTHS)])
    for sequence, at in ((0, [3, 25, 30, 31, 60]), (1, [2, 100, 101, 240]), (2, [1, 17])):
        for threads in (1, 2):
            world.backend.set_threads(threads)
            parts = [world.attend([chunk])[0] for chunk in cuts(sequence, at)]
            assert torch.equal(torch.cat(parts), together[sequence])
    # Rows that no span concerns have the bits of a step without any.
    causal = world.attend([(s, 0, length) for s, length in enumerate(LENGTHS)], spans=False)
    for sequence, found in enumerate(together):
        outside = torch.from_numpy(until_of(sequence)) < 0
        assert torch.equal(found[outside], causal[sequence][outside])
    world.backend.set_threads(None)
