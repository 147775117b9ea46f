// Token by token in one order, so that the bits do not depend on how a sequence is cut into steps. A head's state is
// computed in the block of the current token, see compute_head.
#include "gated_delta.hpp"

#include <algorithm>
#include <type_traits>

#include "activations.hpp"
#include "rows.hpp"

namespace octavo::OCTAVO_ISA {

namespace {

float sigmoid(float x) { return 1.0f / (1.0f + ::expf(-x)); }

float softplus(float x) { return x > 20.0f ? x : ::log1pf(::expf(x)); }

// max(x, 0) + log(1 + e^-|x|). The logarithm of 1 + y, y at most 1, is 2 artanh(s) with s = y / (2 + y) at most 1/3, by
// its series.
OCTAVO_INLINE F32 softplus(F32 x) {
  const F32 y = exp(-magnitude(x)), s = y / (2.0f + y), square = s * s;
  F32 p = splat(1.0f / 15.0f);
  for (const float divisor : {13.0f, 11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) p = fma(p, square, splat(1.0f / divisor));
  return max(F32{}, x) + 2.0f * s * p;  // NaN of NaN
}

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

// What a token does to one head's state.
struct HeadToken {
  const float *q, *k;
  const float* decay;    // one, or one for each key channel
  const float* decayed;  // k times the decay of each channel
  float beta;
};

// A vector of the state after a token.
template <typename L>
OCTAVO_INLINE F32 advance(const float* from, float* to, F32 key, F32 delta, F32 keep, L lanes) {
  const F32 next = fma(key, delta, load(from, lanes) * keep);
  store(to, next, lanes);
  return next;
}

// Calls f(first column, integral constant of the number of vectors, lanes) for parts of `values` columns.
template <typename F>
OCTAVO_INLINE void for_columns(int64_t values, const F& f) {
  int64_t at = 0;
  for (; at + 8 * kLanes <= values; at += 8 * kLanes) f(at, std::integral_constant<int, 8>{}, Full{});
  for (; at + kLanes <= values; at += kLanes) f(at, std::integral_constant<int, 1>{}, Full{});
  if (at < values) f(at, std::integral_constant<int, 1>{}, Tail{static_cast<int>(values - at)});
}

// One token of `count` vectors of columns; states, v, delta (or null) and out are those of the first column.
template <int count, bool per_channel, typename T, typename L>
OCTAVO_INLINE void columns(const float* from, float* to, int64_t stride, const HeadToken& token, const T* v,
                           int64_t keys, float* kept_delta, float* out, L lanes) {
  F32 sums[count] = {};
  const float* before = per_channel ? token.decayed : token.k;
  for (int64_t i = 0; i < keys; ++i) {
    const F32 key = splat(before[i]);
    for (int j = 0; j < count; ++j) sums[j] = fma(key, load(from + i * stride + j * kLanes, lanes), sums[j]);
  }
  F32 delta[count];
  F32 keep = splat(token.decay[0]);
  for (int j = 0; j < count; ++j) {
    const F32 held = per_channel ? sums[j] : sums[j] * keep;
    delta[j] = (load(v + j * kLanes, lanes) - held) * splat(token.beta);
    sums[j] = F32{};
    if (kept_delta) store(kept_delta + j * kLanes, delta[j], lanes);
  }
  for (int64_t i = 0; i < keys; ++i) {
    const F32 key = splat(token.k[i]), query = splat(token.q[i]);
    if (per_channel) keep = splat(token.decay[i]);
    for (int j = 0; j < count; ++j) {
      const int64_t at = i * stride + j * kLanes;
      sums[j] = fma(query, advance(from + at, to + at, key, delta[j], keep, lanes), sums[j]);
    }
  }
  for (int j = 0; j < count; ++j) store(out + j * kLanes, sums[j], lanes);
}

// One head of one sequence, see compute_head.
template <typename T, bool per_channel>
struct Head {
  const GatedDelta& a;
  const StateSpan& span;
  const int64_t head, keys = a.key_dim, values = a.value_dim, key_head = head / (a.value_heads / a.key_heads);
  const int64_t size = keys * values, change_size = a.change_floats();

  float* state(float* block) const { return block + a.offset + head * size; }
  float* kept(float* block) const {
    return block + a.offset + a.value_heads * size + head * (1 + a.states.drafts * change_size);
  }

  void compute(int64_t number, const float* from, float* to, float* change) const {
    float q[GatedDelta::kMaxDim], k[GatedDelta::kMaxDim], o[GatedDelta::kMaxDim];
    float decay[GatedDelta::kMaxDim], decayed[GatedDelta::kMaxDim];
    HeadToken token{q, k, decay, decayed, 0.0f};
    const int64_t row = span.row + number;
    const T* qkv = static_cast<const T*>(a.qkv) + row * a.qkv_stride;
    unit_vector(qkv + key_head * keys, q, keys, 1.0f / std::sqrt(static_cast<float>(keys)));
    unit_vector(qkv + (a.key_heads + key_head) * keys, k, keys, 1.0f);
    const T* v = qkv + 2 * a.key_heads * keys + head * values;
    token.beta = a.beta_scale * sigmoid(load_one(static_cast<const T*>(a.b) + row * a.b_stride + head));
    const T* input = static_cast<const T*>(a.a) + row * a.a_stride;
    if (per_channel) {
      for_vectors(keys, [&](int64_t i, auto lanes) {
        const F32 x = load(input + head * keys + i, lanes) + load(a.dt_bias + head * keys + i, lanes);
        const F32 kept = exp(splat(a.decay[head]) * softplus(x));
        store(decay + i, kept, lanes);
        store(decayed + i, load(k + i, lanes) * kept, lanes);
      });
    } else {
      decay[0] = ::expf(a.decay[head] * softplus(load_one(input + head) + a.dt_bias[head]));
    }
    float* delta = nullptr;
    if (change) {
      change = std::copy_n(decay, per_channel ? keys : 1, change);
      delta = std::copy_n(k, keys, change);
    }
    for_columns(values, [&](int64_t at, auto count, auto lanes) {
      float* own = delta ? delta + at : nullptr;
      columns<count, per_channel>(from + at, to + at, values, token, v + at, keys, own, o + at, lanes);
    });
    const float squares = sum_of_vectors(values, [&](int64_t i, auto lanes) {
      const F32 x = load(o + i, lanes);
      return x * x;
    });
    const F32 scale = splat(1.0f / std::sqrt(squares / static_cast<float>(values) + a.eps));
    const T* z = static_cast<const T*>(a.z) + row * a.z_stride + head * values;
    T* out = static_cast<T*>(a.out) + (row * a.value_heads + head) * values;
    for_vectors(values, [&](int64_t i, auto lanes) {
      const F32 normed = load(o + i, lanes) * scale * load(a.weight + i, lanes);
      const F32 gate = load(z + i, lanes);
      store(out + i, a.sigmoid ? normed / (1.0f + exp(-gate)) : normed * silu(gate), lanes);
    });
  }

  void apply(const float* from, float* to, const float* change) const {
    const float *decay = change, *k = change + (per_channel ? keys : 1), *delta = k + keys;
    for_columns(values, [&](int64_t at, auto count, auto lanes) {
      F32 deltas[count], keep = splat(decay[0]);
      for (int j = 0; j < count; ++j) deltas[j] = load(delta + at + j * kLanes, lanes);
      for (int64_t i = 0; i < keys; ++i) {
        if (per_channel) keep = splat(decay[i]);
        for (int j = 0; j < count; ++j) {
          const int64_t place = i * values + at + j * kLanes;
          advance(from + place, to + place, splat(k[i]), deltas[j], keep, lanes);
        }
      }
    });
  }
};

template <typename T, bool per_channel>
void head_of_sequence(const GatedDelta& a, const Step& step, int64_t head, int64_t sequence) {
  const StateSpan span(a.states, step, sequence);
  if (span.tokens > 0) compute_head(Head<T, per_channel>{a, span, head}, span);
}

void gated_delta(const GatedDelta& a, const Step& step, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto compute = a.per_channel ? head_of_sequence<T, true> : head_of_sequence<T, false>;
    for (int64_t i = begin; i < end; ++i) compute(a, step, i / step.sequences, i % step.sequences);
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
