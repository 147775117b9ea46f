// Token by token in one order, so that the bits do not depend on how a sequence is cut into steps. A head's state lies in
// the block of the current token and is computed there; it is copied where a block begins.
#include "gated_delta.hpp"

#include <type_traits>

#include "activations.hpp"
#include "rows.hpp"

namespace octavo::OCTAVO_ISA {

namespace {

float sigmoid(float x) { return 1.0f / (1.0f + ::expf(-x)); }

float softplus(float x) { return x > 20.0f ? x : ::log1pf(::expf(x)); }

// A vector divided by its length, times a factor.
template <typename T>
void unit_vector(const T* x, float* out, int64_t width, float factor) {
  const float squares = sum_of_vectors(width, [&](int64_t i, auto lanes) {
    const F32 v = load(x + i, lanes);
    return v * v;
  });
  const F32 scale = splat(factor / std::sqrt(squares + 1e-6f));
  for_vectors(width, [&](int64_t i, auto lanes) { store(out + i, load(x + i, lanes) * scale, lanes); });
}

// One token of `count` vectors of columns; state, v and out are those of the first column.
template <int count, typename T, typename L>
OCTAVO_INLINE void columns(float* state, int64_t stride, const float* q, const float* k, const T* v, int64_t keys,
                           float decay, float beta, float* out, L lanes) {
  F32 sums[count] = {};
  for (int64_t i = 0; i < keys; ++i) {
    const F32 key = splat(k[i]);
    for (int j = 0; j < count; ++j) sums[j] = fma(key, load(state + i * stride + j * kLanes, lanes), sums[j]);
  }
  F32 delta[count];
  const F32 keep = splat(decay);
  for (int j = 0; j < count; ++j) {
    delta[j] = (load(v + j * kLanes, lanes) - sums[j] * keep) * splat(beta);
    sums[j] = F32{};
  }
  for (int64_t i = 0; i < keys; ++i) {
    const F32 key = splat(k[i]), query = splat(q[i]);
    for (int j = 0; j < count; ++j) {
      float* at = state + i * stride + j * kLanes;
      const F32 next = fma(key, delta[j], load(at, lanes) * keep);
      store(at, next, lanes);
      sums[j] = fma(query, next, sums[j]);
    }
  }
  for (int j = 0; j < count; ++j) store(out + j * kLanes, sums[j], lanes);
}

template <typename T>
void head_of_sequence(const GatedDelta& a, const Step& step, int64_t head, int64_t sequence) {
  const int64_t keys = a.key_dim, values = a.value_dim, key_head = head / (a.value_heads / a.key_heads);
  const int64_t first = step.query_start[sequence], last = step.query_start[sequence + 1];
  const int32_t* table = step.block_tables + sequence * step.block_table_stride;
  const size_t bytes = static_cast<size_t>(keys * values) * sizeof(float);
  const auto state_of = [&](int64_t block) {
    return a.states + static_cast<int64_t>(table[block]) * a.block_stride + head * keys * values;
  };
  const float factor = 1.0f / std::sqrt(static_cast<float>(keys));
  float q[GatedDelta::kMaxDim], k[GatedDelta::kMaxDim], o[GatedDelta::kMaxDim];
  float* state = nullptr;
  for (int64_t row = first; row < last; ++row) {
    const int64_t position = step.positions[row], block = position / a.state_tokens;
    if (state == nullptr || position % a.state_tokens == 0) {
      state = state_of(block);
      if (position == 0)
        std::memset(state, 0, bytes);
      else if (position % a.state_tokens == 0)
        std::memcpy(state, state_of(block - 1), bytes);
    }
    const T* qkv = static_cast<const T*>(a.qkv) + row * a.qkv_stride;
    unit_vector(qkv + key_head * keys, q, keys, factor);
    unit_vector(qkv + (a.key_heads + key_head) * keys, k, keys, 1.0f);
    const T* v = qkv + 2 * a.key_heads * keys + head * values;
    const float beta = sigmoid(load_one(static_cast<const T*>(a.b) + row * a.b_stride + head));
    const float input = load_one(static_cast<const T*>(a.a) + row * a.a_stride + head) + a.dt_bias[head];
    const float decay = ::expf(a.decay[head] * softplus(input));
    int64_t at = 0;
    for (; at + 8 * kLanes <= values; at += 8 * kLanes)
      columns<8>(state + at, values, q, k, v + at, keys, decay, beta, o + at, Full{});
    for (; at + kLanes <= values; at += kLanes)
      columns<1>(state + at, values, q, k, v + at, keys, decay, beta, o + at, Full{});
    if (at < values)
      columns<1>(state + at, values, q, k, v + at, keys, decay, beta, o + at, Tail{static_cast<int>(values - at)});
    const float squares = sum_of_vectors(values, [&](int64_t i, auto lanes) {
      const F32 x = load(o + i, lanes);
      return x * x;
    });
    const F32 scale = splat(1.0f / std::sqrt(squares / static_cast<float>(values) + a.eps));
    const T* z = static_cast<const T*>(a.z) + row * a.z_stride + head * values;
    T* out = static_cast<T*>(a.out) + (row * a.value_heads + head) * values;
    for_vectors(values, [&](int64_t i, auto lanes) {
      const F32 normed = load(o + i, lanes) * scale * load(a.weight + i, lanes);
      store(out + i, normed * silu(load(z + i, lanes)), lanes);
    });
  }
}

void gated_delta(const GatedDelta& a, const Step& step, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t i = begin; i < end; ++i) head_of_sequence<T>(a, step, i / step.sequences, i % step.sequences);
  });
}

void sigmoid_gate(const SigmoidGate& a, const Step&, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t row = begin; row < end; ++row) {
      T* x = static_cast<T*>(a.x) + row * a.x_stride;
      const T* gate = static_cast<const T*>(a.gate) + row * a.gate_stride;
      for_vectors(a.width, [&](int64_t i, auto lanes) {
        store(x + i, load(x + i, lanes) / (1.0f + exp(-load(gate + i, lanes))), lanes);
      });
    }
  });
}

}  // namespace

const GatedDeltaTable* gated_delta_table() {
  static const GatedDeltaTable table{gated_delta, sigmoid_gate};
  return &table;
}

}  // namespace octavo::OCTAVO_ISA
