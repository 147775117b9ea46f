// Exact dot products of codes by the instruction for them, in registers of 512 bits (AVX-512 VNNI) or 256 (AVX-VNNI).
#pragma once
#include "quant_dots.hpp"

namespace octavo::OCTAVO_ISA {

using CodeFor8bit = int8_t;

// Sums of 4 rows x 3 panels, in integers and in floats, fill 24 of 32 registers, and a broadcast serves three products. Of
// 16 registers the integer sums of 4 rows x 1 panel of two vectors take 8; those in floats then wait in the cache, for one
// addition each in a group.
#if defined(OCTAVO_AVX512)
constexpr int kPanelsAtOnce = 3;
#else
constexpr int kPanelsAtOnce = 1;
#endif
constexpr int streams_of(int) { return 1; }

OCTAVO_INLINE int32_t start_of_4bit(const int (&sums)[2]) { return -8 * (sums[0] + sums[1]); }

// Four products of an unsigned byte of codes and a signed one of x are added to each sum in 32 bits: no step can overflow.
OCTAVO_INLINE void add_quads(I32& sums, U32 codes, I32 x) {
#if defined(OCTAVO_AVX512)
  sums = (I32)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)x);
#else
  sums = (I32)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, (__m256i)x);
#endif
}

template <int Panels>
OCTAVO_INLINE I32 splat_quad(const int8_t* x) {
#if defined(OCTAVO_AVX512)
  if constexpr (Panels == 1) {  // the instruction's operand in memory
    int32_t word;
    std::memcpy(&word, x, 4);
    return word - I32{};
  }
#endif
  return (I32)splat_anew(reinterpret_cast<const float*>(x));
}

template <int Rows, int Panels>
OCTAVO_INLINE void add_products(const U32 (&codes)[Panels][kVectors], const int8_t* x, Dots<Rows> (&dots)[Panels]) {
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    const I32 quad = splat_quad<Panels>(x + 4 * r);
#pragma GCC unroll 3
    for (int p = 0; p < Panels; ++p)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) add_quads(dots[p].value[r][v], codes[p][v], quad);
  }
}

// All sums of a row start from start(row).
template <int Rows, int Panels, typename F>
OCTAVO_INLINE void start_dots(Dots<Rows> (&dots)[Panels], const F& start) {
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    const I32 value = start(r) - I32{};
#pragma GCC unroll 3
    for (int p = 0; p < Panels; ++p)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) dots[p].value[r][v] = value;
  }
}

// f(p, v, where the panel's vector is) for each vector of neighbouring panels.
template <int Panels, typename F>
OCTAVO_INLINE void for_vectors(const uint8_t* w, int64_t panel_bytes, const F& f) {
#pragma GCC unroll 3
  for (int p = 0; p < Panels; ++p)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) f(p, v, w + p * panel_bytes + 4 * kLanes * v);
}

template <int Rows, int Panels, FourBits Kind>
OCTAVO_INLINE void dots_4bit(const uint8_t* w, int64_t panel_bytes, const int8_t* x, const QuantGroup* groups,
                             Dots<Rows> (&dots)[Panels]) {
  constexpr int offset = Kind == FourBits::unsigned_ ? 0 : Kind == FourBits::e2m1 ? 16 : 8;
  start_dots(dots, [&](int r) { return groups[r].start_4bit * (offset / 8); });
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i, w += 64, x += 8 * Rows) {
    U32 even[Panels][kVectors], odd[Panels][kVectors];
    for_vectors<Panels>(w, panel_bytes, [&](int p, int v, const uint8_t* at) __attribute__((always_inline)) {
      even[p][v] = factors_of<Kind>(load_as<U32>(at) & 0x0f0f0f0fu);
    });
    add_products<Rows>(even, x, dots);
    for_vectors<Panels>(w, panel_bytes, [&](int p, int v, const uint8_t* at) __attribute__((always_inline)) {
      odd[p][v] = factors_of<Kind>(load_as<U32>(at) >> 4 & 0x0f0f0f0fu);
    });
    add_products<Rows>(odd, x + 4 * Rows, dots);
  }
}

template <int Rows, int Panels>
OCTAVO_INLINE void dots_8bit(const uint8_t* w, int64_t panel_bytes, const CodeFor8bit* x, const QuantGroup* groups,
                             Dots<Rows> (&dots)[Panels]) {
  start_dots(dots, [&](int r) { return groups[r].start_8bit; });
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i, w += 64, x += 4 * Rows) {
    U32 codes[Panels][kVectors];
    for_vectors<Panels>(w, panel_bytes, [&](int p, int v, const uint8_t* at) __attribute__((always_inline)) {
      codes[p][v] = load_as<U32>(at);
    });
    add_products<Rows>(codes, x, dots);
  }
}

}  // namespace octavo::OCTAVO_ISA
