// What the dot products of quant_dot.hpp give, and how they are called.
//
// Each of the files that quant_dot.hpp chooses from has:
//   CodeFor8bit          of rows that are multiplied with codes of 8 bits
//   kPanelsAtOnce        panels that are computed side by side for many rows
//   streams_of(rows)     and for fewer rows than a tile: streams of weights that are read side by side
//   start_of_4bit(sums)  QuantGroup::start_4bit, from the sums of codes 0 and 1 and of codes 2 and 3 of all quads
//   dots_4bit<Rows, Panels, Kind>, dots_8bit<Rows, Panels>(w, panel_bytes, x, groups, dots)
//     w: a group's codes in the first panel, the next panel so many bytes further; x: its quads of row 0; groups: that of
//     row 0. Codes of 4 bits stand for what FourBits Kind says, e2m1 for twice its values; those of 8 bits have 128 added.
#pragma once
#include "quant.hpp"
#include "vec.hpp"

namespace octavo::OCTAVO_ISA {

constexpr int kVectors = kPanel / kLanes;  // of the 16 columns

// For each row, the columns' sums.
template <int Rows>
struct Dots {
  I32 value[Rows][kVectors];
};

#if defined(OCTAVO_AVX2) || defined(OCTAVO_AVX512)
// Low nibbles of bytes as factors without a sign: e2m1 as twice its values plus 16, which start from twice as much as
// codes with an offset of 8.
template <FourBits Kind>
OCTAVO_INLINE U32 factors_of(U32 nibbles) {
  if constexpr (Kind != FourBits::e2m1) return nibbles;
#define OCTAVO_FACTORS 16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4
  alignas(64) static constexpr uint8_t table[] = {OCTAVO_FACTORS, OCTAVO_FACTORS, OCTAVO_FACTORS, OCTAVO_FACTORS};
#undef OCTAVO_FACTORS
#if defined(OCTAVO_AVX512)
  return (U32)_mm512_shuffle_epi8((__m512i)load_as<U32>(table), (__m512i)nibbles);
#else
  return (U32)_mm256_shuffle_epi8((__m256i)load_as<U32>(table), (__m256i)nibbles);
#endif
}
#endif

}  // namespace octavo::OCTAVO_ISA
