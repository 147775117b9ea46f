// The gated delta rule (Yang et al. 2024, arXiv 2412.06464) and the gates beside it. All arithmetic is float32 and rounds
// once to the type of the result. Strides count elements.
#pragma once
#include "isa.hpp"
#include "ops.hpp"

namespace octavo {

// Each value head h of a sequence has a state S [key_dim, value_dim], and key head h / (value_heads / key_heads). Of a token,
// with q and k divided by their lengths, g = decay * softplus(a + dt_bias) and beta = sigmoid(b):
//   S = e^g S, S += k (beta (v - S^T k))^T, o = S^T q / sqrt(key_dim), out = rms_norm(o) * weight * silu(z).
struct GatedDelta {
  static constexpr int64_t kMaxDim = 512;
  const void* qkv;  // [T, .]: q of all key heads, k, and v of all value heads
  int64_t qkv_stride;
  const void* z;  // [T, value_heads * value_dim]
  int64_t z_stride;
  const void* b;  // [T, value_heads]
  int64_t b_stride;
  const void* a;  // [T, value_heads]
  int64_t a_stride;
  Dtype dtype;
  void* out;                                // [T, value_heads * value_dim], contiguous
  const float *decay, *dt_bias, *weight;    // [value_heads], [value_heads], [value_dim]
  int64_t key_heads, value_heads, key_dim, value_dim;
  float eps;
  float* states;  // of the first block and head
  int64_t block_stride, state_tokens, group;
};

// x [T, width] *= sigmoid(gate [T, width]), in place.
struct SigmoidGate {
  void* x;
  int64_t x_stride;
  const void* gate;
  int64_t gate_stride, width;
  Dtype dtype;
};

struct GatedDeltaTable {
  // Items [begin, end) of value_heads * sequences; sequences are the faster index. Each computes all tokens of one head.
  void (*gated_delta)(const GatedDelta&, const Step&, int64_t begin, int64_t end);
  void (*sigmoid_gate)(const SigmoidGate&, const Step&, int64_t begin, int64_t end);
};

}  // namespace octavo
