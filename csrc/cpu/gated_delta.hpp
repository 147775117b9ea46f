// The gated delta rule (Yang et al. 2024, arXiv 2412.06464), with a decay for each head or for each key channel (Kimi
// delta attention, arXiv 2510.26692), and the gates beside it. All arithmetic is float32 and rounds once to the type of
// the result. Strides count elements.
#pragma once
#include "isa.hpp"
#include "ops.hpp"
#include "states.hpp"

namespace octavo {

// Each value head h of a sequence has a state S [key_dim, value_dim], and key head h / (value_heads / key_heads). Of a token,
// with q and k divided by their lengths, g = decay * softplus(a + dt_bias) and beta = beta_scale * sigmoid(b):
//   S = e^g S, S += k (beta (v - S^T k))^T, o = S^T q / sqrt(key_dim), out = rms_norm(o) * weight * gate(z).
// g is a number, or with per_channel a vector [key_dim] of which each has a row of S.
struct GatedDelta {
  static constexpr int64_t kMaxDim = 512;
  const void* qkv;  // [T, .]: q of all key heads, k, and v of all value heads
  int64_t qkv_stride;
  const void* z;  // [T, value_heads * value_dim]
  int64_t z_stride;
  const void* b;  // [T, value_heads]
  int64_t b_stride;
  const void* a;  // [T, value_heads], or [T, value_heads * key_dim]
  int64_t a_stride;
  Dtype dtype;
  void* out;                              // [T, value_heads * value_dim], contiguous
  const float *decay, *dt_bias, *weight;  // [value_heads], as a, [value_dim]
  int64_t key_heads, value_heads, key_dim, value_dim;
  float eps, beta_scale;
  bool per_channel;
  bool sigmoid;  // the gate of z: sigmoid, or silu
  StateMemory states;
  int64_t offset;

  // Of a draft: e^g, k, and beta (v - S^T k).
  int64_t change_floats() const { return (per_channel ? key_dim : 1) + key_dim + value_dim; }
  int64_t floats() const { return states.floats(value_heads * key_dim * value_dim, value_heads, change_floats()); }
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
