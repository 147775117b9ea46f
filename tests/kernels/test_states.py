"""Recurrent states: against float64, and the same bits however sequences are cut into steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

_cpu: Any = pytest.importorskip("octavo._cpu")
from octavo.config.kv_spec import KVSpec, LayerGroup  # noqa: E402
from octavo.core.dtypes import DType  # noqa: E402
from octavo.kernels.cpu.backend import CpuKernels  # noqa: E402
from octavo.kernels.forward_batch import ForwardBatch, make_batch  # noqa: E402
from octavo.kernels.interface import Kernels, LayerCache, conv_numbers  # noqa: E402
from octavo.kernels.reference import ReferenceKernels  # noqa: E402
from tests.kernels.backends import cpu_settings  # noqa: E402

LENGTHS, BLOCK, STATE_TOKENS, OFFSET = [13, 1, 22], 4, 8, 6
#: Tokens of each sequence in each step.
CUTS = [[[13, 1, 22]], [[5, 1, 9], [1, 0, 1], [7, 0, 12]], [[1, 1, 1]] + [[1, 0, 1]] * 12 + [[0, 0, 1]] * 9]


@pytest.fixture(params=["reference", *_cpu.available_isas().floats])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    if request.param == "reference":
        yield ReferenceKernels()
        return
    with cpu_settings(isa=request.param):
        yield CpuKernels()


class Part(NamedTuple):
    """The tokens of a sequence in a step."""

    certain: int
    #: Draft tokens behind them, of which the first ``accepted`` are right.
    drafts: int = 0
    accepted: int = 0


class States:
    """Blocks of states of three sequences, and the steps that compute their tokens."""

    def __init__(self, kernels: Kernels, numbers: int, draft_tokens: int = 0, state_tokens: int = STATE_TOKENS) -> None:
        """``numbers``: of a kernel in a block, from ``OFFSET`` on."""
        self._kernels, self._numbers, self._state_tokens = kernels, numbers, state_tokens
        spec = KVSpec.state(OFFSET + numbers + 2, draft_tokens)
        (self.cache,) = kernels.make_cache([LayerGroup(spec, (0,))], [40], 1)
        self.cache.state_tokens, self.cache.group = state_tokens, 1
        fill(kernels, self.cache)
        count = 24 // state_tokens
        self._blocks = np.random.default_rng(1).permutation(40)[: 3 * count].reshape(3, count).astype(np.int32)
        self._tables = np.zeros((2, 3, 12), np.int32)  # group 0 is attention's, and must not be read
        self._tables[1, :, :count] = self._blocks

    def steps(self, cuts: list[list[Part]] | list[list[int]]) -> Iterator[tuple[ForwardBatch, np.ndarray, np.ndarray]]:
        """For each step its batch, and for each of its tokens the row of all inputs and whether it is accepted."""
        rng, starts, first = np.random.default_rng(2), [0, 0, 0], np.cumsum([0, *LENGTHS])
        for cut in cuts:
            parts = [Part(part) if isinstance(part, int) else part for part in cut]
            counts = [part.certain + part.drafts for part in parts]
            order = sorted((s for s in range(3) if counts[s]), key=lambda s: counts[s] > 1)
            ends = [starts[s] + counts[s] for s in order]
            drafts = [parts[s].drafts for s in order]
            batch = make_batch(
                [counts[s] for s in order], ends, self._tables[:, order], BLOCK, self._kernels, num_drafts=drafts
            )
            rows, right = [], []
            for s in order:
                taken = parts[s].certain + parts[s].accepted
                wrong = counts[s] - taken
                rows += [
                    np.arange(first[s] + starts[s], first[s] + starts[s] + taken),
                    rng.integers(first[3], size=wrong),
                ]
                right += [True] * taken + [False] * wrong
                starts[s] += taken
            yield batch, np.concatenate(rows), np.array(right)
        assert starts == LENGTHS

    def numbers(self) -> list[np.ndarray]:
        """The kernel's numbers of the blocks of each sequence."""
        numbers = memory(self._kernels, self.cache)
        assert (numbers[:, :OFFSET] == 7).all(), "numbers beside the kernel's were written"
        assert (numbers[:, OFFSET + self._numbers :] == 7).all(), "numbers beside the kernel's were written"
        kept = self.cache.draft_tokens
        held = [own[: -(-(n + kept) // self._state_tokens)] for own, n in zip(self._blocks, LENGTHS, strict=True)]
        assert (np.delete(numbers, np.concatenate(held), axis=0) == 7).all(), "another block was written"
        return [numbers[blocks, OFFSET : OFFSET + self._numbers].copy() for blocks in held]


def draft_cuts(draft_tokens: int, seed: int) -> list[list[Part]]:
    """Steps in which up to ``draft_tokens`` tokens are drafted for each sequence, and any number is accepted."""
    rng, left, cuts = random.Random(seed), LENGTHS.copy(), []
    while any(left):
        cut = []
        for s in range(3):
            certain = min(left[s], rng.choice([0, 1, 1, 1, 4]))
            drafts = rng.randint(0, draft_tokens) if certain else 0
            drafts = min(drafts, 24 - LENGTHS[s] + left[s] - certain)
            cut.append(Part(certain, drafts, accepted := rng.randint(0, min(drafts, left[s] - certain))))
            left[s] -= certain + accepted
        if any(part.certain for part in cut):
            cuts.append(cut)
    return cuts


def run(
    kernels: Kernels, cuts: list[list[Part]] | list[list[int]], x: np.ndarray, gates: list[np.ndarray],
    weight: np.ndarray, dtype: DType, bias: np.ndarray | None, silu: bool, **options: int,
) -> tuple[np.ndarray, list[np.ndarray]]:  # fmt: skip
    """Results [T, C], sequence by sequence, and the convolution's numbers of each block that sequences have."""
    taps, channels = weight.shape
    states = States(kernels, conv_numbers(taps, channels, options.get("draft_tokens", 0)), **options)
    out = np.zeros((sum(LENGTHS), channels))
    for batch, rows, right in states.steps(cuts):
        # Strided rows, as those of a part of a larger product.
        whole = kernels.array(np.concatenate([part[rows] for part in (x, *gates)], axis=1), dtype)
        parts = [whole[:, i * channels : (i + 1) * channels] for i in range(3)]
        result = kernels.causal_conv(
            parts[0],
            kernels.array(weight),
            None if bias is None else kernels.array(bias),
            states.cache,
            batch,
            offset=OFFSET,
            activation="silu" if silu else None,
            in_gate=parts[1],
            out_gate=parts[2] if not silu else None,
        )
        out[rows[right]] = kernels.to_numpy(result).astype(np.float64)[right]
    return out, states.numbers()


def memory(kernels: Kernels, cache: LayerCache) -> np.ndarray:
    key = kernels.to_numpy(cache.key)
    return (key.view(np.float32) if key.dtype == np.uint8 else key).reshape(len(key), -1)


def fill(kernels: Kernels, cache: LayerCache) -> None:
    """A block that is new to a sequence has numbers of another one."""
    if isinstance(cache.key, torch.Tensor):
        cache.key.fill_(7)
    else:
        memory(kernels, cache)[:] = 7


@pytest.mark.parametrize(
    ("dtype", "taps", "silu"), [("float32", 3, False), ("bfloat16", 4, True), ("float32", 6, True)]
)
def test_causal_conv(kernels: Kernels, dtype: str, taps: int, silu: bool) -> None:
    rng, kind = np.random.default_rng(0), DType(dtype)
    channels = 70
    x, *gates = (rng.standard_normal((sum(LENGTHS), channels)).astype(kind.numpy).astype(np.float32) for _ in range(3))
    weight = rng.standard_normal((taps, channels)).astype(np.float32)
    bias = rng.standard_normal(channels).astype(np.float32) if silu else None
    out, states = run(kernels, CUTS[0], x, gates, weight, kind, bias, silu)
    first = 0
    for length, blocks in zip(LENGTHS, states, strict=True):
        rows = slice(first, first + length)
        inputs = np.zeros((taps - 1 + length, channels))
        inputs[taps - 1 :] = x[rows].astype(np.float64) * gates[0][rows]
        expected = sum(inputs[tap : tap + length] * weight[tap] for tap in range(taps))
        expected = expected + (0 if bias is None else bias)
        expected = expected / (1 + np.exp(-expected)) if silu else expected * gates[1][rows]
        np.testing.assert_allclose(out[rows], expected, rtol=1e-2 if dtype == "bfloat16" else 1e-5, atol=1e-5)
        for i, state in enumerate(blocks):
            end = min(length, (i + 1) * STATE_TOKENS)
            np.testing.assert_allclose(state.reshape(taps - 1, channels), inputs[end : end + taps - 1], rtol=1e-6)
        first += length
    for cuts in CUTS[1:]:
        again, same = run(kernels, cuts, x, gates, weight, kind, bias, silu)
        if kernels.name == "cpu":
            assert np.array_equal(again, out)
        np.testing.assert_allclose(again, out, rtol=1e-2 if dtype == "bfloat16" else 1e-6, atol=1e-6)
        assert all(np.array_equal(a, b) for a, b in zip(same, states, strict=True))


#: Draft tokens, tokens of a block: drafts end in a block or the next one, or are longer than a block.
DRAFTS = [(1, 8), (5, 8), (5, 2)]


@pytest.mark.parametrize(("draft_tokens", "state_tokens"), DRAFTS)
@pytest.mark.parametrize(("dtype", "taps"), [("float32", 3), ("bfloat16", 6)])
def test_drafts_change_no_bit_of_a_convolution(
    kernels: Kernels, dtype: str, taps: int, draft_tokens: int, state_tokens: int
) -> None:
    rng, kind = np.random.default_rng(0), DType(dtype)
    x, *gates = (rng.standard_normal((sum(LENGTHS), 70)).astype(kind.numpy).astype(np.float32) for _ in range(3))
    inputs = x, gates, rng.standard_normal((taps, 70)).astype(np.float32), kind, None, taps == 3
    wanted, _ = run(kernels, CUTS[2], *inputs)
    for seed in range(4):
        cuts = draft_cuts(draft_tokens, seed)
        out, _ = run(kernels, cuts, *inputs, draft_tokens=draft_tokens, state_tokens=state_tokens)
        assert kernels.name != "cpu" or np.array_equal(out, wanted)
        np.testing.assert_allclose(out, wanted, rtol=1e-2 if dtype == "bfloat16" else 1e-5, atol=1e-6)


def test_more_drafts_than_a_block_keeps_are_refused(kernels: Kernels) -> None:
    ones = np.ones((sum(LENGTHS), 70), np.float32)
    for kept in (0, 2):
        with pytest.raises(ValueError, match=f"3 draft tokens, but blocks .*keep .* of {kept}"):
            run(
                kernels, [[Part(1, 3), Part(1), Part(1)]], ones, [ones, ones], ones[:3], DType.FLOAT32, None, False,
                draft_tokens=kept,
            )  # fmt: skip
