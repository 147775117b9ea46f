"""Selective scans: against float64 and transformers, and the same bits however sequences are cut into steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.dtypes import DType
from octavo.kernels.cpu.array import cpu
from octavo.kernels.cpu.backend import CpuKernels
from octavo.kernels.interface import Array, Kernels, LayerCache, ScanChannels, ScanHeads, scan_numbers, ssd_numbers
from tests.kernels.backends import cpu_settings
from tests.kernels.test_states import CUTS, DRAFTS, LENGTHS, OFFSET, STATE_TOKENS, Part, States, draft_cuts, kernels

__all__ = ["kernels"]

TOKENS, STARTS = sum(LENGTHS), [0, LENGTHS[0], LENGTHS[0] + LENGTHS[1]]
#: Calls a kernel with the rows of a step: (kernels, rows of each input, cache, batch) to the result.
Scan = Callable[[Kernels, list[Array], LayerCache, Any], Array]


class Mamba1:
    """Inputs x and z of a type, dt, b and c in float32, and the weights of 70 channels, more than two units of work."""

    CHANNELS = 70

    def __init__(self, state_size: int, dtype: DType) -> None:
        rng, self.state_size = np.random.default_rng(0), state_size
        self.x, self.z = (rounded(rng.standard_normal((TOKENS, self.CHANNELS)), dtype) for _ in range(2))
        widths = self.CHANNELS, state_size, state_size
        self.dt, self.b, self.c = (rng.standard_normal((TOKENS, width)).astype(np.float32) for width in widths)
        self.dt[::3] *= 30  # softplus is linear, or the exponential function
        self.decay = -np.exp(rng.standard_normal((state_size, self.CHANNELS))).astype(np.float32)
        self.dt_bias, self.skip = rng.standard_normal((2, self.CHANNELS)).astype(np.float32)
        self.inputs = [(self.x, dtype), (self.z, dtype), *((part, DType.FLOAT32) for part in (self.dt, self.b, self.c))]

    def numbers(self, draft_tokens: int) -> int:
        return scan_numbers(self.CHANNELS, self.state_size, draft_tokens)

    def scan(self, kernels: Kernels, parts: list[Array], cache: LayerCache, batch: Any) -> Array:
        x, z, dt, b, c = parts
        channels = ScanChannels(*(kernels.array(array) for array in (self.decay, self.dt_bias, self.skip)))
        return kernels.selective_scan(x, dt, b, c, z, channels, cache, batch, offset=OFFSET)

    def expected(self) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        """Results [T, C] and the states [N, C] after each token of each sequence, in float64."""
        x, z, b, c = (part.astype(np.float64) for part in (self.x, self.z, self.b, self.c))
        dt = np.logaddexp(0, self.dt.astype(np.float64) + self.dt_bias)
        out, states = np.zeros_like(x), []
        for first, length in zip(STARTS, LENGTHS, strict=True):
            state, after = np.zeros((self.state_size, self.CHANNELS)), []
            for row in range(first, first + length):
                state = np.exp(dt[row] * self.decay) * state + np.outer(b[row], dt[row] * x[row])
                out[row] = c[row] @ state + self.skip * x[row]
                after.append(state)
            states.append(after)
        return out * z / (1 + np.exp(-z)), states


class Mamba2:
    """Inputs of a type and the weights of six heads in two groups."""

    HEADS, GROUPS, STATE = 6, 2, 20

    def __init__(self, head_dim: int, dtype: DType, *, gated: bool = True) -> None:
        rng, self.head_dim, self.gated = np.random.default_rng(0), head_dim, gated
        inner, keys = self.HEADS * head_dim, self.GROUPS * self.STATE
        widths = inner + 2 * keys, inner, self.HEADS
        self.xbc, self.z, self.dt = (rounded(rng.standard_normal((TOKENS, width)), dtype) for width in widths)
        self.decay = -np.exp(rng.standard_normal(self.HEADS)).astype(np.float32)
        self.dt_bias, self.skip = rng.standard_normal((2, self.HEADS)).astype(np.float32)
        self.inputs = [(part, dtype) for part in (self.xbc, self.z, self.dt)]

    def numbers(self, draft_tokens: int) -> int:
        return ssd_numbers(self.HEADS, self.head_dim, self.STATE, draft_tokens)

    def heads(self, array: Callable[[np.ndarray], Any]) -> ScanHeads:
        decay, dt_bias, skip = (array(vector) for vector in (self.decay, self.dt_bias, self.skip))
        sizes = self.HEADS, self.GROUPS, self.head_dim, self.STATE
        return ScanHeads(*sizes, decay, dt_bias, skip, dt_limits=(0.25, 1.5), dt_scale=0.75, gate_scale=1.25, scale=0.5)

    def scan(self, kernels: Kernels, parts: list[Array], cache: LayerCache, batch: Any) -> Array:
        xbc, z, dt = parts
        form: dict[str, Any] = {"z": z} if self.gated else {"out_dtype": DType.FLOAT32}
        result = kernels.ssd_scan(xbc, dt, self.heads(kernels.array), cache, batch, offset=OFFSET, **form)
        assert self.gated or str(result.dtype).endswith("float32")
        return result

    def expected(self) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        """Results [T, C] and the states [heads, STATE, head_dim] after each token of each sequence, in float64."""
        inner, keys = self.HEADS * self.head_dim, self.GROUPS * self.STATE
        xbc, z, dt = (part.astype(np.float64) for part in (self.xbc, self.z, self.dt))
        x = xbc[:, :inner].reshape(-1, self.HEADS, self.head_dim)
        b, c = (part.reshape(-1, self.GROUPS, self.STATE) for part in (xbc[:, inner:-keys], xbc[:, -keys:]))
        dt = np.clip(np.logaddexp(0, 0.75 * dt + self.dt_bias), 0.25, 1.5)
        out, states = np.zeros_like(x), []
        for first, length in zip(STARTS, LENGTHS, strict=True):
            state, after = np.zeros((self.HEADS, self.STATE, self.head_dim)), []
            for row in range(first, first + length):
                for head in range(self.HEADS):
                    group = head // (self.HEADS // self.GROUPS)
                    decayed = np.exp(dt[row, head] * self.decay[head]) * state[head]
                    state[head] = decayed + np.outer(b[row, group], dt[row, head] * x[row, head])
                    out[row, head] = c[row, group] @ state[head] + self.skip[head] * x[row, head]
                after.append(state.copy())
            states.append(after)
        result = 0.5 * out.reshape(TOKENS, inner)
        return (result * 1.25 * z / (1 + np.exp(-1.25 * z)) if self.gated else result), states


def rounded(x: np.ndarray, dtype: DType) -> np.ndarray:
    return x.astype(dtype.numpy).astype(np.float32)


def run(
    kernels: Kernels,
    cuts: list[list[Part]] | list[list[int]],
    case: Mamba1 | Mamba2,
    draft_tokens: int = 0,
    state_tokens: int = STATE_TOKENS,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Results, sequence by sequence, and the scan's numbers of each block that sequences have."""
    states = States(kernels, case.numbers(draft_tokens), draft_tokens, state_tokens)
    out: list[np.ndarray | None] = [None] * TOKENS
    for batch, rows, right in states.steps(cuts):
        parts: list[Array] = []
        for dtype, same in itertools.groupby(case.inputs, key=lambda part: part[1]):
            # Strided rows, as those of a part of a larger product.
            own = [part[rows] for part, _ in same]
            whole, ends_of_parts = (
                kernels.array(np.concatenate(own, axis=1), dtype),
                np.cumsum([0, *(x.shape[1] for x in own)]),
            )
            parts += [whole[:, i:j] for i, j in itertools.pairwise(ends_of_parts)]
        result = kernels.to_numpy(case.scan(kernels, parts, states.cache, batch)).astype(np.float64)
        for row, values in zip(rows[right], result[right], strict=True):
            out[row] = values
    return np.array(out), states.numbers()


def check(kernels: Kernels, case: Mamba1 | Mamba2, rounding: float) -> None:
    out, states = run(kernels, CUTS[0], case)
    expected, after = case.expected()
    np.testing.assert_allclose(out, expected, rtol=rounding, atol=5e-5)
    for sequence, length in enumerate(LENGTHS):
        for i, state in enumerate(states[sequence]):
            wanted = after[sequence][min(length, (i + 1) * STATE_TOKENS) - 1]
            np.testing.assert_allclose(state, wanted.ravel(), rtol=1e-4, atol=2e-5)
    for cuts in CUTS[1:]:
        again, same = run(kernels, cuts, case)
        if kernels.name == "cpu":
            assert np.array_equal(again, out)
            assert all(np.array_equal(a, b) for a, b in zip(same, states, strict=True))
        np.testing.assert_allclose(again, out, rtol=rounding, atol=2e-5)


@pytest.mark.parametrize(("state_size", "dtype"), [(16, "float32"), (5, "float32"), (16, "bfloat16")])
def test_selective_scan(kernels: Kernels, state_size: int, dtype: str) -> None:
    check(kernels, Mamba1(state_size, DType(dtype)), 1e-2 if dtype == "bfloat16" else 1e-4)


#: Heads that are a part of a vector; eight vectors and a part of one, or less on wider instruction sets.
@pytest.mark.parametrize(
    ("head_dim", "dtype", "gated"), [(6, "float32", True), (136, "bfloat16", True), (72, "bfloat16", False)]
)
def test_ssd_scan(kernels: Kernels, head_dim: int, dtype: str, gated: bool) -> None:
    check(kernels, Mamba2(head_dim, DType(dtype), gated=gated), 1e-2 if gated and dtype == "bfloat16" else 1e-4)


@pytest.mark.parametrize(("draft_tokens", "state_tokens"), DRAFTS)
@pytest.mark.parametrize(
    "case",
    [Mamba1(16, DType.BFLOAT16), Mamba1(5, DType.FLOAT32), Mamba2(6, DType.FLOAT32), Mamba2(136, DType.BFLOAT16)],
    ids=["16 numbers", "5 numbers", "heads of 6", "heads of 136"],
)
def test_drafts_change_no_bit(kernels: Kernels, case: Mamba1 | Mamba2, draft_tokens: int, state_tokens: int) -> None:
    wanted, _ = run(kernels, CUTS[2], case)
    for seed in range(3):
        out, _ = run(kernels, draft_cuts(draft_tokens, seed), case, draft_tokens, state_tokens)
        assert kernels.name != "cpu" or np.array_equal(out, wanted)
        np.testing.assert_allclose(out, wanted, rtol=1e-2, atol=5e-5)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    for case in (Mamba1(16, DType.FLOAT32), Mamba2(136, DType.FLOAT32)):
        with cpu_settings(threads=1):
            one, states = run(CpuKernels(), CUTS[1], case)
        with cpu_settings(threads=3):
            three, same = run(CpuKernels(), CUTS[1], case)
        assert np.array_equal(one, three)
        assert all(np.array_equal(a, b) for a, b in zip(same, states, strict=True))


def test_bits_are_those_of_every_instruction_set_with_fused_sums() -> None:
    isas = [name for name in cpu.available_isas().floats if name != "generic"]
    for case in (Mamba1(16, DType.BFLOAT16), Mamba2(72, DType.BFLOAT16)):
        results = []
        for isa in isas:
            with cpu_settings(isa=isa):
                results.append(run(CpuKernels(), CUTS[1], case))
        for out, states in results[1:]:
            assert np.array_equal(out, results[0][0])
            assert all(np.array_equal(a, b) for a, b in zip(states, results[0][1], strict=True))


def test_float64_is_transformers_recurrence() -> None:
    from transformers.models.mamba.modeling_mamba import mamba_selective_state_update
    from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

    first, (_, after) = Mamba1(5, DType.FLOAT32), Mamba1(5, DType.FLOAT32).expected()
    state = torch.zeros(1, first.CHANNELS, 5)
    decay, bias = torch.tensor(first.decay.T), torch.tensor(first.dt_bias)
    for row in range(LENGTHS[0]):
        x, dt, b, c = (torch.tensor(part[row])[None] for part in (first.x, first.dt, first.b, first.c))
        mamba_selective_state_update(state, x, dt, decay, b, c, dt_bias=bias, dt_softplus=True)
    np.testing.assert_allclose(state[0].T.numpy(), after[0][-1], rtol=1e-4, atol=1e-5)

    second = Mamba2(6, DType.FLOAT32)
    heads, inner, keys = second.HEADS, 36, second.GROUPS * second.STATE
    second.dt = (second.dt - second.dt_bias).clip(-0.5, 0.5)  # dt within its bounds, which that function lacks
    second.dt_bias = np.zeros_like(second.dt_bias)
    _, after = second.expected()
    state = torch.zeros(1, heads, 6, second.STATE)
    decay = torch.tensor(second.decay)[:, None, None].expand(-1, 6, second.STATE)
    for row in range(LENGTHS[0]):
        x, b, c = torch.tensor(second.xbc[row]).split((inner, keys, keys))
        dt = (0.75 * torch.tensor(second.dt[row]))[None, :, None].expand(-1, -1, 6)
        groups = (part.reshape(1, second.GROUPS, second.STATE) for part in (b, c))
        mamba2_selective_state_update(state, x.reshape(1, heads, 6), dt, decay, *groups, dt_softplus=True)
    np.testing.assert_allclose(state[0].transpose(1, 2).numpy(), after[0][-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_silu_gate(kernels: Kernels, dtype: str) -> None:
    kind, rng = DType(dtype), np.random.default_rng(0)
    x, gate = rng.standard_normal((9, 70)).astype(np.float32), rng.standard_normal((9, 70)).astype(kind.numpy)
    result = kernels.to_numpy(kernels.silu_gate(kernels.array(x), kernels.array(gate, kind), 1.5))
    scaled = 1.5 * gate.astype(np.float64)
    expected = x * scaled / (1 + np.exp(-scaled))
    np.testing.assert_allclose(result.astype(np.float64), expected, rtol=5e-3 if dtype == "bfloat16" else 1e-5)
