// The matrix products' entry points: out[r, :] = activation(x[r, :] W^T + bias + add[r, :]).
//
// Every output element is one chain of multiply-adds over k = 0, 1, 2, ..., for any number of rows, register tile and
// thread: see gemm_tile.hpp. With avx512_bf16 and bfloat16 weights the order is 1, 0, 3, 2, ..., and subnormal numbers are
// zero, as the instruction is defined; with amx_bf16 it is that of amx_blocks.hpp. Weights of 2 or 4 pieces have such a chain for each equal piece of k, joined as
// a binary tree, (0 + 1) + (2 + 3): so ranks that hold a piece or two each compute parts of the same tree.
#pragma once
#include "isa.hpp"
#include "ops.hpp"

namespace octavo {

// Output columns (rows of W) in a group of packed weights.
constexpr int kGroup = 16;

// The depth of the tree of pieces of k, at most.
constexpr int kMostLevels = 2;

// Packed weights, groups of 16 columns one after the other, columns past n and k past the matrix zero:
//   bf16  [groups][pairs][16][2]: two neighbouring k of a column are one 32-bit word
//   f32   [groups][k][16]
struct WeightView {
  const void* data = nullptr;
  const float* bias = nullptr;  // [groups * 16] in packed order, or null
  Dtype dtype = Dtype::bf16;
  int64_t n = 0;       // columns of the product
  int64_t k = 0;       // as packed: even for bf16
  int64_t groups = 0;
  int pieces = 1;      // of k, equal, each even for bf16
};

struct Product {
  WeightView weights;
  const float* x = nullptr;  // [rows, k], as GemmTable::prepare makes them, or as they lie where that is the same
  int64_t x_stride = 0;
  void* out = nullptr;
  int64_t out_stride = 0;
  Dtype out_dtype = Dtype::f32;
  const float* add = nullptr;  // [rows, n], or null; may be the memory of out
  int64_t add_stride = 0;
  Activation activation = Activation::none;
  // Group g holds 8 columns of the gate and the same 8 of up: out[r, 8 g + c] = activation(gate) * up.
  bool gated = false;
  // If not 0, the sums of the pieces of k are not joined: those of piece i go to out + i * piece_stride, in float32, and
  // nothing is added to them.
  int64_t piece_stride = 0;
  // Weights of the same k that are multiplied next, fetched meanwhile; null: the groups that follow.
  const void* next = nullptr;

  int64_t out_columns() const { return gated ? weights.n / 2 : weights.n; }
};

struct GemmTable {
  // Whether rows for bfloat16 weights are made two bfloat16 to a word: such rows may be multiplied as they lie.
  bool multiplies_pairs;
  // Rows x[r, 0 .. k) in the form in which `multiply` takes them for weights of that type, with zeros to padded_k: for
  // bfloat16 rounded to it, and in float32 or two in a word.
  void (*prepare)(const void* x, Dtype dtype, int64_t x_stride, int64_t k, Dtype weights, float* out, int64_t padded_k,
                  int64_t out_stride, int64_t rows);
  // Groups that `multiply` takes side by side for so many rows, at least 1, where there are as many.
  int64_t (*groups_at_once)(const WeightView& weights, int64_t rows);
  // The part of a product in the given groups and rows.
  void (*multiply)(const Product& product, int64_t group_begin, int64_t group_end, int64_t row_begin, int64_t row_end);
  // For the limits of this machine: reads so many bytes once; runs so many rounds of independent multiply-adds, and
  // returns how many floating-point operations a round is. What they compute goes to *sink.
  void (*read)(const void* data, int64_t bytes, float* sink);
  int64_t (*multiply_add)(int64_t rounds, float* sink);
  // As multiply_add, of dot products of bfloat16 pairs; 0 where no instruction does them.
  int64_t (*bf16_dot)(int64_t rounds, float* sink);
};

}  // namespace octavo
