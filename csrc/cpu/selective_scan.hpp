// Selective state spaces: Mamba 1 (Gu & Dao 2023, arXiv 2312.00752) and Mamba 2 (Dao & Gu 2024, arXiv 2405.21060), and the
// gate beside them. All arithmetic is float32 and rounds once to the type of the result. Strides count elements.
#pragma once
#include "isa.hpp"
#include "ops.hpp"
#include "states.hpp"

namespace octavo {

// Each channel has a state S [state_size]. Of a token, with dt = softplus(dt + dt_bias):
//   S = e^(dt decay) S + dt x B, out = (S C + skip x) silu(z).
struct SelectiveScan {
  static constexpr int64_t kMaxStateSize = 256;
  const void* x;  // [T, channels]
  int64_t x_stride;
  const void* z;  // [T, channels]
  int64_t z_stride;
  Dtype dtype;
  void* out;        // [T, channels], contiguous
  const float* dt;  // [T, channels]
  int64_t dt_stride;
  const float* b;  // [T, state_size]
  int64_t b_stride;
  const float* c;  // [T, state_size]
  int64_t c_stride;
  const float *decay, *dt_bias, *skip;  // [state_size, channels], [channels], [channels]
  int64_t channels, state_size;
  StateMemory states;
  int64_t offset;  // of a state [state_size, channels]

  // With drafts, rows [channels] follow: positions, a number `half`, and for each draft dt and dt x. Then come B [2, drafts,
  // state_size]: threads read one half while one of them writes the other, which counts from then on.
  int64_t floats() const {
    return state_size * channels + (states.drafts ? (2 + 2 * states.drafts) * channels + 2 * states.drafts * state_size : 0);
  }
};

// Each head has a state S [state_size, head_dim], and B and C of group head / (heads / groups). Of a token, with
// dt = softplus(dt_scale dt + dt_bias), then within dt_least and dt_most:
//   S = e^(dt decay) S + B (dt x)^T, out = (S^T C + skip x) scale, and with z: times silu(gate_scale z).
struct SsdScan {
  static constexpr int64_t kMaxStateSize = 512;
  const void* xbc;  // [T, .]: x of all heads, B of all groups, C
  int64_t xbc_stride;
  const void* dt;  // [T, heads]
  int64_t dt_stride;
  const void* z;  // [T, heads * head_dim], or null
  int64_t z_stride;
  Dtype dtype;
  void* out;  // [T, heads * head_dim], contiguous
  Dtype out_dtype;
  const float *decay, *dt_bias, *skip;  // [heads]
  int64_t heads, groups, head_dim, state_size;
  float dt_least, dt_most, dt_scale, gate_scale, scale;
  StateMemory states;
  int64_t offset;  // of the states [heads, state_size, head_dim]

  // Of a draft: e^(dt decay), B and dt x.
  int64_t change_floats() const { return 1 + state_size + head_dim; }
  int64_t floats() const { return states.floats(heads * state_size * head_dim, heads, change_floats()); }
};

// out [T, width], of the gate's type, = x [T, width] silu(scale gate).
struct SiluGate {
  const float* x;
  int64_t x_stride;
  const void* gate;
  int64_t gate_stride, width;
  float scale;
  Dtype dtype;
  void* out;
};

struct SelectiveScanTable {
  // All sequences of a step of the group, for channels [begin, end).
  void (*selective_scan)(const SelectiveScan&, const Step&, int64_t begin, int64_t end);
  // Items [begin, end) of heads * sequences; sequences are the faster index. Each computes all tokens of one head.
  void (*ssd_scan)(const SsdScan&, const Step&, int64_t begin, int64_t end);
  void (*silu_gate)(const SiluGate&, const Step&, int64_t begin, int64_t end);
};

}  // namespace octavo
