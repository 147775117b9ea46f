"""Frames of stored values: nothing but the value that was stored under a key, in this version, passes."""

from __future__ import annotations

import random
import struct
import zlib
from typing import Any

from octavo.kvstore.frames import FRAME_BYTES, VERSION, check, pack

KEY = bytes(range(32))
VALUE = memoryview(bytearray(random.Random(1).randbytes(1000)))


def test_a_frame_is_as_its_module_says() -> None:
    frame = pack(KEY, VALUE)
    assert len(frame) == FRAME_BYTES == 64
    assert frame[:8] == b"OCTAVOKV"
    assert struct.unpack_from("<IIQ", frame, 8) == (VERSION, zlib.crc32(VALUE), 1000)
    assert frame[24:56] == KEY
    assert frame[56:] == bytes(8)
    assert check(frame, KEY, VALUE) and check(memoryview(frame), KEY, VALUE)


def test_values_of_any_type_of_elements_are_read_in_place() -> None:
    value: Any = memoryview(bytearray(64)).cast("f")
    frame = pack(KEY, value)
    assert check(frame, KEY, value)
    value[3] = 1.0
    assert not check(frame, KEY, value)


def test_every_bit_of_a_frame_counts() -> None:
    for bit in range(8 * FRAME_BYTES):
        frame = bytearray(pack(KEY, VALUE))
        frame[bit // 8] ^= 1 << bit % 8
        assert not check(frame, KEY, VALUE)


def test_another_key_version_or_length_is_refused() -> None:
    assert not check(pack(KEY[::-1], VALUE), KEY, VALUE)
    assert not check(pack(KEY, VALUE, VERSION + 1), KEY, VALUE)
    assert not check(pack(KEY, VALUE), KEY, VALUE[:-1])
    assert not check(b"", KEY, VALUE)
