"""The frame of a stored value: 64 bytes before it, by which a reader knows that it is whole, and the one it asked for.

    offset  bytes
    0       8     b"OCTAVOKV"
    8       4     version of this format and of the layout of values
    12      4     CRC-32 of the value
    16      8     length of the value in bytes
    24      32    key
    56      8     0

Numbers are little-endian. A value is valid if its frame is, byte for byte, the one that ``pack`` makes of it. CRC-32
finds all damage of at most 32 neighbouring bits, and misses other damage once in 2^32. It is the fastest checksum of
the standard library (5.9 GB/s on a Xeon of 2023, SHA-256 with instructions of its own 2.0, BLAKE2b 1.1), and runs
without the GIL. It does not protect from who may write to a store: whoever can, can forge values.
"""

from __future__ import annotations

import struct
import zlib

MAGIC = b"OCTAVOKV"
#: Values of other versions count as missing.
VERSION = 1
_FRAME = struct.Struct("<8sIIQ32s8x")
FRAME_BYTES = _FRAME.size


def pack(key: bytes, value: memoryview, version: int = VERSION) -> bytes:
    """The frame of a value of any number of bytes, which is read and not copied; ``key``: 32 bytes."""
    return _FRAME.pack(MAGIC, version, zlib.crc32(value), value.nbytes, key)


def check(frame: bytes | bytearray | memoryview, key: bytes, value: memoryview) -> bool:
    """Whether the value is the one that was stored with this frame under this key, in this version."""
    return bytes(frame) == pack(key, value)
