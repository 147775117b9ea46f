// The kernels of adapters' low-rank products.
#include "lora.hpp"

#include "gemm.hpp"
#include "vec.hpp"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kVectors = kGroup / kLanes;  // of a group
constexpr int kCache = 2;                  // that is fetched into, for __builtin_prefetch: the second

// Rows are those that GemmTable::prepare makes.
#if defined(OCTAVO_BF16) || defined(OCTAVO_AMX)
constexpr bool kMultipliesPairs = true;
#else
constexpr bool kMultipliesPairs = false;
#endif

// Rows of x in a tile, at most: of shrink, whose sums are those of 8 rows of `down` for each, and of expand.
#if defined(OCTAVO_AVX512)
constexpr int kShrinkRows = 3, kExpandRows = 4;
constexpr int groups_of(int rows) { return rows == 1 ? 8 : 4; }
#elif defined(OCTAVO_AVX2)
constexpr int kShrinkRows = 1, kExpandRows = 4;
constexpr int groups_of(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#else
constexpr int kShrinkRows = 1, kExpandRows = 2;
constexpr int groups_of(int rows) { return rows == 1 ? 2 : 1; }
#endif

// ---- shrink -----------------------------------------------------------------------------------------------------

// Values of a line that are multiplied at once, and floats of x that they take.
template <Dtype dtype>
constexpr int values_at_once() {
  return dtype == Dtype::bf16 && kMultipliesPairs ? 2 * kLanes : kLanes;
}

template <Dtype dtype>
OCTAVO_INLINE F32 load_weights(const char* p) {
  if constexpr (dtype == Dtype::f32)
    return load(reinterpret_cast<const float*>(p));
  else if constexpr (kMultipliesPairs)
    return load_as<F32>(p);
  else
    return load(reinterpret_cast<const uint16_t*>(p));
}

template <Dtype dtype>
OCTAVO_INLINE void add_products(F32& sum, F32 weights, F32 x) {
#if defined(OCTAVO_BF16) || defined(OCTAVO_AMX)
  if constexpr (dtype == Dtype::bf16) {
    add_pair_products(sum, (U32)weights, (U32)x);
    return;
  }
#endif
  add_product(sum, weights, x);
}

// R rows of x times a block of C rows of `down`.
template <Dtype dtype, int R, int C>
void shrink_tile(const char* line, int64_t lines, const float* x, int64_t x_stride, float* out, int64_t out_stride) {
  constexpr int bytes = dtype == Dtype::bf16 ? 2 : 4, values = values_at_once<dtype>();
  F32 sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums[r][c] = F32{};
  for (; lines > 0; --lines, line += C * kLowRankLine) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) __builtin_prefetch(line + kLowRankAhead + c * kLowRankLine, 0, kCache);
#pragma GCC unroll 8
    for (int i = 0; i < kLowRankLine / bytes; i += values, x += kLanes) {
      F32 rows[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) rows[r] = load(x + r * x_stride);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const F32 weights = load_weights<dtype>(line + c * kLowRankLine + i * bytes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) add_products<dtype>(sums[r][c], weights, rows[r]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) out[r * out_stride + c] = sum(sums[r][c]);
}

template <Dtype dtype, int C>
void shrink_block(const char* block, int64_t lines, const float* x, int64_t x_stride, int64_t rows, float* out,
                  int64_t out_stride) {
  int64_t r = 0;
  if constexpr (kShrinkRows > 1)
    for (; r + kShrinkRows <= rows; r += kShrinkRows)
      shrink_tile<dtype, kShrinkRows, C>(block, lines, x + r * x_stride, x_stride, out + r * out_stride, out_stride);
  for (; r < rows; ++r)
    shrink_tile<dtype, 1, C>(block, lines, x + r * x_stride, x_stride, out + r * out_stride, out_stride);
}

template <Dtype dtype>
void shrink_part(const LowRankView& part, const float* x, int64_t x_stride, int64_t rows, float* out,
                 int64_t out_stride) {
  const int64_t row_bytes = part.lines * kLowRankLine;
  for (int64_t c = 0; c < part.rank;) {
    const int64_t left = part.rank - c;
    const char* block = part.down + c * row_bytes;
    if (left >= 8) {
      shrink_block<dtype, 8>(block, part.lines, x, x_stride, rows, out + c, out_stride);
      c += 8;
    } else if (left >= 4) {
      shrink_block<dtype, 4>(block, part.lines, x, x_stride, rows, out + c, out_stride);
      c += 4;
    } else if (left >= 2) {
      shrink_block<dtype, 2>(block, part.lines, x, x_stride, rows, out + c, out_stride);
      c += 2;
    } else {
      shrink_block<dtype, 1>(block, part.lines, x, x_stride, rows, out + c, out_stride);
      c += 1;
    }
  }
}

void shrink(const LowRankView& part, const float* x, int64_t x_stride, int64_t rows, float* out, int64_t out_stride) {
  if (part.dtype == Dtype::bf16)
    shrink_part<Dtype::bf16>(part, x, x_stride, rows, out, out_stride);
  else
    shrink_part<Dtype::f32>(part, x, x_stride, rows, out, out_stride);
}

// ---- expand -----------------------------------------------------------------------------------------------------

struct Expansion {
  const LowRankView& part;
  const float* x;
  int64_t x_stride;
  const int32_t* places;
  const float* add;
  int64_t add_stride;
  float* out;
  int64_t out_stride;
};

// The sums of R rows, from `row` on, in G groups of columns.
template <Dtype dtype, int R, int G>
OCTAVO_INLINE void accumulate(const Expansion& e, int64_t row, int64_t group, F32 (&sums)[R][G * kVectors]) {
  // Two of the rank for bfloat16.
  const int64_t steps = dtype == Dtype::bf16 ? e.part.padded_rank / 2 : e.part.padded_rank;
  const int64_t group_bytes = steps * 4 * kGroup;
  const char* line = e.part.up + group * group_bytes;
  const float* x = e.x + row * e.x_stride;
  for (int64_t step = 0; step < steps; ++step, line += 4 * kGroup) {
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) __builtin_prefetch(line + kLowRankAhead + g * group_bytes, 0, kCache);
#pragma GCC unroll 32
    for (int v = 0; v < G * kVectors; ++v) {
      const char* p = line + v / kVectors * group_bytes + v % kVectors * (4 * kLanes);
      if constexpr (dtype == Dtype::bf16 && !kMultipliesPairs) {
        const U32 pairs = load_as<U32>(p);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          add_product(sums[r][v], even_bf16(pairs), splat_anew(x + r * e.x_stride + 2 * step));
          add_product(sums[r][v], odd_bf16(pairs), splat_anew(x + r * e.x_stride + 2 * step + 1));
        }
      } else {
        const F32 weights = load_as<F32>(p);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) add_products<dtype>(sums[r][v], weights, splat_anew(x + r * e.x_stride + step));
      }
    }
  }
}

template <Dtype dtype, int R, int G>
void expand_tile(const Expansion& e, int64_t row, int64_t group) {
  F32 sums[R][G * kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 32
    for (int v = 0; v < G * kVectors; ++v) sums[r][v] = F32{};
  accumulate<dtype, R, G>(e, row, group, sums);
  const int64_t column = group * kGroup, left = e.part.outputs - column;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const int64_t place = e.places[row + r];
    float* out = e.out + place * e.out_stride + column;
    const float* add = e.add == nullptr ? nullptr : e.add + place * e.add_stride + column;
#pragma GCC unroll 32
    for (int v = 0; v < G * kVectors; ++v) {
      const int at = v * kLanes;
      if (at + kLanes <= left) {
        store(out + at, add == nullptr ? sums[r][v] : load(add + at) + sums[r][v]);
      } else if (at < left) {
        const int lanes = static_cast<int>(left - at);
        store(out + at, add == nullptr ? sums[r][v] : load(add + at, lanes) + sums[r][v], lanes);
      }
    }
  }
}

template <Dtype dtype, int R>
void expand_rows(const Expansion& e, int64_t row, int64_t group_begin, int64_t group_end) {
  constexpr int G = groups_of(R);
  int64_t group = group_begin;
  for (; group + G <= group_end; group += G) expand_tile<dtype, R, G>(e, row, group);
  if constexpr (G > 1)
    for (; group < group_end; ++group) expand_tile<dtype, R, 1>(e, row, group);
}

template <Dtype dtype>
void expand_part(const Expansion& e, int64_t rows, int64_t group_begin, int64_t group_end) {
  int64_t row = 0;
  for (; row + kExpandRows <= rows; row += kExpandRows) expand_rows<dtype, kExpandRows>(e, row, group_begin, group_end);
  if constexpr (kExpandRows > 2)
    for (; row + 2 <= rows; row += 2) expand_rows<dtype, 2>(e, row, group_begin, group_end);
  for (; row < rows; ++row) expand_rows<dtype, 1>(e, row, group_begin, group_end);
}

void expand(const LowRankView& part, const float* x, int64_t x_stride, const int32_t* places, int64_t rows,
            int64_t group_begin, int64_t group_end, const float* add, int64_t add_stride, float* out,
            int64_t out_stride) {
  const Expansion e{part, x, x_stride, places, add, add_stride, out, out_stride};
  if (part.dtype == Dtype::bf16)
    expand_part<Dtype::bf16>(e, rows, group_begin, group_end);
  else
    expand_part<Dtype::f32>(e, rows, group_begin, group_end);
}

}  // namespace

const LoraTable* lora_table() {
  static const LoraTable table{shrink, expand};
  return &table;
}

}  // namespace octavo::OCTAVO_ISA
