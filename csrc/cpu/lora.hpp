// Low-rank products of adapters: the kernels' entry points. A row gets up(down(x)) of its own adapter.
//
// An element of down(x) is summed in lanes, each a chain of multiply-adds over the lines of a row of the matrix, and the
// lanes are joined at the end; one of up is a single chain over the rank. Both orders depend on the matrices alone.
#pragma once
#include "isa.hpp"
#include "ops.hpp"

namespace octavo {

// Bytes that are read of a row of `down` before the next row's.
constexpr int64_t kLowRankLine = 64;
// Most rows of `down` that are read side by side; the others are taken 4, 2 and 1 at a time.
constexpr int64_t kLowRankRows = 8;

// Bytes that are fetched ahead of those that are read: matrices of an adapter follow each other in the order of reading.
constexpr int64_t kLowRankAhead = 4096;

// The two matrices of a part of an adapter. down [rank, inputs] is in blocks of rows read side by side, each block
// [lines][rows][line], with zeros past the inputs; up [outputs, rank] is as in WeightView, with k = padded_rank.
struct LowRankView {
  const char* down = nullptr;
  const char* up = nullptr;  // follows `down` in memory
  Dtype dtype = Dtype::bf16;
  int64_t rank = 0;
  int64_t padded_rank = 0;  // even for bf16
  int64_t lines = 0;        // of a row of down
  int64_t outputs = 0;
  int64_t groups = 0;       // of 16 outputs

  int64_t bytes_of_value() const { return dtype == Dtype::bf16 ? 2 : 4; }
  int64_t padded_inputs() const { return lines * kLowRankLine / bytes_of_value(); }
};

struct LoraTable {
  // out[row, 0 .. rank) = down x[row], for rows of x as GemmTable::prepare makes them, with padded_inputs.
  void (*shrink)(const LowRankView& part, const float* x, int64_t x_stride, int64_t rows, float* out,
                 int64_t out_stride);
  // out[places[row]] = add[places[row]] + up x[row] in the given groups of columns, for rows of x as GemmTable::prepare
  // makes them, with padded_rank. `add` may be null, or the memory of out.
  void (*expand)(const LowRankView& part, const float* x, int64_t x_stride, const int32_t* places, int64_t rows,
                 int64_t group_begin, int64_t group_end, const float* add, int64_t add_stride, float* out,
                 int64_t out_stride);
};

}  // namespace octavo
