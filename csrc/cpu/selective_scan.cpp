// Token by token in one order, so that the bits do not depend on how a sequence is cut into steps.
#include "selective_scan.hpp"

#include <algorithm>
#include <type_traits>

#include "activations.hpp"
#include "rows.hpp"

namespace octavo::OCTAVO_ISA {

namespace {

// ln(1 + e^x) within 3e-7 of itself: max(x, 0) + ln(1 + u) with u = e^-|x|. ln(1 + u) = 2 artanh(s), s = u / (2 + u) up to
// 1/3, by its series.
OCTAVO_INLINE F32 softplus(F32 x) {
  const F32 u = exp(-magnitude(x));
  const F32 s = u / (2.0f + u), square = s * s;
  F32 p = splat(2.0f / 15);
  p = fma(p, square, splat(2.0f / 13));
  p = fma(p, square, splat(2.0f / 11));
  p = fma(p, square, splat(2.0f / 9));
  p = fma(p, square, splat(2.0f / 7));
  p = fma(p, square, splat(2.0f / 5));
  p = fma(p, square, splat(2.0f / 3));
  p = fma(p, square, splat(2.0f));
  return fma(p, s, max(F32{}, x));  // NaN of NaN
}

// ---- Mamba 1: a vector of channels has a state [state_size], each number for all its channels --------------------------

// Advances a number of the state by one token.
OCTAVO_INLINE F32 advance(F32 state, F32 decay, F32 dt, F32 dt_x, float b) {
  return fma(exp(dt * decay), state, dt_x * splat(b));
}

// A vector of channels from `i` on, of one sequence. kStates: a.state_size if it is known, or 0.
template <int kStates, typename T, typename Lanes>
OCTAVO_INLINE void scan_vector(const SelectiveScan& a, const StateSpan& span, int64_t i, Lanes lanes) {
  const int64_t states = kStates ? kStates : a.state_size, drafts = a.states.drafts;
  F32 state[kStates ? kStates : SelectiveScan::kMaxStateSize], decay[kStates ? kStates : SelectiveScan::kMaxStateSize];
  const float* before = span.before();
  for (int64_t n = 0; n < states; ++n) {
    state[n] = before ? load(before + a.offset + n * a.channels + i, lanes) : F32{};
    decay[n] = load(a.decay + n * a.channels + i, lanes);
  }
  // Of a block, where a row of the drafts is, and B of a draft.
  const auto row_of = [&](const float* block, int64_t row) {
    return const_cast<float*>(block) + a.offset + (states + row) * a.channels + i;
  };
  const auto b_of = [&](const float* block, int64_t half, int64_t draft) {
    const int64_t rows = states + 2 + 2 * drafts;
    return const_cast<float*>(block) + a.offset + rows * a.channels + (half * drafts + draft) * states;
  };
  int64_t half = 0;  // that is read
  if (before && drafts) {
    half = *row_of(before, 1) > 0.0f;
    for (int64_t draft = 0, count = span.accepted(*row_of(before, 0)); draft < count; ++draft) {
      const F32 dt = load(row_of(before, 2 + 2 * draft), lanes), dt_x = load(row_of(before, 3 + 2 * draft), lanes);
      const float* b = b_of(before, half, draft);
      for (int64_t n = 0; n < states; ++n) state[n] = advance(state[n], decay[n], dt, dt_x, b[n]);
    }
  }
  const F32 dt_bias = load(a.dt_bias + i, lanes), skip = load(a.skip + i, lanes);
  const T* x = static_cast<const T*>(a.x) + span.row * a.x_stride + i;
  const T* z = static_cast<const T*>(a.z) + span.row * a.z_stride + i;
  T* out = static_cast<T*>(a.out) + span.row * a.channels + i;
  F32 dt, dt_x;  // of the last token
  const auto compute = [&](int64_t token) __attribute__((always_inline)) {
    const int64_t row = span.row + token;
    const float *b = a.b + row * a.b_stride, *c = a.c + row * a.c_stride;
    dt = softplus(load(a.dt + row * a.dt_stride + i, lanes) + dt_bias);
    const F32 input = load(x + token * a.x_stride, lanes);
    dt_x = dt * input;
    F32 sum{};
    for (int64_t n = 0; n < states; ++n) {
      state[n] = advance(state[n], decay[n], dt, dt_x, b[n]);
      sum = fma(state[n], splat(c[n]), sum);
    }
    const F32 gate = silu(load(z + token * a.z_stride, lanes));
    store(out + token * a.channels, fma(skip, input, sum) * gate, lanes);
  };
  const auto keep = [&](float* block, int64_t token) {
    for (int64_t n = 0; n < states; ++n) store(block + a.offset + n * a.channels + i, state[n], lanes);
    if (!drafts) return;
    store(row_of(block, 0), splat(span.last(token)), lanes);
    store(row_of(block, 1), splat(static_cast<float>(1 - half)), lanes);
  };
  for (int64_t token = 0; token < span.certain;) {
    float* block = span.block_of(span.position + token);
    for (const int64_t end = span.end_of_block(token); token < end; ++token) compute(token);
    keep(block, token - 1);
  }
  span.for_draft_blocks([&](float* block) { keep(block, span.certain - 1); });
  for (int64_t token = span.certain; token < span.tokens; ++token) {
    const int64_t draft = token - span.certain;
    compute(token);
    span.for_draft_blocks([&](float* block) {
      store(row_of(block, 2 + 2 * draft), dt, lanes);
      store(row_of(block, 3 + 2 * draft), dt_x, lanes);
      if (i == 0) std::copy_n(a.b + (span.row + token) * a.b_stride, states, b_of(block, 1 - half, draft));
    });
  }
}

void selective_scan(const SelectiveScan& a, const Step& step, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t sequence = 0; sequence < step.sequences; ++sequence) {
      const StateSpan span(a.states, step, sequence);
      if (span.tokens <= 0) continue;
      for_vectors(end - begin, [&](int64_t i, auto lanes) {
        if (a.state_size == 16)
          scan_vector<16, T>(a, span, begin + i, lanes);
        else
          scan_vector<0, T>(a, span, begin + i, lanes);
      });
    }
  });
}

// ---- Mamba 2: a head has a state [state_size, head_dim] ----------------------------------------------------------------

// Advances `count` vectors of the state's columns by one token, and adds their part of S^T C to the sums. `from` is the
// state before, `to` the state after, perhaps in the same place. Without c there are no sums.
template <int count, typename L>
OCTAVO_INLINE void advance(const float* from, float* to, int64_t stride, int64_t states, float decay, const F32* dt_x,
                           const float* b, const float* c, F32* sums, L lanes) {
  const F32 keep = splat(decay);
  for (int64_t n = 0; n < states; ++n) {
    const F32 key = splat(b[n]), query = splat(c ? c[n] : 0.0f);
    for (int j = 0; j < count; ++j) {
      const int64_t at = n * stride + j * kLanes;
      const F32 next = fma(key, dt_x[j], load(from + at, lanes) * keep);
      store(to + at, next, lanes);
      if (c) sums[j] = fma(query, next, sums[j]);
    }
  }
}

// Calls f(first column, integral constant of the number of vectors, lanes) for parts of a row.
template <typename F>
OCTAVO_INLINE void for_columns(int64_t width, const F& f) {
  int64_t v = 0;
  for (; v + 8 * kLanes <= width; v += 8 * kLanes) f(v, std::integral_constant<int, 8>{}, Full{});
  for (; v + 4 * kLanes <= width; v += 4 * kLanes) f(v, std::integral_constant<int, 4>{}, Full{});
  for (; v + kLanes <= width; v += kLanes) f(v, std::integral_constant<int, 1>{}, Full{});
  if (v < width) f(v, std::integral_constant<int, 1>{}, Tail{static_cast<int>(width - v)});
}

// The rows of a token and head.
template <typename T>
struct HeadToken {
  const T *x, *z;  // of the head; z may be null
  float b[SsdScan::kMaxStateSize], c[SsdScan::kMaxStateSize];
  float dt, decay;

  OCTAVO_INLINE void read(const SsdScan& a, int64_t row, int64_t head) {
    const int64_t inner = a.heads * a.head_dim, group = head / (a.heads / a.groups);
    const T* xbc = static_cast<const T*>(a.xbc) + row * a.xbc_stride;
    x = xbc + head * a.head_dim;
    z = a.z ? static_cast<const T*>(a.z) + row * a.z_stride + head * a.head_dim : nullptr;
    const T* keys = xbc + inner + group * a.state_size;
    const T* queries = keys + a.groups * a.state_size;
    for_vectors(a.state_size, [&](int64_t i, auto lanes) {
      store(b + i, load(keys + i, lanes), lanes);
      store(c + i, load(queries + i, lanes), lanes);
    });
    const float input = load_one(static_cast<const T*>(a.dt) + row * a.dt_stride + head);
    dt = softplus(splat(fma(input, a.dt_scale, a.dt_bias[head])))[0];
    dt = min(a.dt_most, max(a.dt_least, dt));  // NaN of NaN
    decay = exp(splat(dt * a.decay[head]))[0];
  }
};

// One token of `count` vectors of a head's columns from `i` on; `from`, `to` and `kept`, which gets dt x unless it is null,
// are those of the whole head.
template <int count, typename T, typename O, typename L>
OCTAVO_INLINE void columns(const SsdScan& a, const HeadToken<T>& token, const float* from, float* to, float skip, O* out,
                           float* kept, int64_t i, L lanes) {
  F32 x[count], dt_x[count], sums[count] = {};
  for (int j = 0; j < count; ++j) {
    x[j] = load(token.x + i + j * kLanes, lanes);
    dt_x[j] = x[j] * token.dt;
    if (kept) store(kept + i + j * kLanes, dt_x[j], lanes);
  }
  advance<count>(from + i, to + i, a.head_dim, a.state_size, token.decay, dt_x, token.b, token.c, sums, lanes);
  for (int j = 0; j < count; ++j) {
    F32 y = fma(splat(skip), x[j], sums[j]) * a.scale;
    if (token.z) y *= silu(load(token.z + i + j * kLanes, lanes) * a.gate_scale);
    store(out + i + j * kLanes, y, lanes);
  }
}

// One head of one sequence, see compute_head.
template <typename T, typename O>
struct Head {
  const SsdScan& a;
  const StateSpan& span;
  const int64_t head, width = a.head_dim, size = a.state_size * width, change_size = a.change_floats();

  float* state(float* block) const { return block + a.offset + head * size; }
  float* kept(float* block) const {
    return block + a.offset + a.heads * size + head * (1 + a.states.drafts * change_size);
  }

  void compute(int64_t i, const float* from, float* to, float* change) const {
    const int64_t row = span.row + i;
    HeadToken<T> token;
    token.read(a, row, head);
    if (change) {
      *change++ = token.decay;
      change = std::copy_n(token.b, a.state_size, change);
    }
    O* out = static_cast<O*>(a.out) + (row * a.heads + head) * width;
    for_columns(width, [&](int64_t v, auto count, auto lanes) {
      columns<count>(a, token, from, to, a.skip[head], out, change, v, lanes);
    });
  }

  void apply(const float* from, float* to, const float* change) const {
    const float *b = change + 1, *values = b + a.state_size;
    for_columns(width, [&](int64_t v, auto count, auto lanes) {
      F32 dt_x[count], sums[count] = {};
      for (int j = 0; j < count; ++j) dt_x[j] = load(values + v + j * kLanes, lanes);
      advance<count>(from + v, to + v, width, a.state_size, change[0], dt_x, b, nullptr, sums, lanes);
    });
  }
};

template <typename T, typename O>
void head_of_sequence(const SsdScan& a, const Step& step, int64_t head, int64_t sequence) {
  const StateSpan span(a.states, step, sequence);
  if (span.tokens > 0) compute_head(Head<T, O>{a, span, head}, span);
}

void ssd_scan(const SsdScan& a, const Step& step, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto type) {
    with_type(a.out_dtype, [&](auto out_type) {
      using T = std::remove_pointer_t<decltype(type)>;
      using O = std::remove_pointer_t<decltype(out_type)>;
      for (int64_t i = begin; i < end; ++i) head_of_sequence<T, O>(a, step, i / step.sequences, i % step.sequences);
    });
  });
}

void silu_gate(const SiluGate& a, const Step&, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = static_cast<const T*>(a.gate) + row * a.gate_stride;
      T* out = static_cast<T*>(a.out) + row * a.width;
      for_vectors(a.width, [&](int64_t i, auto lanes) {
        store(out + i, load(a.x + row * a.x_stride + i, lanes) * silu(load(gate + i, lanes) * a.scale), lanes);
      });
    }
  });
}

}  // namespace

const SelectiveScanTable* selective_scan_table() {
  static const SelectiveScanTable table{selective_scan, ssd_scan, silu_gate};
  return &table;
}

}  // namespace octavo::OCTAVO_ISA
