// Mixtures of experts: the kernels' entry points. Each token chooses a few experts, feed-forward networks, and gets the
// sum of their results, each times a weight.
#pragma once
#include "isa.hpp"
#include "ops.hpp"

namespace octavo {

// The score of an expert, see RoutingSpec in octavo/kernels/interface.py.
enum class Scoring { softmax, sigmoid, sparsemixer };

// How experts are chosen, see RoutingSpec in octavo/kernels/interface.py.
struct Routing {
  const float* logits;  // [T, experts + shared], rows so many elements apart
  int64_t logits_stride;
  const float* bias;    // [experts], or null
  const float* factors;  // [experts] of the weights, or null
  int32_t* chosen;      // [T, top_k + shared]
  float* weights;       // as chosen
  int64_t experts, shared, top_k;
  int64_t groups, top_groups, best_of_group;
  Scoring scoring;
  bool renormalize;
  float least_sum, scale, jitter;
};

// The biases of a token's experts, weighted, added to x [T, columns]; the table has a row for each expert.
struct ExpertBias {
  float* x;
  int64_t x_stride;
  const int32_t* chosen;  // [T, slots]
  const float* weights;
  int64_t slots;
  const float* table;
  int64_t columns;
};

struct MoeTable {
  void (*route)(const Routing&, int64_t begin, int64_t end);
  // out = scale * x, of so many values of one type.
  void (*scale_row)(const void* x, Dtype dtype, float scale, int64_t width, void* out);
  // sums[tokens[r]] += scales[r] * x[r], for rows of so many columns; a product and a sum, never fused.
  void (*add_scaled)(const float* x, int64_t x_stride, const float* scales, const int32_t* tokens, int64_t rows,
                     int64_t columns, float* sums, int64_t stride);
  // out[r] = sums of the pieces (1, 2 or 4), joined as a binary tree, + add[r], if there is one.
  void (*join)(const float* sums, int64_t stride, int pieces, int64_t piece_stride, const float* add,
               int64_t add_stride, float* out, int64_t out_stride, int64_t rows, int64_t columns);
  void (*add_bias)(const ExpertBias&, int64_t begin, int64_t end);
};

}  // namespace octavo
