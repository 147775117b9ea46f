"""Exact conversion of codes to the activations' type, in registers.

Two 16-bit words are converted at once: a code is placed in the low bits of a floating-point number with a last bit of
value 1, and the number without the code is subtracted. Converting codes one by one takes three times the instructions,
and longer than loading the next codes from memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.interpreter import interpreted

_INTERPRETED = tl.constexpr(interpreted())

# (a & mask) | magic is lop3 with 0xea, (a & mask) ^ magic with 0x6a. In bfloat16 0x4300 is 128 and holds 7 more bits;
# in float16 0x6400 is 1024 and holds 10.


def _int4_to(pair: str, one: str, magic: str, minus: str) -> tl.constexpr:
    """Instructions for pairs of numbers of one type; ``minus`` subtracts magic and the offset 8 of a code."""
    return tl.constexpr(f"""{{
        .reg .b32 s, one, minus;
        mov.b32 one, {one};
        mov.b32 minus, {minus};
        lop3.b32 $0, $4, 0x000f000f, {magic}, 0xea;
        shr.u32 s, $4, 4;
        lop3.b32 $1, s, 0x000f000f, {magic}, 0xea;
        shr.u32 s, $4, 8;
        lop3.b32 $2, s, 0x000f000f, {magic}, 0xea;
        shr.u32 s, $4, 12;
        lop3.b32 $3, s, 0x000f000f, {magic}, 0xea;
        fma.rn.{pair} $0, $0, one, minus;
        fma.rn.{pair} $1, $1, one, minus;
        fma.rn.{pair} $2, $2, one, minus;
        fma.rn.{pair} $3, $3, one, minus;
    }}""")


_INT4_TO_BF16 = _int4_to("bf16x2", one="0x3f803f80", magic="0x43004300", minus="0xc308c308")
_INT4_TO_FP16 = _int4_to("f16x2", one="0x3c003c00", magic="0x64006400", minus="0xe408e408")

# 128 + the low 7 bits, minus 128 or, with the sign bit set, 256.
_INT8_TO_BF16 = tl.constexpr("""{
    .reg .b32 s, sign, minus;
    mov.b32 minus, 0xbf80bf80;
    lop3.b32 $0, $2, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 sign, $2, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, sign, minus, $0;
    shr.u32 s, $2, 8;
    lop3.b32 $1, s, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 sign, s, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $1, sign, minus, $1;
}""")
# 1024 + 128 + the code, minus 1152.
_INT8_TO_FP16 = tl.constexpr("""{
    .reg .b32 s, one, offset;
    mov.b32 one, 0x3c003c00;
    mov.b32 offset, 0xe480e480;
    lop3.b32 $0, $2, 0x00ff00ff, 0x64806480, 0x6a;
    shr.u32 s, $2, 8;
    lop3.b32 $1, s, 0x00ff00ff, 0x64806480, 0x6a;
    fma.rn.f16x2 $0, $0, one, offset;
    fma.rn.f16x2 $1, $1, one, offset;
}""")

# The bytes are sorted, low ones first. float16 holds every e4m3 number; from there to bfloat16 the way by float32 is
# the fastest.
_FP8_TO_BF16 = tl.constexpr("""{
    .reg .b32 sorted, halves;
    .reg .b16 low, high, first, second;
    .reg .f32 a, b;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 halves, low;
    mov.b32 {first, second}, halves;
    cvt.f32.f16 a, first;
    cvt.f32.f16 b, second;
    cvt.rn.bf16x2.f32 $0, b, a;
    cvt.rn.f16x2.e4m3x2 halves, high;
    mov.b32 {first, second}, halves;
    cvt.f32.f16 a, first;
    cvt.f32.f16 b, second;
    cvt.rn.bf16x2.f32 $1, b, a;
}""")
_FP8_TO_FP16 = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@triton.jit
def widen_int4(words, dtype: tl.constexpr):
    """int16 words of four codes (plus 8), from the low bits up: four tensors of the words' shape."""
    if dtype == tl.float32 or _INTERPRETED:
        w = words.to(tl.int32)
        return (
            ((w & 15) - 8).to(tl.float32).to(dtype),
            ((w >> 4 & 15) - 8).to(tl.float32).to(dtype),
            ((w >> 8 & 15) - 8).to(tl.float32).to(dtype),
            ((w >> 12 & 15) - 8).to(tl.float32).to(dtype),
        )
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _INT4_TO_BF16,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            _INT4_TO_FP16,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def widen_int8(words, dtype: tl.constexpr):
    """int16 words of two int8 codes, the low byte first: two tensors of the words' shape."""
    if dtype == tl.float32 or _INTERPRETED:
        w = words.to(tl.int32)
        return ((w << 24) >> 24).to(tl.float32).to(dtype), (w >> 8).to(tl.float32).to(dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _INT8_TO_BF16, "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            _INT8_TO_FP16, "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def widen_fp8(words, dtype: tl.constexpr):
    """int16 words of two e4m3 numbers, the low byte first: two tensors of the words' shape."""
    if dtype == tl.float32 or _INTERPRETED:
        low = words.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        high = (words >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return low.to(tl.float32).to(dtype), high.to(tl.float32).to(dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _FP8_TO_BF16, "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            _FP8_TO_FP16, "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
