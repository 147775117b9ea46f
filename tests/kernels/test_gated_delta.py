"""The gated delta rule: against float64 and transformers, and the same bits however sequences are cut into steps."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from octavo.core.dtypes import DType
from octavo.kernels.cpu.backend import CpuKernels
from octavo.kernels.interface import DeltaHeads, Kernels, delta_numbers
from tests.kernels.backends import cpu_settings
from tests.kernels.test_states import CUTS, DRAFTS, LENGTHS, OFFSET, STATE_TOKENS, Part, States, draft_cuts, kernels

__all__ = ["kernels"]

KEY_HEADS, VALUE_HEADS, KEY_DIM, EPS = 2, 6, 20, 1e-6
#: One part of a vector, and eight vectors and a part of one.
VALUE_DIMS = [6, 136]
KIMI: dict[str, Any] = {"per_channel": True, "gate": "sigmoid"}


class Inputs(NamedTuple):
    """Of all sequences, one after the other."""

    qkv: np.ndarray
    z: np.ndarray
    b: np.ndarray
    a: np.ndarray
    #: [VALUE_HEADS], as a row of a, [value_dim]
    decay: np.ndarray
    dt_bias: np.ndarray
    norm: np.ndarray


def make_inputs(value_dim: int, dtype: DType, *, per_channel: bool = False) -> Inputs:
    rng, tokens, decays = np.random.default_rng(0), sum(LENGTHS), VALUE_HEADS * (KEY_DIM if per_channel else 1)
    widths = (2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * value_dim, VALUE_HEADS * value_dim, VALUE_HEADS, decays)
    rows = (rng.standard_normal((tokens, width)).astype(dtype.numpy).astype(np.float32) for width in widths)
    vectors = (rng.standard_normal(size).astype(np.float32) for size in (VALUE_HEADS, decays, value_dim))
    inputs = Inputs(*rows, *vectors)
    return inputs._replace(decay=-np.exp(inputs.decay))


def expected_of(
    x: Inputs, value_dim: int, *, beta_scale: float = 1.0, per_channel: bool = False, gate: str = "silu"
) -> tuple[np.ndarray, list[list[np.ndarray]]]:
    """Results [T, VALUE_HEADS, value_dim] and the states after each token of each sequence, in float64."""
    keys = KEY_HEADS * KEY_DIM
    qkv, z, b, a, decay, dt_bias, norm = (array.astype(np.float64) for array in x)
    q, k = (part.reshape(-1, KEY_HEADS, KEY_DIM) for part in (qkv[:, :keys], qkv[:, keys : 2 * keys]))
    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
    v = qkv[:, 2 * keys :].reshape(-1, VALUE_HEADS, value_dim)
    g = decay[:, None] * np.log1p(np.exp(a + dt_bias)).reshape(len(a), VALUE_HEADS, -1)
    assert (g.shape[2] > 1) == per_channel
    beta = beta_scale / (1 + np.exp(-b))
    out, states, row = np.zeros_like(v), [], 0
    for length in LENGTHS:
        state, after = np.zeros((VALUE_HEADS, KEY_DIM, value_dim)), []
        for _ in range(length):
            for head in range(VALUE_HEADS):
                query, key = (part[row, head // (VALUE_HEADS // KEY_HEADS)] for part in (q, k))
                s = state[head] * np.exp(g[row, head])[:, None]
                state[head] = s + np.outer(key, (v[row, head] - key @ s) * beta[row, head])
                out[row, head] = query @ state[head] / KEY_DIM**0.5
            after.append(state.copy())
            row += 1
        states.append(after)
    normed = out / np.sqrt((out**2).mean(-1, keepdims=True) + EPS) * norm
    gates = (z if gate == "silu" else 1) / (1 + np.exp(-z))
    return normed * gates.reshape(normed.shape), states


def run(
    kernels: Kernels,
    cuts: list[list[Part]] | list[list[int]],
    x: Inputs,
    value_dim: int,
    dtype: DType,
    *,
    draft_tokens: int = 0,
    state_tokens: int = STATE_TOKENS,
    **options: Any,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Results, sequence by sequence, and the rule's numbers of each block that sequences have."""
    vectors = (kernels.array(vector, DType.FLOAT32) for vector in (x.decay, x.dt_bias, x.norm))
    heads = DeltaHeads(KEY_HEADS, VALUE_HEADS, KEY_DIM, value_dim, EPS, *vectors, **options)
    numbers = delta_numbers(VALUE_HEADS, KEY_DIM, value_dim, draft_tokens, per_channel=heads.per_channel)
    states = States(kernels, numbers, draft_tokens, state_tokens)
    out = np.zeros((sum(LENGTHS), VALUE_HEADS * value_dim))
    ends_of_parts = np.cumsum([0, *(part.shape[1] for part in x[:4])])
    for batch, rows, right in states.steps(cuts):
        # Strided rows, as those of a part of a larger product.
        whole = kernels.array(np.concatenate([part[rows] for part in x[:4]], axis=1), dtype)
        qkv, z, b, a = (whole[:, i:j] for i, j in itertools.pairwise(ends_of_parts))
        result = kernels.gated_delta_rule(qkv, z, b, a, heads, states.cache, batch, offset=OFFSET)
        out[rows[right]] = kernels.to_numpy(result).astype(np.float64)[right]
    return out, states.numbers()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value_dim", VALUE_DIMS)
def test_gated_delta_rule(kernels: Kernels, value_dim: int, dtype: str) -> None:
    check_rule(kernels, value_dim, DType(dtype))


@pytest.mark.parametrize("options", [{"beta_scale": 2.0}, KIMI], ids=["negative eigenvalues", "Kimi"])
def test_variants_of_the_rule(kernels: Kernels, options: dict[str, Any]) -> None:
    for value_dim, dtype in zip(VALUE_DIMS, (DType.BFLOAT16, DType.FLOAT32), strict=True):
        check_rule(kernels, value_dim, dtype, **options)


def check_rule(kernels: Kernels, value_dim: int, dtype: DType, **options: Any) -> None:
    """Results and states against float64, and their bits however the sequences are cut."""
    x = make_inputs(value_dim, dtype, per_channel=options.get("per_channel", False))
    out, states = run(kernels, CUTS[0], x, value_dim, dtype, **options)
    expected, after = expected_of(x, value_dim, **options)
    rounding = 1e-2 if dtype == DType.BFLOAT16 else 1e-4
    np.testing.assert_allclose(out, expected.reshape(out.shape), rtol=rounding, atol=2e-5)
    for sequence, length in enumerate(LENGTHS):
        for i, state in enumerate(states[sequence]):
            wanted = after[sequence][min(length, (i + 1) * STATE_TOKENS) - 1]
            np.testing.assert_allclose(state, wanted.ravel(), rtol=1e-4, atol=1e-5)
    for cuts in CUTS[1:]:
        again, same = run(kernels, cuts, x, value_dim, dtype, **options)
        if kernels.name == "cpu":
            assert np.array_equal(again, out)
            assert all(np.array_equal(a, b) for a, b in zip(same, states, strict=True))
        np.testing.assert_allclose(again, out, rtol=rounding, atol=2e-5)


@pytest.mark.parametrize(("draft_tokens", "state_tokens"), DRAFTS)
@pytest.mark.parametrize(("dtype", "value_dim", "options"), [("float32", 6, KIMI), ("bfloat16", 136, {})])
def test_drafts_change_no_bit(
    kernels: Kernels, dtype: str, value_dim: int, options: dict[str, Any], draft_tokens: int, state_tokens: int
) -> None:
    kind = DType(dtype)
    x = make_inputs(value_dim, kind, per_channel=bool(options))
    wanted, _ = run(kernels, CUTS[2], x, value_dim, kind, **options)
    sizes = {"draft_tokens": draft_tokens, "state_tokens": state_tokens}
    for seed in range(4):
        out, _ = run(kernels, draft_cuts(draft_tokens, seed), x, value_dim, kind, **sizes, **options)
        assert kernels.name != "cpu" or np.array_equal(out, wanted)
        np.testing.assert_allclose(out, wanted, rtol=1e-2 if dtype == "bfloat16" else 1e-4, atol=2e-5)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    x = make_inputs(136, DType.FLOAT32)
    with cpu_settings(threads=1):
        one, states = run(CpuKernels(), CUTS[1], x, 136, DType.FLOAT32)
    with cpu_settings(threads=3):
        three, same = run(CpuKernels(), CUTS[1], x, 136, DType.FLOAT32)
    assert np.array_equal(one, three)
    assert all(np.array_equal(a, b) for a, b in zip(same, states, strict=True))


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_reference_is_that_of_transformers(per_channel: bool) -> None:
    """float64 above has the same states as transformers' own recurrences."""
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    rule = recurrent_kimi_delta_attention if per_channel else torch_recurrent_gated_delta_rule
    x, keys = make_inputs(6, DType.FLOAT32, per_channel=per_channel), KEY_HEADS * KEY_DIM
    _, after = expected_of(x, 6, per_channel=per_channel)
    row = 0
    for sequence, length in enumerate(LENGTHS):
        rows, row = slice(row, row + length), row + length
        qkv, b, a = (torch.tensor(part[rows])[None] for part in (x.qkv, x.b, x.a))
        q, k = (part.reshape(1, length, KEY_HEADS, KEY_DIM) for part in (qkv[..., :keys], qkv[..., keys : 2 * keys]))
        v = qkv[..., 2 * keys :].reshape(1, length, VALUE_HEADS, 6)
        inputs = torch.nn.functional.softplus(a + torch.tensor(x.dt_bias))
        g = torch.tensor(x.decay)[:, None] * inputs.reshape(1, length, VALUE_HEADS, -1)
        if per_channel:  # whose heads of queries and keys are as many
            q, k = (part.repeat_interleave(VALUE_HEADS // KEY_HEADS, 2) for part in (q, k))
        _, state = rule(
            *(q, k, v),
            g=g if per_channel else g[..., 0],
            beta=b.sigmoid(),
            initial_state=None,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        np.testing.assert_allclose(state[0].numpy(), after[sequence][-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sigmoid_gate(kernels: Kernels, dtype: str) -> None:
    kind = DType(dtype)
    x, gate = np.random.default_rng(0).standard_normal((2, 9, 70)).astype(kind.numpy)
    result = kernels.to_numpy(kernels.sigmoid_gate(kernels.array(x, kind), kernels.array(gate, kind)))
    expected = x.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))
    np.testing.assert_allclose(result.astype(np.float64), expected, rtol=5e-3 if dtype == "bfloat16" else 1e-5)
