// Scores and weighted values by the tiles of AMX, for queries and a cache of bfloat16.
//
// A score is, for each step of 32 dimensions in order, c += even + odd; an element of the result the same for each panel of
// 16 tokens, of which a token that the row does not see counts as zero, weight and value. See amx_blocks.hpp. Up to two rows
// are computed by vectors to the same bits.
#pragma once
#include <cstring>

#include "amx_blocks.hpp"
#include "attention.hpp"

namespace octavo::OCTAVO_ISA {

namespace {

// Rows that are computed together.
constexpr int64_t kMostTileRows = 2 * kRowsOfTile;

// The rows of a call in one or two tiles, and the configuration of this thread's tiles, which lasts until another is needed.
class AttentionTiles {
 public:
  ~AttentionTiles() {
    if (pairs_ != 0) amx::release();
  }

  // sums [rows][groups * 16] of rows of k bfloat16, `x_bytes` apart, times one or two panels of keys.
  void multiply_keys(const char* keys, int64_t panel_bytes, int groups, int64_t k, const char* x, int64_t x_bytes, int64_t rows,
                     float* sums) {
    if (rows <= kVectorRows) return vectors_kernel(rows, groups)(keys, panel_bytes, k, x, x_bytes, sums);
    const int row_tiles = divide(rows, kStep / 2);
    const RunTiles run = square_kernel(row_tiles, groups);
    TileBlock block{};
    block.weights = block.ahead = keys;
    block.group_bytes = panel_bytes;
    block.steps = k / kStep;
    block.x_bytes = x_bytes;
    block.from_zero = true;
    for (int r = 0; r < row_tiles; ++r) {
      block.x[r] = x + r * rows_[0] * x_bytes;
      block.sums[r] = sums + r * rows_[0] * groups * kColumns;
    }
    run(block);
    if (k % kStep == 0) return;
    block.from_zero = false;
    block.weights += block.steps * kStepBytes;
    for (int r = 0; r < row_tiles; ++r) block.x[r] += 2 * kStep * block.steps;
    add_last_step(block, run, row_tiles, groups, rows_, k % kStep);
  }

  // Adds to states [rows][width], `stride` floats apart, the weights of `count` panels times their values. Of a row's weights
  // the panels' follow each other, 8 words each; panels [8 pairs of tokens][width][2] have lines of `line_bytes`.
  void add_values(const char* const* panels, int count, int64_t line_bytes, const float* weights, int64_t weight_stride,
                  int64_t rows, float* states, int64_t stride, int64_t width) {
    if (rows <= kVectorRows) {
      const auto add = rows == 1 ? add_by_vectors<1> : add_by_vectors<2>;
      return add(panels, count, line_bytes, weights, weight_stride, states, stride, width);
    }
    const int row_tiles = divide(rows, kPanel / 2);
    const float* of_tile[] = {weights, weights + rows_[0] * weight_stride};
    float* sums[] = {states, states + rows_[0] * stride};
    for (int64_t column = 0; column < width; column += 2 * kColumns) {
      const bool two = column + kColumns < width;
      const auto add = row_tiles == 1 ? two ? add_by_tiles<1, 2> : add_by_tiles<1, 1>
                                      : two ? add_by_tiles<2, 2> : add_by_tiles<2, 1>;
      add(panels, count, 4 * column, line_bytes, of_tile, 4 * weight_stride, sums, column, 4 * stride);
    }
  }

 private:
  // Configures the tiles for so many rows, and pairs of a step; returns how many tiles of rows there are.
  int divide(int64_t rows, int pairs) {
    const int row_tiles = rows > kRowsOfTile ? 2 : 1;
    const int64_t first = (rows + row_tiles - 1) / row_tiles, second = rows - first;
    if (first != rows_[0] || second != rows_[1] || pairs != pairs_) configure_tiles<false>(first, second, pairs);
    rows_[0] = first;
    rows_[1] = second;
    pairs_ = pairs;
    return row_tiles;
  }

  template <int R, int G>
  static void add_by_tiles(const char* const* panels, int count, int64_t column_bytes, int64_t line_bytes,
                           const float* const* weights, int64_t weight_bytes, float* const* states, int64_t column,
                           int64_t state_bytes) {
    using Registers = TileRegisters<false>;
    unrolled<0, R>([&](auto r) __attribute__((always_inline)) {
      unrolled<0, G>([&](auto g) __attribute__((always_inline)) {
        amx::load<Registers::sum(r, g)>(states[r] + column + g * kColumns, state_bytes);
      });
    });
    for (int i = 0; i < count; ++i) {
      unrolled<0, R>([&](auto r) __attribute__((always_inline)) {
        amx::load<Registers::a(r)>(weights[r] + i * (kPanel / 2), weight_bytes);
      });
      unrolled<0, G>([&](auto g) __attribute__((always_inline)) {
        amx::load<Registers::b(g)>(panels[i] + column_bytes + g * (4 * kColumns), line_bytes);
        unrolled<0, R>([&](auto r) __attribute__((always_inline)) {
          amx::dot_bf16<Registers::sum(r, g), Registers::a(r), Registers::b(g)>();
        });
      });
    }
    unrolled<0, R>([&](auto r) __attribute__((always_inline)) {
      unrolled<0, G>([&](auto g) __attribute__((always_inline)) {
        amx::store<Registers::sum(r, g)>(states[r] + column + g * kColumns, state_bytes);
      });
    });
  }

  template <int R>
  static void add_by_vectors(const char* const* panels, int count, int64_t line_bytes, const float* weights,
                             int64_t weight_stride, float* states, int64_t stride, int64_t width) {
    int64_t column = 0;
    for (; column + 4 * kColumns <= width; column += 4 * kColumns)
      add_columns<R, 4>(panels, count, line_bytes, weights, weight_stride, states, stride, column);
    for (; column < width; column += kColumns)
      add_columns<R, 1>(panels, count, line_bytes, weights, weight_stride, states, stride, column);
  }

  template <int R, int G>
  static void add_columns(const char* const* panels, int count, int64_t line_bytes, const float* weights,
                          int64_t weight_stride, float* states, int64_t stride, int64_t column) {
    F32 sums[R][G];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) sums[r][g] = load(states + r * stride + column + g * kColumns);
    for (int i = 0; i < count; ++i)
      add_step<R, G>(sums, panels[i] + 4 * column, line_bytes, 4 * kColumns,
                     reinterpret_cast<const char*>(weights + i * (kPanel / 2)), 4 * weight_stride, kPanel / 2);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) store(states + r * stride + column + g * kColumns, sums[r][g]);
  }

  int64_t rows_[2] = {};
  int pairs_ = 0;  // of a step; 0: the tiles are not configured
};

// A copy of a panel of values in which all tokens but [begin, end) are zero.
void copy_tokens(const char* values, int64_t line_bytes, int64_t width, int64_t begin, int64_t end, char* copy) {
  for (int64_t pair = 0; pair < kPanel / 2; ++pair, values += line_bytes, copy += line_bytes) {
    const uint32_t mask = (2 * pair >= begin && 2 * pair < end ? 0x0000ffffu : 0u) |
                          (2 * pair + 1 >= begin && 2 * pair + 1 < end ? 0xffff0000u : 0u);
    for (int64_t i = 0; i < 4 * width; i += 4 * kLanes) {
      const U32 words = load_as<U32>(values + i) & mask;
      std::memcpy(copy + i, &words, sizeof words);
    }
  }
}

// Fetches a panel to the second cache.
OCTAVO_INLINE void fetch_panel(const void* panel, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(panel) + at, 0, 2);
}

}  // namespace

}  // namespace octavo::OCTAVO_ISA
