"""The alphabet in which byte-level BPE writes bytes."""

from __future__ import annotations

import functools


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The character that byte-level BPE (Radford et al. 2019) writes for each byte: itself, or 256 + n if invisible."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(others)}
