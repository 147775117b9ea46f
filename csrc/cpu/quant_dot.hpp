// Exact integer dot products of a tile of rows and a panel's 16 columns, over one group of 32 values.
//
// All codes are multiplied as numbers of 4 bits without sign, as 8 x 8 bit products would overflow the 16 bits that
// their pair sums have: 16 products of 15 * 127 fit. An 8-bit code is 16 * (high half - 8) + low half. The offset 8 is
// taken off by starting from -8 times the sum of the row's codes: no step overflows, as each product with its share of
// the start is at most 8 * 127.
#pragma once
#include "half.hpp"
#include "quant.hpp"
#include "vec.hpp"

namespace octavo::OCTAVO_ISA {

#if defined(__AVX2__)

using I256 = __m256i;

// For each row, columns 0 to 7 and columns 8 to 15.
template <int Rows>
struct Dots {
  I256 value[Rows][2];
};

OCTAVO_INLINE I256 load_codes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const I256*>(p)); }
OCTAVO_INLINE I256 low_halves(I256 codes) { return _mm256_and_si256(codes, _mm256_set1_epi8(15)); }
OCTAVO_INLINE I256 high_halves(I256 codes) { return low_halves(_mm256_srli_epi16(codes, 4)); }
OCTAVO_INLINE I256 quad_of(const int8_t* x) {
  int32_t quad;
  std::memcpy(&quad, x, 4);
  return _mm256_set1_epi32(quad);
}
OCTAVO_INLINE I256 add_products(I256 sum, I256 codes, I256 x) {
  sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x));
  // Hides the sum from the compiler, which would add all products pairwise and have no registers left to hold them.
  asm("" : "+x"(sum));
  return sum;
}
OCTAVO_INLINE I256 sum_pairs(I256 sums, int16_t factor) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(factor)); }

// 4-bit codes; Offset: they stand for code - 8. w: the group's codes; x: its quads of row 0; groups: that of row 0.
template <int Rows, bool Offset>
OCTAVO_INLINE void dot_4bit(const uint8_t* w, const int8_t* x, const QuantGroup* groups, Dots<Rows>& dots) {
  I256 sums[Rows][2];
  for (int r = 0; r < Rows; ++r) sums[r][0] = sums[r][1] = _mm256_set1_epi32(Offset ? groups[r].pairs : 0);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i, w += 64, x += 8 * kQuantTile) {
    const I256 left = load_codes(w), right = load_codes(w + 32);
    const I256 even[2] = {low_halves(left), low_halves(right)};
    const I256 odd[2] = {high_halves(left), high_halves(right)};
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const I256 x_even = quad_of(x + 4 * r), x_odd = quad_of(x + 4 * kQuantTile + 4 * r);
      for (int half = 0; half < 2; ++half) {
        sums[r][half] = add_products(sums[r][half], even[half], x_even);
        sums[r][half] = add_products(sums[r][half], odd[half], x_odd);
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int half = 0; half < 2; ++half) dots.value[r][half] = sum_pairs(sums[r][half], 1);
  }
}

template <int Rows>
OCTAVO_INLINE void dot_8bit(const uint8_t* w, const int8_t* x, const QuantGroup* groups, Dots<Rows>& dots) {
  // One half of the columns after the other: both would need more registers than there are.
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    I256 low[Rows], high[Rows];
    for (int r = 0; r < Rows; ++r) {
      low[r] = _mm256_setzero_si256();
      high[r] = _mm256_set1_epi32(groups[r].pairs);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const I256 codes = load_codes(w + 64 * i + 32 * half);
      const I256 low_codes = low_halves(codes), high_codes = high_halves(codes);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const I256 quad = quad_of(x + 4 * kQuantTile * i + 4 * r);
        low[r] = add_products(low[r], low_codes, quad);
        high[r] = add_products(high[r], high_codes, quad);
      }
    }
    for (int r = 0; r < Rows; ++r) {
      dots.value[r][half] = _mm256_add_epi32(sum_pairs(low[r], 1), sum_pairs(high[r], 16));
    }
    // Makes the second half read the row's codes again, rather than keep them all on the stack.
    asm volatile("" ::: "memory");
  }
}

// The 16 floats of a scale or a minimum.
struct Columns {
  __m256 value[2];
};
OCTAVO_INLINE Columns load_f32(const uint8_t* p) {
  const float* f = reinterpret_cast<const float*>(p);
  return {{_mm256_loadu_ps(f), _mm256_loadu_ps(f + 8)}};
}
OCTAVO_INLINE Columns load_f16(const uint8_t* p) {
  const __m128i* h = reinterpret_cast<const __m128i*>(p);
  return {{_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))}};
}
OCTAVO_INLINE Columns load_u8(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {{_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
           _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))}};
}
OCTAVO_INLINE Columns multiply(const Columns& a, const Columns& b) {
  return {{_mm256_mul_ps(a.value[0], b.value[0]), _mm256_mul_ps(a.value[1], b.value[1])}};
}
OCTAVO_INLINE Columns spread(float x) { return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }
OCTAVO_INLINE Columns add(const Columns& a, const Columns& b) {
  return {{_mm256_add_ps(a.value[0], b.value[0]), _mm256_add_ps(a.value[1], b.value[1])}};
}
OCTAVO_INLINE Columns subtract(const Columns& a, const Columns& b) {
  return {{_mm256_sub_ps(a.value[0], b.value[0]), _mm256_sub_ps(a.value[1], b.value[1])}};
}
template <int Rows>
OCTAVO_INLINE Columns as_float(const Dots<Rows>& dots, int row) {
  return {{_mm256_cvtepi32_ps(dots.value[row][0]), _mm256_cvtepi32_ps(dots.value[row][1])}};
}
OCTAVO_INLINE void to_floats(const Columns& x, float* out) {
  _mm256_storeu_ps(out, x.value[0]);
  _mm256_storeu_ps(out + 8, x.value[1]);
}

#else

template <int Rows>
struct Dots {
  int32_t value[Rows][kPanel];
};

// -8 times the sum of the group's codes.
OCTAVO_INLINE int32_t offset_of(const QuantGroup& group) {
  return static_cast<int16_t>(group.pairs & 0xffff) + (group.pairs >> 16);
}

template <int Rows, bool Offset>
OCTAVO_INLINE void dot_4bit(const uint8_t* w, const int8_t* x, const QuantGroup* groups, Dots<Rows>& dots) {
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < kPanel; ++c) {
      int32_t sum = Offset ? offset_of(groups[r]) : 0;
      for (int i = 0; i < 16; ++i) {
        const uint8_t codes = w[i / 4 * 64 + c * 4 + i % 4];
        const int8_t* pair = x + i / 4 * 8 * kQuantTile + 4 * r + i % 4;
        sum += (codes & 15) * pair[0] + (codes >> 4) * pair[4 * kQuantTile];
      }
      dots.value[r][c] = sum;
    }
  }
}

template <int Rows>
OCTAVO_INLINE void dot_8bit(const uint8_t* w, const int8_t* x, const QuantGroup* groups, Dots<Rows>& dots) {
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < kPanel; ++c) {
      int32_t sum = 16 * offset_of(groups[r]);
      for (int i = 0; i < kQuantGroup; ++i) {
        sum += w[i / 4 * 64 + c * 4 + i % 4] * x[i / 4 * 4 * kQuantTile + 4 * r + i % 4];
      }
      dots.value[r][c] = sum;
    }
  }
}

struct Columns {
  float value[kPanel];
};

OCTAVO_INLINE Columns load_f32(const uint8_t* p) {
  Columns out;
  std::memcpy(out.value, p, sizeof out.value);
  return out;
}
OCTAVO_INLINE Columns load_f16(const uint8_t* p) {
  uint16_t halves[kPanel];
  std::memcpy(halves, p, sizeof halves);
  Columns out;
  for (int c = 0; c < kPanel; ++c) out.value[c] = from_f16(halves[c]);
  return out;
}
OCTAVO_INLINE Columns load_u8(const uint8_t* p) {
  Columns out;
  for (int c = 0; c < kPanel; ++c) out.value[c] = p[c];
  return out;
}
OCTAVO_INLINE Columns multiply(const Columns& a, const Columns& b) {
  Columns out;
  for (int c = 0; c < kPanel; ++c) out.value[c] = a.value[c] * b.value[c];
  return out;
}
OCTAVO_INLINE Columns spread(float x) {
  Columns out;
  for (int c = 0; c < kPanel; ++c) out.value[c] = x;
  return out;
}
OCTAVO_INLINE Columns add(const Columns& a, const Columns& b) {
  Columns out;
  for (int c = 0; c < kPanel; ++c) out.value[c] = a.value[c] + b.value[c];
  return out;
}
OCTAVO_INLINE Columns subtract(const Columns& a, const Columns& b) {
  Columns out;
  for (int c = 0; c < kPanel; ++c) out.value[c] = a.value[c] - b.value[c];
  return out;
}
template <int Rows>
OCTAVO_INLINE Columns as_float(const Dots<Rows>& dots, int row) {
  Columns out;
  for (int c = 0; c < kPanel; ++c) out.value[c] = static_cast<float>(dots.value[row][c]);
  return out;
}
OCTAVO_INLINE void to_floats(const Columns& x, float* out) { std::memcpy(out, x.value, sizeof x.value); }

#endif

}  // namespace octavo::OCTAVO_ISA
