"""Relative position bias: its buckets are T5's, and backends add it at any distance."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.kernels.forward_batch import make_batch
from octavo.kernels.interface import AttentionSpec, Kernels
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.attention import RelativeBias, buckets_of
from octavo.layers.layer import LayerContext


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (32, 64), (8, 20), (64, 1000), (6, 5)])
def test_buckets_are_those_of_t5(buckets: int, longest: int, causal: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = np.arange(-3000, 1 if causal else 3001)
    theirs = T5Attention._relative_position_bucket(
        torch.from_numpy(distance), bidirectional=not causal, num_buckets=buckets, max_distance=longest
    )
    np.testing.assert_array_equal(buckets_of(distance, buckets, longest, causal=causal), theirs.numpy())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("causal", [False, True])
def test_distances_beyond_the_table_have_its_last_number(backend: str, causal: bool) -> None:
    kernels = _kernels(backend)
    rng = np.random.default_rng(0)
    heads, dim, length, longest = 3, 16, 300, 20
    layer = RelativeBias(LayerContext(kernels, DType.FLOAT32), heads, 8, longest, causal=causal)
    table = rng.normal(size=(8, heads)).astype(np.float32)
    layer.load("weight", table)
    q, k, v = (rng.normal(size=(length, heads, dim)).astype(np.float32) for _ in range(3))

    [cache] = kernels.make_group_cache(KVSpec("full", heads, dim, "float32"), 1, 80, 4)
    blocks = rng.permutation(80)[None, : length // 4]
    batch = make_batch([length], [length], blocks, 4, kernels)
    kernels.reshape_and_cache(kernels.wrap(k), kernels.wrap(v), cache, batch.slot_mapping[0])
    spec = AttentionSpec(0.5, causal=causal, bias=layer.bias)
    found = np.array(kernels.to_numpy(kernels.paged_attention(kernels.wrap(q), cache, batch, spec)))

    distance = np.arange(length)[None] - np.arange(length)[:, None]
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), k) * 0.5
    scores += table[buckets_of(distance, 8, longest, causal=causal)].transpose(2, 0, 1)
    if causal:
        scores[:, distance > 0] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(found, expected, atol=3e-6)

    last = make_batch([1], [length], blocks, 4, kernels)  # a decode has the bits of the prefill
    again = np.array(kernels.to_numpy(kernels.paged_attention(kernels.wrap(q[-1:].copy()), cache, last, spec)))
    if backend == "cpu":
        assert again.tobytes() == found[-1:].tobytes()


@pytest.mark.parametrize(
    ("buckets", "longest", "causal"), [(3, 128, False), (1, 128, True), (32, 8, False), (32, 16, True)]
)
def test_impossible_buckets_are_refused(buckets: int, longest: int, causal: bool) -> None:
    with pytest.raises(ConfigError, match=f"{buckets} buckets.*{longest}"):
        RelativeBias(LayerContext(ReferenceKernels(), DType.FLOAT32), 2, buckets, longest, causal=causal)


def _kernels(name: str) -> Kernels:
    if name == "reference":
        return ReferenceKernels()
    pytest.importorskip("octavo._cpu")
    kernels: Kernels = importlib.import_module("octavo.kernels.cpu.backend").CpuKernels()
    return kernels
