"""Random numbers for sampling: a hash of (seed, position, token id), without generator state.

The number of a token at a position of a request depends on nothing else: not on the batch, the filters or preemptions.
The integer part is the contract; all of it wraps modulo 2**64 or 2**32::

    G          = 0x9E3779B97F4A7C15
    mix64(x)   : x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31
    key        = mix64(mix64(seed + G) + (position + 1) * G)       64-bit, once per row
    k0, k1     = low 32 bits of key, high 32 bits of key

    mix32(x)   : x ^= x >> 16; x *= 0x85EBCA6B; x ^= x >> 13; x *= 0xC2B2AE35; x ^= x >> 16
    mixed_id   = mix32(token + 0x9E3779B9)                         32-bit, once per token id, kept in a table
    x          = mixed_id ^ k0
    x ^= x >> 16; x *= 0x85EBCA6B                                  first round, keyed by k0
    x ^= x >> 13; x ^= k1; x *= 0xC2B2AE35; x ^= x >> 16           second round, keyed by k1
    bits       = x

mix64 is the finalizer of splitmix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators"),
mix32 that of MurmurHash3. The float part, in float64: ``v = (bits + 0.5) / 2**32`` lies in (0, 1) and is exact, and
``E = -log1p(-v)`` is exponentially distributed, between 1.1e-10 and 22.9.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_GOLDEN64 = np.uint64(0x9E3779B97F4A7C15)
_GOLDEN32 = np.uint32(0x9E3779B9)
_M1 = np.uint32(0x85EBCA6B)
_M2 = np.uint32(0xC2B2AE35)
_S13 = np.uint32(13)
_S16 = np.uint32(16)


def keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Hash keys uint32 [n, 2] of seeds [n] and of the positions [n] of the tokens to be drawn."""
    steps = (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN64
    key = _mix64(_mix64(seeds + _GOLDEN64) + steps)
    return np.stack([(key & np.uint64(0xFFFFFFFF)), key >> np.uint64(32)], axis=-1).astype(np.uint32)


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=4)
def mixed_ids(vocab_size: int) -> NDArray[np.uint32]:
    """The part of the hash that depends on the token id alone: uint32 [vocab_size], read-only."""
    x = np.arange(vocab_size, dtype=np.uint32) + _GOLDEN32
    x = (x ^ (x >> _S16)) * _M1
    x = (x ^ (x >> _S13)) * _M2
    x ^= x >> _S16
    x.setflags(write=False)
    return x


def random_bits(
    key: NDArray[np.uint32],
    mixed: NDArray[np.uint32],
    out: NDArray[np.uint32] | None = None,
    scratch: NDArray[np.uint32] | None = None,
) -> NDArray[np.uint32]:
    """Uniform 32-bit numbers, one for each of ``mixed`` (entries of ``mixed_ids``), of one row's key [2].

    ``out`` and ``scratch`` (both of the shape of ``mixed``) save the allocations.
    """
    x = np.bitwise_xor(mixed, key[0], out=out)
    y = np.right_shift(x, _S16, out=scratch)
    x ^= y
    x *= _M1
    np.right_shift(x, _S13, out=y)
    x ^= y
    x ^= key[1]
    x *= _M2
    np.right_shift(x, _S16, out=y)
    x ^= y
    return x


def exponential(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Standard exponential numbers, finite and positive, from uniform bits."""
    return -np.log1p(-(bits + 0.5) * 2.0**-32)
