// Routing of tokens to experts, and the weighted sums of the experts' results.
#include "moe.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "rows.hpp"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr float kTaken = -std::numeric_limits<float>::infinity();
constexpr float kLeast = std::numeric_limits<float>::lowest();

F32 sigmoid(F32 x) { return 1.0f / (1.0f + exp(-x)); }

// The lowest index of the greatest of so many values; 0 if there is none that is greater than -infinity.
int64_t best_of(const float* x, int64_t count) {
  F32 greatest = splat(kTaken);
  for_vectors(count, [&](int64_t i, auto lanes) {
    F32 here = load(x + i, lanes);
    if constexpr (std::is_same_v<decltype(lanes), Tail>)
      for (int lane = lanes.lanes; lane < kLanes; ++lane) here[lane] = kTaken;
    greatest = max(here, greatest);
  });
  const float top = max(greatest);
  for (int64_t i = 0; i < count && top > kTaken; ++i)
    if (x[i] == top) return i;
  return 0;
}

// The scores of one row's logits: its softmax, or the sigmoid of each.
void score(const Routing& a, const float* logits, float* scores) {
  if (a.scoring == Scoring::sigmoid) {
    for_vectors(a.experts, [&](int64_t i, auto lanes) { store(scores + i, sigmoid(load(logits + i, lanes)), lanes); });
    return;
  }
  float top = logits[0];
  for (int64_t i = 1; i < a.experts; ++i) top = max(logits[i], top);
  for_vectors(a.experts, [&](int64_t i, auto lanes) { store(scores + i, exp(load(logits + i, lanes) - top), lanes); });
  const float sum = sum_of_vectors(a.experts, [&](int64_t i, auto lanes) { return load(scores + i, lanes); });
  for_vectors(a.experts, [&](int64_t i, auto lanes) { store(scores + i, load(scores + i, lanes) / sum, lanes); });
}

// The sum of the best of a group's scores.
float score_of_group(const float* scores, int64_t size, int64_t best_of_group) {
  std::vector<float> best(scores, scores + size);
  std::partial_sort(best.begin(), best.begin() + best_of_group, best.end(), std::greater<float>());
  float sum = 0;
  for (int64_t i = 0; i < best_of_group; ++i) sum += best[i];
  return sum;
}

// Leaves the scores of the best groups; the others can no longer be chosen.
void limit_groups(const Routing& a, float* scores) {
  const int64_t size = a.experts / a.groups;
  std::vector<float> of_group(a.groups);
  std::vector<bool> kept(a.groups);
  for (int64_t g = 0; g < a.groups; ++g) of_group[g] = score_of_group(scores + g * size, size, a.best_of_group);
  for (int64_t i = 0; i < a.top_groups; ++i) {
    const int64_t best = best_of(of_group.data(), a.groups);
    kept[best] = true;
    of_group[best] = kTaken;
  }
  for (int64_t g = 0; g < a.groups; ++g)
    if (!kept[g]) std::fill_n(scores + g * size, size, kTaken);
}

// What the choice compares: the scores, plus the bias. Sigmoids without a bias are compared by their logits, as those of
// great logits are all 1. Returns whether all are numbers.
bool compare(const Routing& a, const float* logits, const float* scores, float* choices) {
  bool is_number = true;
  const bool by_logits = a.scoring == Scoring::sigmoid && a.bias == nullptr && a.groups == 1;
  for (int64_t i = 0; i < a.experts; ++i) {
    const float value = by_logits ? logits[i] : a.bias == nullptr ? scores[i] : scores[i] + a.bias[i];
    is_number &= value == value;
    choices[i] = by_logits && value == kTaken ? kLeast : value;
  }
  return is_number;
}

// One row by SparseMixer: the best expert of those that are left is chosen again and again. Its weight is its softmax
// among the ones near it: (best - logit) / max(|logit|, best) <= 2 * jitter.
void mix_row(const Routing& a, const float* logits, float* left, int32_t* chosen, float* weights) {
  bool is_number = true;
  for (int64_t i = 0; i < a.experts; ++i) {
    is_number &= logits[i] == logits[i];
    left[i] = max(logits[i], kLeast);
  }
  if (!is_number) std::fill_n(left, a.experts, 0.0f);
  for (int64_t k = 0; k < a.top_k; ++k) {
    const int64_t best = best_of(left, a.experts);
    const float top = left[best];
    const F32 tops = splat(top);
    const float sum = sum_of_vectors(a.experts, [&](int64_t i, auto lanes) {
      const F32 logit = load(logits + i, lanes), here = load(left + i, lanes);
      const F32 factor = max(max(logit, -logit), tops);
      return keep((tops - logit) / factor > splat(2.0f * a.jitter) ? splat(0.0f) : exp(here - tops), lanes);
    });
    left[best] = kTaken;
    chosen[k] = static_cast<int32_t>(best);
    weights[k] = is_number ? 1.0f / sum : std::numeric_limits<float>::quiet_NaN();
  }
}

// One row; scores and choices have room for all experts.
void route_row(const Routing& a, const float* logits, float* scores, float* choices, int32_t* chosen, float* weights) {
  if (a.scoring == Scoring::sparsemixer) return mix_row(a, logits, choices, chosen, weights);
  score(a, logits, scores);
  const bool is_number = compare(a, logits, scores, choices);
  if (!is_number) std::fill_n(choices, a.experts, 0.0f);  // any experts: the weights make the result not a number
  if (a.groups > 1) limit_groups(a, choices);
  float sum = 0;
  for (int64_t i = 0; i < a.top_k; ++i) {
    const int64_t best = best_of(choices, a.experts);
    choices[best] = kTaken;
    chosen[i] = static_cast<int32_t>(best);
    weights[i] = is_number ? scores[best] : std::numeric_limits<float>::quiet_NaN();
    sum += weights[i];
  }
  if (a.renormalize)
    for (int64_t i = 0; i < a.top_k; ++i) weights[i] /= max(sum + 1e-20f, a.least_sum);
  for (int64_t i = 0; i < a.top_k; ++i) weights[i] *= a.factors == nullptr ? a.scale : a.scale * a.factors[chosen[i]];
  for (int64_t i = 0; i < a.shared; ++i) {
    chosen[a.top_k + i] = static_cast<int32_t>(a.experts + i);
    weights[a.top_k + i] = sigmoid(splat(logits[a.experts + i]))[0];
  }
}

void route(const Routing& a, int64_t begin, int64_t end) {
  std::vector<float> scores(2 * a.experts);
  const int64_t slots = a.top_k + a.shared;
  for (int64_t row = begin; row < end; ++row)
    route_row(a, a.logits + row * a.logits_stride, scores.data(), scores.data() + a.experts, a.chosen + row * slots,
              a.weights + row * slots);
}

void scale_row(const void* x, Dtype dtype, float scale, int64_t width, void* out) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_vectors(width, [&](int64_t i, auto lanes) {
      store(static_cast<T*>(out) + i, load(static_cast<const T*>(x) + i, lanes) * splat(scale), lanes);
    });
  });
}

void add_scaled(const float* x, int64_t x_stride, const float* scales, const int32_t* tokens, int64_t rows,
                int64_t columns, float* sums, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r, x += x_stride) {
    float* to = sums + tokens[r] * stride;
    const F32 scale = splat(scales[r]);
    for_vectors(columns, [&](int64_t i, auto lanes) {
      store(to + i, load(to + i, lanes) + load(x + i, lanes) * scale, lanes);
    });
  }
}

void join(const float* sums, int64_t stride, int pieces, int64_t piece_stride, const float* add, int64_t add_stride,
          float* out, int64_t out_stride, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r, sums += stride, out += out_stride) {
    for_vectors(columns, [&](int64_t i, auto lanes) {
      F32 sum = load(sums + i, lanes);
      if (pieces > 1) sum += load(sums + piece_stride + i, lanes);
      if (pieces > 2) sum += load(sums + 2 * piece_stride + i, lanes) + load(sums + 3 * piece_stride + i, lanes);
      store(out + i, add == nullptr ? sum : sum + load(add + r * add_stride + i, lanes), lanes);
    });
  }
}

void add_bias(const ExpertBias& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    for (int64_t slot = row * a.slots; slot < (row + 1) * a.slots; ++slot) {
      float* to = a.x + row * a.x_stride;
      const float* bias = a.table + a.chosen[slot] * a.columns;
      const F32 weight = splat(a.weights[slot]);
      for_vectors(a.columns, [&](int64_t i, auto lanes) {
        store(to + i, load(to + i, lanes) + load(bias + i, lanes) * weight, lanes);
      });
    }
}

}  // namespace

const MoeTable* moe_table() {
  static const MoeTable table{route, scale_row, add_scaled, join, add_bias};
  return &table;
}

}  // namespace octavo::OCTAVO_ISA
