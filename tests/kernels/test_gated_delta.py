"""The gated delta rule: against float64 and transformers, and the same bits however sequences are cut into steps."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch

from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType
from octavo.kernels.cpu.backend import CpuKernels
from octavo.kernels.forward_batch import make_batch
from octavo.kernels.interface import DeltaHeads, Kernels
from tests.kernels.backends import cpu_settings
from tests.kernels.test_states import BLOCK, CUTS, LENGTHS, OFFSET, STATE_TOKENS, fill, kernels, memory

__all__ = ["kernels"]

KEY_HEADS, VALUE_HEADS, KEY_DIM, EPS = 2, 6, 20, 1e-6
#: One part of a vector, and eight vectors and a part of one.
VALUE_DIMS = [6, 136]


class Inputs(NamedTuple):
    """Of all sequences, one after the other."""

    qkv: np.ndarray
    z: np.ndarray
    b: np.ndarray
    a: np.ndarray
    #: [VALUE_HEADS], [VALUE_HEADS], [value_dim]
    decay: np.ndarray
    dt_bias: np.ndarray
    norm: np.ndarray


def make_inputs(value_dim: int, dtype: DType) -> Inputs:
    rng, tokens = np.random.default_rng(0), sum(LENGTHS)
    widths = (2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * value_dim, VALUE_HEADS * value_dim, VALUE_HEADS, VALUE_HEADS)
    rows = (rng.standard_normal((tokens, width)).astype(dtype.numpy).astype(np.float32) for width in widths)
    vectors = (rng.standard_normal(size).astype(np.float32) for size in (VALUE_HEADS, VALUE_HEADS, value_dim))
    inputs = Inputs(*rows, *vectors)
    return inputs._replace(decay=-np.exp(inputs.decay))


def expected_of(x: Inputs, value_dim: int) -> tuple[np.ndarray, list[list[np.ndarray]]]:
    """Results [T, VALUE_HEADS, value_dim] and the states after each token of each sequence, in float64."""
    keys = KEY_HEADS * KEY_DIM
    qkv, z, b, a, decay, dt_bias, norm = (array.astype(np.float64) for array in x)
    q, k = (part.reshape(-1, KEY_HEADS, KEY_DIM) for part in (qkv[:, :keys], qkv[:, keys : 2 * keys]))
    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
    v = qkv[:, 2 * keys :].reshape(-1, VALUE_HEADS, value_dim)
    g, beta = decay * np.log1p(np.exp(a + dt_bias)), 1 / (1 + np.exp(-b))
    out, states, row = np.zeros_like(v), [], 0
    for length in LENGTHS:
        state, after = np.zeros((VALUE_HEADS, KEY_DIM, value_dim)), []
        for _ in range(length):
            for head in range(VALUE_HEADS):
                query, key = (part[row, head // (VALUE_HEADS // KEY_HEADS)] for part in (q, k))
                s = state[head] * np.exp(g[row, head])
                state[head] = s + np.outer(key, (v[row, head] - key @ s) * beta[row, head])
                out[row, head] = query @ state[head] / KEY_DIM**0.5
            after.append(state.copy())
            row += 1
        states.append(after)
    normed = out / np.sqrt((out**2).mean(-1, keepdims=True) + EPS) * norm
    return normed * (z / (1 + np.exp(-z))).reshape(normed.shape), states


def run(kernels: Kernels, cuts: list[list[int]], x: Inputs, value_dim: int, dtype: DType) -> tuple[np.ndarray, list]:
    """Results, sequence by sequence, and the matrices of each block that sequences have."""
    size = VALUE_HEADS * KEY_DIM * value_dim
    (cache,) = kernels.make_group_cache(KVSpec.state(OFFSET + size + 2), 1, 16, 1)
    cache.state_tokens, cache.group = STATE_TOKENS, 1
    fill(kernels, cache)
    blocks = np.random.default_rng(1).permutation(16)[:9].reshape(3, 3).astype(np.int32)
    tables = np.zeros((2, 3, 6), np.int32)  # group 0 is attention's, and must not be read
    tables[1, :, :3] = blocks
    vectors = (kernels.array(vector, DType.FLOAT32) for vector in (x.decay, x.dt_bias, x.norm))
    heads = DeltaHeads(KEY_HEADS, VALUE_HEADS, KEY_DIM, value_dim, EPS, *vectors)
    out, starts, first = np.zeros((sum(LENGTHS), VALUE_HEADS * value_dim)), [0, 0, 0], np.cumsum([0, *LENGTHS])
    ends_of_parts = np.cumsum([0, *(part.shape[1] for part in x[:4])])
    for cut in cuts:
        order = sorted((s for s in range(3) if cut[s]), key=lambda s: cut[s] > 1)
        batch = make_batch(
            [cut[s] for s in order], [starts[s] + cut[s] for s in order], tables[:, order], BLOCK, kernels
        )
        rows = np.concatenate([np.arange(first[s] + starts[s], first[s] + starts[s] + cut[s]) for s in order])
        # Strided rows, as those of a part of a larger product.
        whole = kernels.array(np.concatenate([part[rows] for part in x[:4]], axis=1), dtype)
        qkv, z, b, a = (whole[:, i:j] for i, j in itertools.pairwise(ends_of_parts))
        result = kernels.gated_delta_rule(qkv, z, b, a, heads, cache, batch, offset=OFFSET)
        out[rows] = kernels.to_numpy(result).astype(np.float64)
        starts = [start + count for start, count in zip(starts, cut, strict=True)]
    numbers = memory(kernels, cache)
    held = [blocks[s, : -(-length // STATE_TOKENS)] for s, length in enumerate(LENGTHS)]
    assert (numbers[:, :OFFSET] == 7).all(), "numbers beside the rule's were written"
    assert (np.delete(numbers, np.concatenate(held), axis=0) == 7).all(), "another block was written"
    return out, [numbers[own, OFFSET : OFFSET + size].copy() for own in held]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value_dim", VALUE_DIMS)
def test_gated_delta_rule(kernels: Kernels, value_dim: int, dtype: str) -> None:
    kind = DType(dtype)
    x = make_inputs(value_dim, kind)
    out, states = run(kernels, CUTS[0], x, value_dim, kind)
    expected, after = expected_of(x, value_dim)
    rounding = 1e-2 if dtype == "bfloat16" else 1e-4
    np.testing.assert_allclose(out, expected.reshape(out.shape), rtol=rounding, atol=2e-5)
    for sequence, length in enumerate(LENGTHS):
        for i, state in enumerate(states[sequence]):
            wanted = after[sequence][min(length, (i + 1) * STATE_TOKENS) - 1]
            np.testing.assert_allclose(state, wanted.ravel(), rtol=1e-4, atol=1e-5)
    for cuts in CUTS[1:]:
        again, same = run(kernels, cuts, x, value_dim, kind)
        if kernels.name == "cpu":
            assert np.array_equal(again, out)
            assert all(np.array_equal(a, b) for a, b in zip(same, states, strict=True))
        np.testing.assert_allclose(again, out, rtol=rounding, atol=2e-5)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    x = make_inputs(136, DType.FLOAT32)
    with cpu_settings(threads=1):
        one, states = run(CpuKernels(), CUTS[1], x, 136, DType.FLOAT32)
    with cpu_settings(threads=3):
        three, same = run(CpuKernels(), CUTS[1], x, 136, DType.FLOAT32)
    assert np.array_equal(one, three)
    assert all(np.array_equal(a, b) for a, b in zip(same, states, strict=True))


def test_the_reference_is_that_of_transformers() -> None:
    """float64 above has the same states as transformers' own recurrence."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    x, keys = make_inputs(6, DType.FLOAT32), KEY_HEADS * KEY_DIM
    _, after = expected_of(x, 6)
    row = 0
    for sequence, length in enumerate(LENGTHS):
        rows, row = slice(row, row + length), row + length
        qkv, b, a = (torch.tensor(part[rows])[None] for part in (x.qkv, x.b, x.a))
        q, k = (part.reshape(1, length, KEY_HEADS, KEY_DIM) for part in (qkv[..., :keys], qkv[..., keys : 2 * keys]))
        v = qkv[..., 2 * keys :].reshape(1, length, VALUE_HEADS, 6)
        g = torch.tensor(x.decay) * torch.nn.functional.softplus(a + torch.tensor(x.dt_bias))
        _, state = torch_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=b.sigmoid(), output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        np.testing.assert_allclose(state[0].numpy(), after[sequence][-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sigmoid_gate(kernels: Kernels, dtype: str) -> None:
    kind = DType(dtype)
    x, gate = np.random.default_rng(0).standard_normal((2, 9, 70)).astype(kind.numpy)
    result = kernels.to_numpy(kernels.sigmoid_gate(kernels.array(x, kind), kernels.array(gate, kind)))
    expected = x.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))
    np.testing.assert_allclose(result.astype(np.float64), expected, rtol=5e-3 if dtype == "bfloat16" else 1e-5)
