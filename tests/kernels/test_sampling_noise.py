"""The sampling noise: reproducible to the bit, uniform, and independent across tokens, positions and seeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from octavo.kernels import sampling

VOCAB = 4096
#: About a hundred tests of fixed samples are made here: a good hash fails one of them with probability 1e-4.
UNLIKELY = 1e-6
MASK32, MASK64 = 2**32 - 1, 2**64 - 1


def reference_bits(seed: int, position: int, token: int) -> int:
    """The documented formula in Python integers."""

    def mix64(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mix64((mix64((seed + golden) & MASK64) + (position + 1) * golden) & MASK64)
    x = (token + 0x9E3779B9) & MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK32
    x ^= x >> 16
    x ^= key & MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK32
    x = ((x ^ (x >> 13) ^ (key >> 32)) * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)


def bits(seeds: list[int], positions: list[int], vocab: int = VOCAB) -> NDArray[np.uint32]:
    """[n, vocab] bits of n pairs of seed and position."""
    keys = sampling.keys(np.array(seeds, np.uint64), np.array(positions, np.int64))
    return np.stack([sampling.random_bits(key, sampling.mixed_ids(vocab)) for key in keys])


@given(st.integers(0, MASK64), st.integers(0, 2**31), st.integers(0, VOCAB - 1))
def test_bits_follow_the_documented_formula(seed: int, position: int, token: int) -> None:
    assert int(bits([seed], [position])[0, token]) == reference_bits(seed, position, token)


def test_bits_are_pinned() -> None:
    """Another value here changes what every seeded request generates."""
    assert bits([0, 1, MASK64], [0, 7, 100])[:, [0, 1, 4095]].tolist() == [
        [reference_bits(s, p, t) for t in (0, 1, 4095)] for s, p in ((0, 0), (1, 7), (MASK64, 100))
    ]
    assert reference_bits(0, 0, 0) == 264702018


def test_a_tokens_bits_do_not_depend_on_which_others_are_computed() -> None:
    key = sampling.keys(np.array([5], np.uint64), np.array([9], np.int64))[0]
    ids = np.array([3, 4000, 17])
    mixed = sampling.mixed_ids(VOCAB)
    assert (sampling.random_bits(key, mixed[ids]) == sampling.random_bits(key, mixed)[ids]).all()


def test_given_buffers_are_used() -> None:
    key = sampling.keys(np.array([5], np.uint64), np.array([9], np.int64))[0]
    out, scratch = np.empty(VOCAB, np.uint32), np.empty(VOCAB, np.uint32)
    result = sampling.random_bits(key, sampling.mixed_ids(VOCAB), out, scratch)
    assert result is out
    assert (out == bits([5], [9])[0]).all()


WAYS = {
    "tokens": ([7], [3]),
    "positions": ([7] * 500, list(range(500))),
    "seeds": (list(range(500)), [3] * 500),
    "seeds in the high half": ([i << 32 for i in range(500)], [3] * 500),
}


@pytest.mark.parametrize("way", WAYS)
def test_uniform_in_every_byte(way: str) -> None:
    x = bits(*WAYS[way], vocab=65536 if way == "tokens" else VOCAB)
    for shift in (0, 8, 16, 24):
        counts = np.bincount((x.ravel() >> np.uint32(shift)) & 255, minlength=256)
        assert stats.chisquare(counts).pvalue > UNLIKELY


@pytest.mark.parametrize("way", WAYS)
def test_one_token_is_uniform_along_each_way(way: str) -> None:
    seeds, positions = WAYS[way]
    if way == "tokens":
        sample = bits(seeds, positions, vocab=65536)[0]
    else:
        step = seeds[1] - seeds[0]
        many = 20000
        keys = sampling.keys(
            np.arange(many, dtype=np.uint64) * np.uint64(step) if step else np.full(many, 7, np.uint64),
            np.arange(many, dtype=np.int64) if not step else np.full(many, 3, np.int64),
        )
        mixed = sampling.mixed_ids(VOCAB)[[42]]
        sample = np.concatenate([sampling.random_bits(key, mixed) for key in keys])
    assert stats.kstest(sample / 2.0**32, "uniform").pvalue > UNLIKELY
    # Neighbours: pairs (x[i], x[i + 1]) fill a 16 x 16 grid evenly.
    pairs = (sample[:-1] >> np.uint32(28)) * 16 + (sample[1:] >> np.uint32(28))
    assert stats.chisquare(np.bincount(pairs[::2], minlength=256)).pvalue > UNLIKELY


@pytest.mark.parametrize("other", [(8, 3), (7, 4), (7 ^ (1 << 63), 3), (7 + (1 << 32), 3)])
def test_neighbouring_keys_are_independent_token_by_token(other: tuple[int, int]) -> None:
    first, second = bits([7, other[0]], [3, other[1]], vocab=65536)
    cells = (first >> np.uint32(28)) * 16 + (second >> np.uint32(28))
    assert stats.chisquare(np.bincount(cells, minlength=256)).pvalue > UNLIKELY
    low = (first & np.uint32(15)) * 16 + (second & np.uint32(15))
    assert stats.chisquare(np.bincount(low, minlength=256)).pvalue > UNLIKELY


@pytest.mark.parametrize("what", ["seed", "position", "token"])
def test_avalanche_each_input_bit_flips_half_of_the_output_bits(what: str) -> None:
    rng = np.random.default_rng(1)
    samples = 1000
    width = {"seed": 64, "position": 16, "token": 12}[what]
    seeds = rng.integers(0, 2**64, samples, dtype=np.uint64)
    positions = rng.integers(0, 2**16, samples)
    tokens = rng.integers(0, VOCAB, samples)
    mixed = sampling.mixed_ids(VOCAB)

    def hashes(
        seeds: NDArray[np.uint64], positions: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> NDArray[np.uint32]:
        keys = sampling.keys(seeds, positions)
        return np.concatenate([sampling.random_bits(k, mixed[[t]]) for k, t in zip(keys, tokens, strict=True)])

    plain = hashes(seeds, positions, tokens)
    for bit in range(width):
        flipped = hashes(
            seeds ^ np.uint64(1 << bit) if what == "seed" else seeds,
            positions ^ (1 << bit) if what == "position" else positions,
            tokens ^ (1 << bit) if what == "token" else tokens,
        )
        changed = np.unpackbits((plain ^ flipped).view(np.uint8).reshape(samples, 4), axis=1).mean(axis=0)
        # Standard deviation 0.016 for each of the 32 output bits.
        assert changed.min() > 0.42
        assert changed.max() < 0.58


def test_exponential_is_finite_positive_and_exponential() -> None:
    ends = sampling.exponential(np.array([0, 2**32 - 1], np.uint32))
    assert 0 < ends[0] < 2e-10
    assert 22 < ends[1] < 23
    sample = sampling.exponential(bits([1], [1], vocab=65536)[0])
    assert stats.kstest(sample, "expon").pvalue > UNLIKELY
