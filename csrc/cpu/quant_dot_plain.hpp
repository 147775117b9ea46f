// Exact dot products of codes in plain C++, for any processor.
#pragma once
#include "quant_dots.hpp"

namespace octavo::OCTAVO_ISA {

using CodeFor8bit = int8_t;
constexpr int kPanelsAtOnce = 1;
constexpr int streams_of(int) { return 1; }

OCTAVO_INLINE int32_t start_of_4bit(const int (&sums)[2]) { return -8 * (sums[0] + sums[1]); }

template <int Rows, int Panels, FourBits Kind>
OCTAVO_INLINE void dots_4bit(const uint8_t* w, int64_t, const int8_t* x, const QuantGroup* groups,
                             Dots<Rows> (&dots)[Panels]) {
  static_assert(Panels == 1);
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < kPanel; ++c) {
      int32_t sum = Kind == FourBits::offset_8 ? groups[r].start_4bit : 0;
      for (int i = 0; i < 16; ++i) {
        const uint8_t codes = w[i / 4 * 64 + c * 4 + i % 4];
        const int8_t* pair = x + i / 4 * 8 * Rows + 4 * r + i % 4;
        if constexpr (Kind == FourBits::e2m1)
          sum += kTwiceE2m1[codes & 15] * pair[0] + kTwiceE2m1[codes >> 4] * pair[4 * Rows];
        else
          sum += (codes & 15) * pair[0] + (codes >> 4) * pair[4 * Rows];
      }
      dots[0].value[r][c / kLanes][c % kLanes] = sum;
    }
  }
}

template <int Rows, int Panels>
OCTAVO_INLINE void dots_8bit(const uint8_t* w, int64_t, const CodeFor8bit* x, const QuantGroup* groups,
                             Dots<Rows> (&dots)[Panels]) {
  static_assert(Panels == 1);
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < kPanel; ++c) {
      int32_t sum = groups[r].start_8bit;
      for (int i = 0; i < kQuantGroup; ++i) {
        sum += w[i / 4 * 64 + c * 4 + i % 4] * x[i / 4 * 4 * Rows + 4 * r + i % 4];
      }
      dots[0].value[r][c / kLanes][c % kLanes] = sum;
    }
  }
}

}  // namespace octavo::OCTAVO_ISA
