// Exact dot products of codes by the multiplications of AVX2 and AVX-512BW, in sums of 16 and 32 bits.
//
// Codes of 4 bits are multiplied in 8 bits and summed in 16: 16 products of at most 15 * 127 fit. The offset 8 is taken
// off by starting from -8 times the sum of the row's codes: no step overflows, as each product with its share of the
// start is at most 8 * 127, of e2m1 12 * 127. Codes of 8 bits would overflow such sums. They are multiplied in 16 bits, bytes at even
// places and at odd ones apart, and summed in 32.
#pragma once
#include "quant_dots.hpp"

namespace octavo::OCTAVO_ISA {

using CodeFor8bit = int16_t;
constexpr int kPanelsAtOnce = 1;
// Panels that are read side by side by fewer rows than a tile. Measured on a Zen 3, with panels out of all caches: products
// of one row take 0.8 of the time that they take with one panel after the other, of two 0.72 (int8) and 0.87 (int4), of
// three 0.86 and 0.94; four gain nothing.
#if defined(OCTAVO_AVX2)
constexpr int streams_of(int rows) { return rows == 1 ? 3 : 2; }
#else
constexpr int streams_of(int) { return 1; }
#endif

OCTAVO_INLINE int32_t start_of_4bit(const int (&sums)[2]) {
  const uint16_t first = static_cast<uint16_t>(-8 * sums[0]), second = static_cast<uint16_t>(-8 * sums[1]);
  return static_cast<int32_t>(uint32_t{second} << 16 | first);
}

typedef uint16_t Halves __attribute__((vector_size(4 * kLanes), may_alias));  // two of 16 bits for each column

OCTAVO_INLINE U32 low_nibbles(U32 codes) { return codes & 0x0f0f0f0fu; }
OCTAVO_INLINE U32 high_nibbles(U32 codes) { return low_nibbles(codes >> 4); }
OCTAVO_INLINE U32 quad_of(const int8_t* x) {
  uint32_t quad;
  std::memcpy(&quad, x, 4);
  return splat(quad);
}
OCTAVO_INLINE Halves add_products(Halves sums, U32 codes, U32 x) {
#if defined(OCTAVO_AVX2)
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
#if defined(OCTAVO_AVX2)
  return (I32)_mm256_madd_epi16((__m256i)sums, (__m256i)(1 - Halves{}));
#else
  return (I32)_mm512_madd_epi16((__m512i)sums, (__m512i)(1 - Halves{}));
#endif
}

template <int Rows, int Panels, FourBits Kind>
OCTAVO_INLINE void dots_4bit(const uint8_t* w, int64_t panel_bytes, const int8_t* x, const QuantGroup* groups,
                             Dots<Rows> (&dots)[Panels]) {
  Halves sums[Panels][Rows][kVectors];
  for (auto& of_panel : sums)
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < kVectors; ++v) {
        const auto start = (Halves)splat(static_cast<uint32_t>(Kind == FourBits::unsigned_ ? 0 : groups[r].start_4bit));
        of_panel[r][v] = Kind == FourBits::e2m1 ? start + start : start;
      }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i, w += 64, x += 8 * Rows) {
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
      U32 even[kVectors], odd[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const U32 codes = load_as<U32>(w + p * panel_bytes + 4 * kLanes * v);
        even[v] = factors_of<Kind>(low_nibbles(codes));
        odd[v] = factors_of<Kind>(high_nibbles(codes));
      }
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const U32 x_even = quad_of(x + 4 * r), x_odd = quad_of(x + 4 * Rows + 4 * r);
        for (int v = 0; v < kVectors; ++v) {
          sums[p][r][v] = add_products(sums[p][r][v], even[v], x_even);
          sums[p][r][v] = add_products(sums[p][r][v], odd[v], x_odd);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < Panels; ++p)
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < kVectors; ++v) dots[p].value[r][v] = sum_pairs(sums[p][r][v]);
}

OCTAVO_INLINE void add_wide_products(I32& sums, U32 codes, F32 x) {
#if defined(OCTAVO_AVX2)
  sums += (I32)_mm256_madd_epi16((__m256i)codes, (__m256i)x);
#else
  sums += (I32)_mm512_madd_epi16((__m512i)codes, (__m512i)x);
#endif
#if !defined(OCTAVO_EMULATED)
  asm("" : "+v"(sums));  // as above
#endif
}

template <int Rows, int Panels>
OCTAVO_INLINE void dots_8bit(const uint8_t* w, int64_t panel_bytes, const CodeFor8bit* x, const QuantGroup* groups,
                             Dots<Rows> (&dots)[Panels]) {
#pragma GCC unroll 4
  for (int p = 0; p < Panels; ++p)
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < kVectors; ++v) dots[p].value[r][v] = groups[r].start_8bit - I32{};
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
      U32 even[kVectors], odd[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const U32 codes = load_as<U32>(w + p * panel_bytes + 64 * i + 4 * kLanes * v);
        even[v] = codes & 0x00ff00ffu;
        odd[v] = (U32)((Halves)codes >> 8);
      }
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const auto* pairs = reinterpret_cast<const float*>(x + 4 * (Rows * i + r));
        const F32 x_even = splat_anew(pairs);
        for (int v = 0; v < kVectors; ++v) add_wide_products(dots[p].value[r][v], even[v], x_even);
        const F32 x_odd = splat_anew(pairs + 1);
        for (int v = 0; v < kVectors; ++v) add_wide_products(dots[p].value[r][v], odd[v], x_odd);
      }
    }
  }
}

}  // namespace octavo::OCTAVO_ISA
