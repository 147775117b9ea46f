// The pointwise kernels' entry points: each computes rows [begin, end) of an operation, whatever the other rows are.
// All arithmetic is float32 and rounds once to the type of the result. Strides count elements.
#pragma once
#include "isa.hpp"
#include "ops.hpp"

namespace octavo {

// out[row] = scale * table[id - first] + add[row], all [.., width]; for ids that the table [rows, width] does not have,
// row `otherwise` counts, or zeros if it is negative. `add` may be null, and may be the memory of out.
struct Embedding {
  const void* table;
  Dtype dtype;
  int64_t width;
  int64_t first, rows;
  Ids ids;
  void* out;
  Dtype out_dtype;
  float scale;
  const float* add;
  int64_t otherwise = -1;
};

// Row t * heads + h lies at x + t * x_stride + h * x_head_stride, and likewise in out; in place is allowed.
// weight [width]; bias [width] or null (layer norm only); head h has those at h * weight_head_stride, 0: all the same. `add`, or null, is added to the result; it has out's strides,
// and may be its memory (rms norm only).
struct Norm {
  const void* x;
  Dtype x_dtype;
  int64_t x_stride, x_head_stride;
  const void* weight;
  const void* bias;
  Dtype weight_dtype;
  void* out;
  Dtype out_dtype;
  int64_t out_stride, out_head_stride;
  int64_t heads, width;
  float eps;
  const float* add;
  int64_t weight_head_stride = 0;
};

// x [T, width] = cap * tanh(x / cap), in place; rows are strided.
struct SoftCap {
  float* x;
  int64_t x_stride, width;
  float cap;
};

// x [T, width] = min(max(x, least), limit), in place; rows are strided. NaN stays NaN.
struct Clamp {
  void* x;
  int64_t x_stride, width;
  Dtype dtype;
  float limit, least;
};

// x [T, width] = factor * x, in place; rows are strided.
struct Scale {
  float* x;
  int64_t x_stride, width;
  float factor;
};

// x [T, width] = factors * x + bias, rounded once, in place; rows of x and factors are strided, by 0 if all rows have
// the same factors. The bias [width] may be null.
struct Multiply {
  void* x;
  int64_t x_stride, width;
  Dtype dtype;
  const float* factors;
  int64_t factors_stride;
  const float* bias;
};

// x [T, width] = xielu(x), in place; rows are strided.
struct Xielu {
  float* x;
  int64_t x_stride, width;
  float positive, negative, beta, eps;
};

// q [T, heads, width] times 1 + beta * log(1 + floor((position + offset) / period)), in place.
struct QueryScale {
  void* q;
  int64_t q_stride, q_head_stride;
  int64_t heads, width;
  Dtype dtype;
  double beta;
  int64_t period, offset;
};

// out [T, width] = activation(x[.., :width]), times x[.., width:2 * width] if gated. In place is allowed
// if the types are the same.
struct Activate {
  const void* x;
  int64_t x_stride;
  Dtype x_dtype;
  void* out;
  int64_t out_stride;
  Dtype out_dtype;
  int64_t width;
  Activation activation;
  bool gated;
};

// Rotates the first rotary_dim dimensions of heads of q [T, heads, ..] to out, which may be q, and of k [T, kv_heads, ..]
// in place: dimension i is paired with i + rotary_dim / 2. cos_sin [max position, rotary_dim]: cosines, then sines, of
// half as many angles. With axes, the pairs before section_ends[0] turn by a token's first rotary position, those from
// there to section_ends[1] by its second, and so on; the last end is rotary_dim / 2. Other dimensions of q are copied.
struct Rotary {
  static constexpr int64_t kMaxAxes = 4, kMaxSectionedDim = 1024;
  const void* q;
  int64_t q_stride, q_head_stride;
  void* out;
  int64_t out_stride, out_head_stride;
  void* k;
  int64_t k_stride, k_head_stride;  // the latter is a head's size
  int64_t heads, kv_heads, rotary_dim;
  const float* cos_sin;
  Dtype dtype;
  int64_t axes = 0;
  uint8_t axis_of_pair[kMaxSectionedDim / 2] = {};
};

struct PointwiseTable {
  void (*embedding)(const Embedding&, const Step&, int64_t begin, int64_t end);
  void (*rms_norm)(const Norm&, const Step&, int64_t begin, int64_t end);
  void (*layer_norm)(const Norm&, const Step&, int64_t begin, int64_t end);
  void (*activate)(const Activate&, const Step&, int64_t begin, int64_t end);
  void (*soft_cap)(const SoftCap&, const Step&, int64_t begin, int64_t end);
  void (*clamp)(const Clamp&, const Step&, int64_t begin, int64_t end);
  void (*rotary)(const Rotary&, const Step&, int64_t begin, int64_t end);
  void (*scale)(const Scale&, const Step&, int64_t begin, int64_t end);
  void (*multiply)(const Multiply&, const Step&, int64_t begin, int64_t end);
  void (*xielu)(const Xielu&, const Step&, int64_t begin, int64_t end);
  void (*query_scale)(const QueryScale&, const Step&, int64_t begin, int64_t end);
  // The index of a row's largest value, the lowest of several; -1 if there is a NaN.
  int64_t (*argmax)(const float* row, int64_t width);
  // log(sum(exp(row))): exponentials in float32, summed in float64. -inf if all are -inf; NaN if there is a NaN.
  double (*logsumexp)(const float* row, int64_t width);
};

}  // namespace octavo
