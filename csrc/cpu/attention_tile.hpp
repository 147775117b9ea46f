// The register tile of attention: rows of float32, or of pairs of bfloat16, times a panel of cached keys or values, for
// all types of cache.
#pragma once
#include <type_traits>

#include "attention.hpp"
#include "vec.hpp"

namespace octavo::OCTAVO_ISA {

namespace {

constexpr int kVectors = kPanel / kLanes;  // of 16 columns
// Sums that a tile keeps in registers, and rows that it may have.
constexpr int kSums = kLanes == 16 ? 24 : kLanes == 8 ? 12 : 8;
constexpr int kTileRows = kSums / kVectors < 12 ? kSums / kVectors : 12;

// How the pairs of a panel lie; see attention.hpp. `half` chooses the first or second of each pair.
// Prefetches go to the L2 cache: L1 has too few outstanding misses to saturate the memory.
template <typename T>
struct Pairs {
  static constexpr int64_t kColumn = 1;  // from one column to the next
  static OCTAVO_INLINE F32 widen(const T* columns, int64_t pair_stride, int half) {
    return widen_plane(columns + half * (pair_stride / 2));
  }
  static OCTAVO_INLINE void prefetch(const T* columns, int64_t pair_stride) {
    __builtin_prefetch(columns, 0, 2);
    __builtin_prefetch(columns + pair_stride / 2, 0, 2);
  }
  // Pairs of bfloat16, exact: 8 bits hold an int8, so the low half of its float32 is zero.
  static OCTAVO_INLINE U32 words(const T* columns, int64_t pair_stride) {
    return (U32)widen_plane(columns) >> 16 | (U32)widen_plane(columns + pair_stride / 2);
  }
  static OCTAVO_INLINE F32 widen_plane(const float* p) { return load(p); }
  static OCTAVO_INLINE F32 widen_plane(const int8_t* p) {  // GCC 12 makes many small steps of a conversion
#if defined(OCTAVO_AVX512)
    const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return __builtin_convertvector((I32)_mm512_maskz_cvtepi8_epi32(0xffff, narrow), F32);
#elif defined(OCTAVO_AVX2)
    const __m128i narrow = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return (F32)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(narrow));
#else
    typedef int8_t I8 __attribute__((vector_size(kLanes), may_alias));
    return __builtin_convertvector(__builtin_convertvector(load_as<I8>(p), I32), F32);
#endif
  }
};

template <>
struct Pairs<uint16_t> {
  static constexpr int64_t kColumn = 2;
  static OCTAVO_INLINE F32 widen(const uint16_t* columns, int64_t, int half) {
    return half ? load_odd_bf16(columns) : even_bf16(load_as<U32>(columns));
  }
  static OCTAVO_INLINE void prefetch(const uint16_t* columns, int64_t) { __builtin_prefetch(columns, 0, 2); }
  static OCTAVO_INLINE U32 words(const uint16_t* columns, int64_t) { return load_as<U32>(columns); }
};

// What the rows are:
//   floats        float32
//   pairs         words of two bfloat16
//   scaled_pairs  the same, and the sums are multiplied by a factor
enum class Operand { floats, pairs, scaled_pairs };

constexpr int kSegments = 4;

// The operands of a tile: sums[r][column] = start[r][column] + sum over pairs k and halves h of rows[r][2 k + h] *
// panel[k][column][h].
template <typename T>
struct Product {
  const float* rows;
  int64_t row_stride;
  // Segments, one or more, follow each other in the sums, each of so many pairs, one or more. Of each there are one or
  // two panels of 16 columns (those of the second may be null), and what to fetch into the cache meanwhile: panels of
  // the same kind.
  int segments;
  const T* panels[2][kSegments];
  const T* ahead[2][kSegments];
  int64_t pair_stride;
  int64_t pairs;
  float* sums;
  int64_t sum_stride;
  const float* start;
  int64_t start_stride;
  float factor = 1.0f;
};

// A row of zeros to start from, with a stride of 0.
alignas(64) constexpr float kZeros[2 * kPanel] = {};

// Adds a pair of a panel times the rows to their sums, of which those of the panel begin at `column`.
template <typename T, int kRows, int kColumns>
OCTAVO_INLINE void add_pair(F32 (&sums)[kRows][kColumns], int column, const T* pair, int64_t pair_stride,
                            const float* rows, int64_t row_stride) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    F32 y[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      y[v] = Pairs<T>::widen(pair + v * kLanes * Pairs<T>::kColumn, pair_stride, half);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const F32 x = splat_anew(rows + r * row_stride + half);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) add_product(sums[r][column + v], x, y[v]);
    }
  }
}

#if defined(OCTAVO_BF16)
// The same with words of the rows: of the first panel and the second, if there is one.
template <typename T, int kRows, int kPanels>
OCTAVO_INLINE void add_words(F32 (&sums)[kRows][kPanels], const T* first, const T* second, int64_t pair_stride,
                             const float* rows, int64_t row_stride) {
  const U32 y = Pairs<T>::words(first, pair_stride);
  const U32 z = kPanels > 1 ? Pairs<T>::words(second, pair_stride) : y;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const U32 x = (U32)splat_anew(rows + r * row_stride);
    add_pair_products(sums[r][0], y, x);
    if constexpr (kPanels > 1) add_pair_products(sums[r][1], z, x);
  }
}
#endif

#if defined(OCTAVO_AVX2)
// As add_pair for three rows, in assembly with fixed registers: GCC runs out of registers, reloads the mask each time and
// moves sums. The compiler does not know which memory is read, but none is written meanwhile.
OCTAVO_INLINE void add_pair_to_three(F32& a0, F32& a1, F32& b0, F32& b1, F32& c0, F32& c1, const uint16_t* pair,
                                     const float* rows, int64_t row_bytes, F32 mask) {
  F32 x, y0, y1;
  asm volatile(
      "vmovdqu (%[pair]), %[y0]\n\t"
      "vmovdqu 32(%[pair]), %[y1]\n\t"
      "vpslld $16, %[y0], %[y0]\n\t"
      "vpslld $16, %[y1], %[y1]\n\t"
      "vbroadcastss (%[rows]), %[x]\n\t"
      "vfmadd231ps %[y0], %[x], %[a0]\n\t"
      "vfmadd231ps %[y1], %[x], %[a1]\n\t"
      "vbroadcastss (%[rows],%[step]), %[x]\n\t"
      "vfmadd231ps %[y0], %[x], %[b0]\n\t"
      "vfmadd231ps %[y1], %[x], %[b1]\n\t"
      "vbroadcastss (%[rows],%[step],2), %[x]\n\t"
      "vfmadd231ps %[y0], %[x], %[c0]\n\t"
      "vfmadd231ps %[y1], %[x], %[c1]\n\t"
      "vpand (%[pair]), %[mask], %[y0]\n\t"
      "vpand 32(%[pair]), %[mask], %[y1]\n\t"
      "vbroadcastss 4(%[rows]), %[x]\n\t"
      "vfmadd231ps %[y0], %[x], %[a0]\n\t"
      "vfmadd231ps %[y1], %[x], %[a1]\n\t"
      "vbroadcastss 4(%[rows],%[step]), %[x]\n\t"
      "vfmadd231ps %[y0], %[x], %[b0]\n\t"
      "vfmadd231ps %[y1], %[x], %[b1]\n\t"
      "vbroadcastss 4(%[rows],%[step],2), %[x]\n\t"
      "vfmadd231ps %[y0], %[x], %[c0]\n\t"
      "vfmadd231ps %[y1], %[x], %[c1]"
      : [a0] "+x"(a0), [a1] "+x"(a1), [b0] "+x"(b0), [b1] "+x"(b1), [c0] "+x"(c0), [c1] "+x"(c1), [x] "=&x"(x),
        [y0] "=&x"(y0), [y1] "=&x"(y1)
      : [pair] "r"(pair), [rows] "r"(rows), [step] "r"(row_bytes), [mask] "x"(mask));
}
#endif

template <Operand operand, typename T, int kRows, int kPanels>
__attribute__((noinline)) void multiply_tile(const Product<T>& p) {
  constexpr int kColumns = kPanels * kVectors;
  F32 sums[kRows][kColumns];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) sums[r][c] = load(p.start + r * p.start_stride + c * kLanes);
#if defined(OCTAVO_AVX2)
  [[maybe_unused]] const F32 mask = load_as<F32>(kOddMask);
#endif
  const float* rows = p.rows;
  const int64_t row_stride = p.row_stride, pair_stride = p.pair_stride;
  int segment = 0;
  do {
    const T *first = p.panels[0][segment], *second = p.panels[kPanels - 1][segment];
    const T *ahead = p.ahead[0][segment], *second_ahead = p.ahead[kPanels - 1][segment];
    int64_t pairs = p.pairs;
    do {
      Pairs<T>::prefetch(ahead, pair_stride);
      if (kPanels > 1) Pairs<T>::prefetch(second_ahead, pair_stride);
#if defined(OCTAVO_BF16)
      if constexpr (operand != Operand::floats) add_words(sums, first, second, pair_stride, rows, row_stride);
#endif
#pragma GCC unroll 2
      for (int i = 0; operand == Operand::floats && i < kPanels; ++i) {
        const T* pair = i ? second : first;
        const int c = i * kVectors;
#if defined(OCTAVO_AVX2)
        if constexpr (std::is_same_v<T, uint16_t> && kRows == 3) {
          add_pair_to_three(sums[0][c], sums[0][c + 1], sums[1][c], sums[1][c + 1], sums[2][c], sums[2][c + 1], pair,
                            rows, 4 * row_stride, mask);
          continue;
        }
#endif
        add_pair(sums, c, pair, pair_stride, rows, row_stride);
      }
      rows += operand == Operand::floats ? 2 : 1;
      first += pair_stride;
      second += pair_stride;
      ahead += pair_stride;
      second_ahead += pair_stride;
    } while (--pairs > 0);
  } while (++segment < p.segments);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c)
      store(p.sums + r * p.sum_stride + c * kLanes, operand == Operand::scaled_pairs ? sums[r][c] * p.factor : sums[r][c]);
}

template <Operand operand, typename T, int kPanels, int kRows>
void multiply_exactly(const Product<T>& p, int rows) {
  if (rows == kRows)
    multiply_tile<operand, T, kRows, kPanels>(p);
  else if constexpr (kRows > 1)
    multiply_exactly<operand, T, kPanels, kRows - 1>(p, rows);
}

// Largest number of rows with sums of two panels in registers.
constexpr int kRowsOfTwoPanels = kSums / (2 * kVectors);

// Rows shared out evenly over tiles.
template <Operand operand, typename T>
__attribute__((noinline)) void multiply_tiles(Product<T>& p, int64_t rows) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  const float* first_row = p.rows;
  const float* first_start = p.start;
  float* first_sum = p.sums;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t begin = rows * i / tiles;
    const int count = static_cast<int>(rows * (i + 1) / tiles - begin);
    p.rows = first_row + begin * p.row_stride;
    p.sums = first_sum + begin * p.sum_stride;
    p.start = first_start + begin * p.start_stride;
    if (p.panels[1][0] && count <= kRowsOfTwoPanels) {
      multiply_exactly<operand, T, 2, kRowsOfTwoPanels < kTileRows ? kRowsOfTwoPanels : kTileRows>(p, count);
      continue;
    }
    multiply_exactly<operand, T, 1, kTileRows>(p, count);
    if (!p.panels[1][0]) continue;
    Product<T> second = p;
    for (int s = 0; s < p.segments; ++s) {
      second.panels[0][s] = p.panels[1][s];
      second.ahead[0][s] = p.ahead[1][s];
    }
    second.sums += kPanel;
    second.start += kPanel;
    multiply_exactly<operand, T, 1, kTileRows>(second, count);
  }
}

// Any number of rows. Changes rows, sums and start of `p`: a copy would stall, as its wide loads would follow narrow
// stores.
template <Operand operand, typename T>
OCTAVO_INLINE void multiply(Product<T>& p, int64_t rows) {
  if (p.panels[1][0] && rows <= kRowsOfTwoPanels)
    multiply_exactly<operand, T, 2, kRowsOfTwoPanels < kTileRows ? kRowsOfTwoPanels : kTileRows>(p, static_cast<int>(rows));
  else
    multiply_tiles<operand>(p, rows);
}

// One token of a panel of values, its first `width` numbers, for the end of a range that is not a whole number of pairs.
template <typename T>
void add_token(const float* weights, int64_t weight_stride, int64_t rows, const T* panel, int64_t token, int64_t padded,
               int64_t width, float* sums, int64_t sum_stride) {
  const T* pair = panel + token / 2 * 2 * padded;
  for (int64_t c = 0; c < width; c += kLanes) {
    const F32 y = Pairs<T>::widen(pair + c * Pairs<T>::kColumn, 2 * padded, token % 2);
    for (int64_t r = 0; r < rows; ++r) {
      float* sum = sums + r * sum_stride + c;
      store(sum, fma(splat(weights[r * weight_stride + token]), y, load(sum)));
    }
  }
}

#if defined(OCTAVO_BF16)
// The same with words of the weights of the panel's tokens. The other token of the pair counts as zero, weight and value:
// what is in its slot may be anything.
template <typename T>
void add_token_of_pair(const float* weights, int64_t weight_stride, int64_t rows, const T* panel, int64_t token,
                       int64_t padded, int64_t width, float* sums, int64_t sum_stride) {
  const uint32_t mask = token % 2 ? 0xffff0000u : 0x0000ffffu;
  const T* pair = panel + token / 2 * 2 * padded;
  for (int64_t c = 0; c < width; c += kLanes) {
    const U32 y = Pairs<T>::words(pair + c * Pairs<T>::kColumn, 2 * padded) & mask;
    for (int64_t r = 0; r < rows; ++r) {
      const float* word = weights + r * weight_stride + token / 2;
      float* at = sums + r * sum_stride + c;
      F32 sum = load(at);
      add_pair_products(sum, y, (U32)splat_anew(word) & mask);
      store(at, sum);
    }
  }
}
#endif

#if defined(OCTAVO_BF16) || defined(OCTAVO_AMX)
OCTAVO_INLINE F32 rounded(F32 x) { return widen_bf16(narrow_bf16(x)); }

// 16 elements as words of two bfloat16 each.
OCTAVO_INLINE void store_words(float* words, F32 x) {
  const U16 narrow = narrow_bf16(x);
  std::memcpy(words, &narrow, sizeof narrow);
}
#else
// Never called: only with that instruction set are products those of pairs.
[[maybe_unused]] F32 rounded(F32 x) { return x; }
[[maybe_unused]] void store_words(float* words, F32 x) { store(words, x); }
#endif

}  // namespace

}  // namespace octavo::OCTAVO_ISA
