// Embedding, activations, rotary positions and reductions of logits.
#include "pointwise.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "activations.hpp"
#include "pointwise_norm.hpp"
#include "rows.hpp"

namespace octavo::OCTAVO_ISA {

namespace {

void embedding(const Embedding& a, const Step& step, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto type) {
    with_type(a.out_dtype, [&](auto out_type) {
      const int64_t* ids = step.ids(a.ids);
      for (int64_t row = begin; row < end; ++row) {
        int64_t held = ids[row] - a.first;
        if (held < 0 || held >= a.rows) held = a.otherwise;
        auto* target = static_cast<decltype(out_type)>(a.out) + row * a.width;
        const float* add = a.add == nullptr ? nullptr : a.add + row * a.width;
        const bool known = held >= 0;
        const auto* source =
            static_cast<const std::remove_pointer_t<decltype(type)>*>(a.table) + (known ? held * a.width : 0);
        for_vectors(a.width, [&](int64_t i, auto lanes) {
          F32 sum = known ? load(source + i, lanes) * a.scale : F32{};
          if (add != nullptr) sum += load(add + i, lanes);
          store(target + i, sum, lanes);
        });
      }
    });
  });
}

// ---- activations ------------------------------------------------------------------------------------------------

template <typename T, typename O, typename F>
void activate_row(const T* x, O* out, int64_t width, bool gated, const F& f) {
  if (gated)
    for_vectors(width, [&](int64_t i, auto lanes) {
      store(out + i, octavo::OCTAVO_ISA::gated(f, load(x + i, lanes), load(x + width + i, lanes)), lanes);
    });
  else
    for_vectors(width, [&](int64_t i, auto lanes) { store(out + i, f(load(x + i, lanes)), lanes); });
}

void activate(const Activate& a, const Step&, int64_t begin, int64_t end) {
  with_type(a.x_dtype, [&](auto x_type) {
    with_type(a.out_dtype, [&](auto out_type) {
      for (int64_t row = begin; row < end; ++row) {
        const auto* x = static_cast<const std::remove_pointer_t<decltype(x_type)>*>(a.x) + row * a.x_stride;
        auto* out = static_cast<decltype(out_type)>(a.out) + row * a.out_stride;
        with_activation(a.activation, [&](auto f) { activate_row(x, out, a.width, a.gated, f); });
      }
    });
  });
}

void soft_cap(const SoftCap& a, const Step&, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    float* x = a.x + row * a.x_stride;
    for_vectors(a.width, [&](int64_t i, auto lanes) { store(x + i, soft_capped(load(x + i, lanes), a.cap), lanes); });
  }
}

void clamp(const Clamp& a, const Step&, int64_t begin, int64_t end) {
  const F32 most = splat(a.limit), least = splat(a.least);
  with_type(a.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t row = begin; row < end; ++row) {
      T* x = static_cast<T*>(a.x) + row * a.x_stride;
      for_vectors(a.width, [&](int64_t i, auto lanes) {
        const F32 here = load(x + i, lanes);
        store(x + i, here > most ? most : here < least ? least : here, lanes);
      });
    }
  });
}

void scale(const Scale& a, const Step&, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    float* x = a.x + row * a.x_stride;
    for_vectors(a.width, [&](int64_t i, auto lanes) { store(x + i, load(x + i, lanes) * a.factor, lanes); });
  }
}

void multiply(const Multiply& a, const Step&, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto type) {
    for (int64_t row = begin; row < end; ++row) {
      auto* x = static_cast<decltype(type)>(a.x) + row * a.x_stride;
      const float* factors = a.factors + row * a.factors_stride;
      for_vectors(a.width, [&](int64_t i, auto lanes) {
        const F32 product = load(x + i, lanes) * load(factors + i, lanes);
        store(x + i, a.bias == nullptr ? product : product + load(a.bias + i, lanes), lanes);
      });
    }
  });
}

void xielu_rows(const Xielu& a, const Step&, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    float* x = a.x + row * a.x_stride;
    for_vectors(a.width, [&](int64_t i, auto lanes) {
      store(x + i, xielu(load(x + i, lanes), a.positive, a.negative, a.beta, a.eps), lanes);
    });
  }
}

void query_scale(const QueryScale& a, const Step& step, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto type) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t periods = (step.positions[row] + a.offset) / a.period;
      if (periods == 0) continue;
      const float factor = static_cast<float>(1.0 + a.beta * std::log1p(static_cast<double>(periods)));
      for (int64_t head = 0; head < a.heads; ++head) {
        auto* q = static_cast<decltype(type)>(a.q) + row * a.q_stride + head * a.q_head_stride;
        for_vectors(a.width, [&](int64_t i, auto lanes) { store(q + i, load(q + i, lanes) * factor, lanes); });
      }
    }
  });
}

// ---- rotary positions ---------------------------------------------------------------------------------------------

// Rotates heads of a token, and copies `rest` more dimensions of each; cos_sin has its angles.
template <typename T>
void rotate_heads(const T* x, int64_t x_step, T* out, int64_t out_step, int64_t heads, const float* cos_sin,
                  int64_t half, int64_t rest) {
  for (int64_t head = 0; head < heads; ++head, x += x_step, out += out_step) {
    for_vectors(half, [&](int64_t i, auto lanes) {
      const F32 first = load(x + i, lanes), second = load(x + half + i, lanes);
      const F32 c = load(cos_sin + i, lanes), s = load(cos_sin + half + i, lanes);
      store(out + i, fma(first, c, -(second * s)), lanes);
      store(out + half + i, fma(second, c, first * s), lanes);
    });
    std::copy(x + 2 * half, x + 2 * half + rest, out + 2 * half);
  }
}

// The angles of a token whose sections turn by positions of their own: a row of the table where these are equal, as
// those of text are, else composed in the buffer.
const float* sectioned_angles(const Rotary& a, const Step& step, int64_t token, float* buffer) {
  const int64_t* at = step.rotary_positions + token;
  bool equal = true;
  for (int64_t axis = 1; axis < a.axes; ++axis) equal = equal && at[axis * step.rotary_stride] == at[0];
  if (equal) return a.cos_sin + at[0] * a.rotary_dim;
  const int64_t half = a.rotary_dim / 2;
  const float* rows[Rotary::kMaxAxes];
  for (int64_t axis = 0; axis < a.axes; ++axis) rows[axis] = a.cos_sin + at[axis * step.rotary_stride] * a.rotary_dim;
  for (int64_t pair = 0; pair < half; ++pair) {
    const float* row = rows[a.axis_of_pair[pair]];
    buffer[pair] = row[pair];
    buffer[half + pair] = row[half + pair];
  }
  return buffer;
}

void rotary(const Rotary& a, const Step& step, int64_t begin, int64_t end) {
  const int64_t half = a.rotary_dim / 2, rest = a.out == a.q ? 0 : a.k_head_stride - a.rotary_dim;
  float composed[Rotary::kMaxSectionedDim];
  with_type(a.dtype, [&](auto type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t row = begin; row < end; ++row) {
      const float* cos_sin = a.axes == 0 ? a.cos_sin + step.positions[row] * a.rotary_dim
                                         : sectioned_angles(a, step, row, composed);
      rotate_heads(static_cast<const T*>(a.q) + row * a.q_stride, a.q_head_stride,
                   static_cast<T*>(a.out) + row * a.out_stride, a.out_head_stride, a.heads, cos_sin, half,
                   rest);
      T* k = static_cast<T*>(a.k) + row * a.k_stride;
      rotate_heads<T>(k, a.k_head_stride, k, a.k_head_stride, a.kv_heads, cos_sin, half, 0);
    }
  });
}

// ---- logits -------------------------------------------------------------------------------------------------------

int64_t argmax(const float* row, int64_t width) {
  // Each lane keeps its best value and the vector that it was in; an earlier one wins, as only more is better.
  F32 best = splat(-std::numeric_limits<float>::infinity());
  I32 where = {}, nan = {};
  int64_t i = 0;
  for (int32_t vector = 0; i + kLanes <= width; i += kLanes, ++vector) {
    const F32 x = load(row + i);
    const I32 better = x > best;
    best = better ? x : best;
    where = better ? vector + I32{} : where;
    nan |= x != x;
  }
  float value = -std::numeric_limits<float>::infinity();
  int64_t index = 0;
  for (int lane = 0; lane < kLanes && i > 0; ++lane) {
    if (nan[lane]) return -1;
    const int64_t here = int64_t{where[lane]} * kLanes + lane;
    if (best[lane] > value || (best[lane] == value && here < index)) {
      value = best[lane];
      index = here;
    }
  }
  for (; i < width; ++i) {
    if (row[i] != row[i]) return -1;
    if (row[i] > value) {
      value = row[i];
      index = i;
    }
  }
  return index;
}

double logsumexp(const float* row, int64_t width) {
  const float infinity = std::numeric_limits<float>::infinity();
  F32 tops = splat(-infinity);
  I32 nan = {};
  float top = -infinity;
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const F32 x = load(row + i);
    tops = max(x, tops);
    nan |= x != x;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    if (nan[lane]) return std::numeric_limits<double>::quiet_NaN();
  }
  for (; i < width; ++i) {
    if (row[i] != row[i]) return std::numeric_limits<double>::quiet_NaN();
    top = max(row[i], top);
  }
  top = max(max(tops), top);
  if (top == infinity || top == -infinity) return top;
  typedef double F64 __attribute__((vector_size(8 * kLanes)));
  F64 sums = {};
  for (i = 0; i + kLanes <= width; i += kLanes) sums += __builtin_convertvector(exp(load(row + i) - top), F64);
  if (i < width) {
    const Tail tail{static_cast<int>(width - i)};
    sums += __builtin_convertvector(keep(exp(load(row + i, tail) - top), tail), F64);
  }
  double sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  return static_cast<double>(top) + std::log(sum);
}

}  // namespace

const PointwiseTable* pointwise_table() {
  static const PointwiseTable table{embedding, rms_norm,   layer_norm,  activate, soft_cap, clamp, rotary,
                                    scale,     multiply,   xielu_rows,  query_scale, argmax, logsumexp};
  return &table;
}

}  // namespace octavo::OCTAVO_ISA
