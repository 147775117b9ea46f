// The states of rows, and their scores of a piece before they become weights.
#pragma once
#include <cstring>

#include "attention_math.hpp"

namespace octavo::OCTAVO_ISA {

namespace {

// The states of a tile's rows: of each a result [width], not yet divided by its sum, its largest score and its sum.
struct StateLayout {
  int64_t width, stride;

  explicit StateLayout(const Attention& a) : width(a.shape.padded_value()), stride(state_floats(a)) {}

  float& top(float* states, int64_t row) const { return states[row * stride + width]; }
  float& sum_of(float* states, int64_t row) const { return states[row * stride + width + 1]; }

  // totals = totals and then states. A row that saw nothing of the piece has a top of -inf and adds nothing.
  void fold(float* totals, float* states, int64_t rows) const {
    for (int64_t row = 0; row < rows; ++row) {
      const float new_top = top(states, row), old_top = top(totals, row);
      if (new_top == -kInfinity && sum_of(states, row) == 0.0f) continue;
      const int64_t first = row * stride;
      if (old_top == -kInfinity && sum_of(totals, row) == 0.0f) {
        std::memcpy(totals + first, states + first, sizeof(float) * static_cast<size_t>(stride));
        continue;
      }
      const float highest = max(old_top, new_top);
      const float old_part = exp2_not_above_zero(old_top - highest), new_part = exp2_not_above_zero(new_top - highest);
      for (int64_t i = first; i < first + width; i += kLanes)
        store(totals + i, fma(load(totals + i), splat(old_part), load(states + i) * new_part));
      sum_of(totals, row) = fma(sum_of(totals, row), old_part, sum_of(states, row) * new_part);
      top(totals, row) = highest;
    }
  }
};

OCTAVO_INLINE I32 counting() {
  I32 x;
  for (int i = 0; i < kLanes; ++i) x[i] = i;
  return x;
}

// Of whole vectors; a NaN is passed over. Four chains, as one would be waited for.
OCTAVO_INLINE float largest(const float* scores, int32_t begin, int32_t end) {
  F32 a = splat(-kInfinity), b = a, c = a, d = a;
  int32_t i = begin;
  for (; i + 3 * kLanes < end; i += 4 * kLanes) {
    a = max(load(scores + i), a);
    b = max(load(scores + i + kLanes), b);
    c = max(load(scores + i + 2 * kLanes), c);
    d = max(load(scores + i + 3 * kLanes), d);
  }
  for (; i < end; i += kLanes) a = max(load(scores + i), a);
  return max(max(max(a, b), max(c, d)));
}

// What scores [begin, end) of a head are besides the products of query and key. `scales`: of an int8 cache's keys, or null;
// `distance`: the position of score 0, less the query's.
OCTAVO_INLINE void finish_scores(const Attention& a, int64_t head, int32_t distance, const float* scales, float* scores,
                                 int32_t begin, int32_t end) {
  const float slope = a.alibi ? a.alibi[head] * kLog2e : 0.0f;
  const float* bias = a.bias ? a.bias + head * a.bias_stride + a.bias_reach : nullptr;
  // The outermost numbers of the table are alike, so a vector beyond them has the values of one at the end.
  const auto reach = static_cast<int32_t>(a.bias_reach);
  for (int32_t i = begin; i < end; i += kLanes) {
    F32 s = load(scores + i);
    if (scales) s *= load(scales + i);
    if (a.soft_cap > 0.0f) s = soft_capped(s, a.soft_cap) * kLog2e;
    if (a.alibi) s = fma(__builtin_convertvector(counting() + (i + distance), F32), splat(slope), s);
    if (bias) {
      const int32_t at = i + distance;
      s = fma(load(bias + (at < -reach ? -reach : at > reach - kLanes ? reach - kLanes : at)), splat(kLog2e), s);
    }
    store(scores + i, s);
  }
}

}  // namespace

}  // namespace octavo::OCTAVO_ISA
