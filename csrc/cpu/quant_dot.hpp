// Exact integer dot products of a tile of rows and a panel's 16 columns, over one group of 32 values.
#pragma once
#include "half.hpp"
#include "quant.hpp"
#include "vec.hpp"

namespace octavo::OCTAVO_ISA {

constexpr int kVectors = kPanel / kLanes;  // of the 16 columns

// For each row, the columns' sums.
template <int Rows>
struct Dots {
  I32 value[Rows][kVectors];
};

// dots_4bit: codes of 4 bits; Offset: they stand for code - 8. dots_8bit: codes of 8 bits, which have 128 added. w: the
// group's codes in the first panel; x: its quads of row 0; groups: that of row 0.

// Of rows that dots_8bit takes.
#if defined(OCTAVO_ISA_avx2) || defined(OCTAVO_ISA_avx512)
using CodeFor8bit = int16_t;
#else
using CodeFor8bit = int8_t;
#endif

#if defined(OCTAVO_ISA_avx512_bf16)

// Sums of 4 rows x 3 panels, in integers and in floats, fill 24 registers, and a broadcast serves three products.
constexpr int kPanelsAtOnce = 3;

// The instruction multiplies 8 bits without sign by 8 with one, and sums quads in 32 bits: no step can overflow.
template <int Rows, int Panels>
OCTAVO_INLINE void add_products(const U32 (&codes)[Panels], const int8_t* x, Dots<Rows> (&dots)[Panels]) {
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    int32_t word;
    std::memcpy(&word, x + 4 * r, 4);
    I32 quad = word - I32{};  // for one panel, the instruction's operand in memory
    if constexpr (Panels > 1) quad = (I32)splat_anew(reinterpret_cast<const float*>(x + 4 * r));
#pragma GCC unroll 3
    for (int p = 0; p < Panels; ++p)
      dots[p].value[r][0] = (I32)_mm512_dpbusd_epi32((__m512i)dots[p].value[r][0], (__m512i)codes[p], (__m512i)quad);
  }
}

// Of neighbouring panels, so many bytes apart.
template <int Rows, int Panels, bool Offset>
OCTAVO_INLINE void dots_4bit(const uint8_t* w, int64_t panel_bytes, const int8_t* x, const QuantGroup* groups,
                             Dots<Rows> (&dots)[Panels]) {
#pragma GCC unroll 3
  for (int p = 0; p < Panels; ++p)
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) dots[p].value[r][0] = (Offset ? groups[r].offset : 0) - I32{};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i, w += 64, x += 8 * Rows) {
    U32 even[Panels], odd[Panels];
#pragma GCC unroll 3
    for (int p = 0; p < Panels; ++p) even[p] = load_as<U32>(w + p * panel_bytes) & 0x0f0f0f0fu;
    add_products<Rows>(even, x, dots);
#pragma GCC unroll 3
    for (int p = 0; p < Panels; ++p) odd[p] = load_as<U32>(w + p * panel_bytes) >> 4 & 0x0f0f0f0fu;
    add_products<Rows>(odd, x + 4 * Rows, dots);
  }
}

template <int Rows, int Panels>
OCTAVO_INLINE void dots_8bit(const uint8_t* w, int64_t panel_bytes, const CodeFor8bit* x, const QuantGroup* groups,
                             Dots<Rows> (&dots)[Panels]) {
#pragma GCC unroll 3
  for (int p = 0; p < Panels; ++p)
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) dots[p].value[r][0] = 16 * groups[r].offset - I32{};
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    U32 codes[Panels];
#pragma GCC unroll 3
    for (int p = 0; p < Panels; ++p) codes[p] = load_as<U32>(w + p * panel_bytes + 64 * i);
    add_products<Rows>(codes, x + 4 * Rows * i, dots);
  }
}

#elif defined(OCTAVO_ISA_avx2) || defined(OCTAVO_ISA_avx512)

// Codes of 4 bits are multiplied in 8 bits and summed in 16: 16 products of at most 15 * 127 fit. The offset 8 is taken
// off by starting from -8 times the sum of the row's codes: no step overflows, as each product with its share of the
// start is at most 8 * 127. Codes of 8 bits would overflow such sums. They are multiplied in 16 bits, bytes at even
// places and at odd ones apart, and summed in 32.

typedef uint16_t Halves __attribute__((vector_size(4 * kLanes), may_alias));  // two of 16 bits for each column

OCTAVO_INLINE U32 low_nibbles(U32 codes) { return codes & 0x0f0f0f0fu; }
OCTAVO_INLINE U32 high_nibbles(U32 codes) { return low_nibbles(codes >> 4); }
OCTAVO_INLINE U32 quad_of(const int8_t* x) {
  uint32_t quad;
  std::memcpy(&quad, x, 4);
  return splat(quad);
}
OCTAVO_INLINE Halves add_products(Halves sums, U32 codes, U32 x) {
#if defined(OCTAVO_ISA_avx2)
  sums += (Halves)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
#else
  sums += (Halves)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
#endif
  // Hides the sums from the compiler, which would add all products pairwise and have no registers left to hold them.
#if !defined(OCTAVO_EMULATED)
  asm("" : "+v"(sums));
#endif
  return sums;
}
OCTAVO_INLINE I32 sum_pairs(Halves sums) {
#if defined(OCTAVO_ISA_avx2)
  return (I32)_mm256_madd_epi16((__m256i)sums, (__m256i)(1 - Halves{}));
#else
  return (I32)_mm512_madd_epi16((__m512i)sums, (__m512i)(1 - Halves{}));
#endif
}

template <int Rows, bool Offset>
OCTAVO_INLINE void dot_4bit(const uint8_t* w, const int8_t* x, const QuantGroup* groups, Dots<Rows>& dots) {
  Halves sums[Rows][kVectors];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = (Halves)splat(static_cast<uint32_t>(Offset ? groups[r].pairs : 0));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i, w += 64, x += 8 * Rows) {
    U32 even[kVectors], odd[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const U32 codes = load_as<U32>(w + 4 * kLanes * v);
      even[v] = low_nibbles(codes);
      odd[v] = high_nibbles(codes);
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const U32 x_even = quad_of(x + 4 * r), x_odd = quad_of(x + 4 * Rows + 4 * r);
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = add_products(sums[r][v], even[v], x_even);
        sums[r][v] = add_products(sums[r][v], odd[v], x_odd);
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < kVectors; ++v) dots.value[r][v] = sum_pairs(sums[r][v]);
}

OCTAVO_INLINE void add_wide_products(I32& sums, U32 codes, F32 x) {
#if defined(OCTAVO_ISA_avx2)
  sums += (I32)_mm256_madd_epi16((__m256i)codes, (__m256i)x);
#else
  sums += (I32)_mm512_madd_epi16((__m512i)codes, (__m512i)x);
#endif
#if !defined(OCTAVO_EMULATED)
  asm("" : "+v"(sums));  // as above
#endif
}

template <int Rows>
OCTAVO_INLINE void dot_8bit(const uint8_t* w, const CodeFor8bit* x, const QuantGroup* groups, Dots<Rows>& dots) {
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < kVectors; ++v) dots.value[r][v] = 16 * groups[r].offset - I32{};
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    U32 even[kVectors], odd[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const U32 codes = load_as<U32>(w + 64 * i + 4 * kLanes * v);
      even[v] = codes & 0x00ff00ffu;
      odd[v] = (U32)((Halves)codes >> 8);
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const auto* pairs = reinterpret_cast<const float*>(x + 4 * (Rows * i + r));
      const F32 x_even = splat_anew(pairs);
      for (int v = 0; v < kVectors; ++v) add_wide_products(dots.value[r][v], even[v], x_even);
      const F32 x_odd = splat_anew(pairs + 1);
      for (int v = 0; v < kVectors; ++v) add_wide_products(dots.value[r][v], odd[v], x_odd);
    }
  }
}

#else

template <int Rows, bool Offset>
OCTAVO_INLINE void dot_4bit(const uint8_t* w, const int8_t* x, const QuantGroup* groups, Dots<Rows>& dots) {
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < kPanel; ++c) {
      int32_t sum = Offset ? groups[r].offset : 0;
      for (int i = 0; i < 16; ++i) {
        const uint8_t codes = w[i / 4 * 64 + c * 4 + i % 4];
        const int8_t* pair = x + i / 4 * 8 * Rows + 4 * r + i % 4;
        sum += (codes & 15) * pair[0] + (codes >> 4) * pair[4 * Rows];
      }
      dots.value[r][c / kLanes][c % kLanes] = sum;
    }
  }
}

template <int Rows>
OCTAVO_INLINE void dot_8bit(const uint8_t* w, const CodeFor8bit* x, const QuantGroup* groups, Dots<Rows>& dots) {
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < kPanel; ++c) {
      int32_t sum = 16 * groups[r].offset;
      for (int i = 0; i < kQuantGroup; ++i) {
        sum += w[i / 4 * 64 + c * 4 + i % 4] * x[i / 4 * 4 * Rows + 4 * r + i % 4];
      }
      dots.value[r][c / kLanes][c % kLanes] = sum;
    }
  }
}

#endif

#if !defined(OCTAVO_ISA_avx512_bf16)
constexpr int kPanelsAtOnce = 1;

template <int Rows, int Panels, bool Offset>
OCTAVO_INLINE void dots_4bit(const uint8_t* w, int64_t, const int8_t* x, const QuantGroup* groups,
                             Dots<Rows> (&dots)[Panels]) {
  static_assert(Panels == 1);
  dot_4bit<Rows, Offset>(w, x, groups, dots[0]);
}

template <int Rows, int Panels>
OCTAVO_INLINE void dots_8bit(const uint8_t* w, int64_t, const CodeFor8bit* x, const QuantGroup* groups,
                             Dots<Rows> (&dots)[Panels]) {
  static_assert(Panels == 1);
  dot_8bit<Rows>(w, x, groups, dots[0]);
}
#endif

// ---- numbers of the 16 columns ----------------------------------------------------------------------------------

struct Columns {
  F32 value[kVectors];
};

// f(v) for each vector v.
template <typename F>
OCTAVO_INLINE Columns by_vector(const F& f) {
  Columns out;
  for (int v = 0; v < kVectors; ++v) out.value[v] = f(v);
  return out;
}

OCTAVO_INLINE F32 widen_f16(const uint16_t* p) {
#if defined(OCTAVO_ISA_avx512) || defined(OCTAVO_ISA_avx512_bf16)
  return (F32)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(OCTAVO_ISA_avx2)
  return (F32)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  F32 out;
  for (int i = 0; i < kLanes; ++i) out[i] = from_f16(p[i]);
  return out;
#endif
}
OCTAVO_INLINE F32 widen_u8(const uint8_t* p) {
#if defined(OCTAVO_ISA_avx512) || defined(OCTAVO_ISA_avx512_bf16)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return __builtin_convertvector((I32)_mm512_maskz_cvtepu8_epi32(0xffff, bytes), F32);
#elif defined(OCTAVO_ISA_avx2)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return __builtin_convertvector((I32)_mm256_cvtepu8_epi32(bytes), F32);
#else
  F32 out;
  for (int i = 0; i < kLanes; ++i) out[i] = p[i];
  return out;
#endif
}

OCTAVO_INLINE Columns load_f32(const uint8_t* p) {
  return by_vector([&](int v) { return load(reinterpret_cast<const float*>(p) + v * kLanes); });
}
OCTAVO_INLINE Columns load_f16(const uint8_t* p) {
  return by_vector([&](int v) { return widen_f16(reinterpret_cast<const uint16_t*>(p) + v * kLanes); });
}
OCTAVO_INLINE Columns load_u8(const uint8_t* p) {
  return by_vector([&](int v) { return widen_u8(p + v * kLanes); });
}
OCTAVO_INLINE Columns spread(float x) {
  return by_vector([&](int) { return splat(x); });
}
OCTAVO_INLINE Columns multiply(const Columns& a, const Columns& b) {
  return by_vector([&](int v) { return a.value[v] * b.value[v]; });
}
OCTAVO_INLINE Columns add(const Columns& a, const Columns& b) {
  return by_vector([&](int v) { return a.value[v] + b.value[v]; });
}
OCTAVO_INLINE Columns subtract(const Columns& a, const Columns& b) {
  return by_vector([&](int v) { return a.value[v] - b.value[v]; });
}
template <int Rows>
OCTAVO_INLINE Columns as_float(const Dots<Rows>& dots, int row) {
  return by_vector([&](int v) { return __builtin_convertvector(dots.value[row][v], F32); });
}
OCTAVO_INLINE void to_floats(const Columns& x, float* out) {
  for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, x.value[v]);
}

}  // namespace octavo::OCTAVO_ISA
