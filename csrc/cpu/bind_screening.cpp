// The language-model head of steps that want only the most likely token of each row: an 8-bit copy of the matrix says which
// tokens can be it, and these alone are multiplied exactly.
//
// The exact logit of a token is the float32 that Linear computes; call it L. Let w be the token's row of the matrix, x the
// input, w' and x' what the 8-bit product multiplies in their place (codes times scales, as real numbers), S the float32
// that it computes, and |.| the Euclidean norm. Then, with u = 2^-24,
//   |L - w.x|     <= c |w| |x|   c = 2ku / (1 - 2ku): a product and a sum of each of k terms, each rounded at most once
//                                (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1), and the
//                                sum of the terms' magnitudes is at most |w| |x| (Cauchy-Schwarz);
//   |w.x - w'.x'| <= |w - w'| |x| + |w'| |x - x'|,   as it is (w - w').x + w'.(x - x');
//   |w'.x' - S|   <= d |w'| |x'|   as c, over the groups of 32 terms, whose integer products are exact; the group's terms
//                                are at most as great as its norms, and |x'| <= |x| + |x - x'|.
// Together |L - S| <= of_inputs |x| + of_rest |x - x'|, with of_inputs = |w - w'| + c |w| + d |w'| and of_rest = (1 + d) |w'|,
// which are made with the weights, rounded up; kFloor is for underflow. Rows whose sums might overflow are multiplied in
// full.
//
// A token whose S + error is below the greatest S - error has a lesser logit than that one. The others' groups of columns are
// multiplied by the kernel of Linear, which gives a column the same bits whatever is beside it. So the token is the one that
// the full product would give, the lowest of those with equal logits.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "gemm.hpp"
#include "gemm_pack.hpp"
#include "quant.hpp"
#include "sampling.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

static_assert(kTokenGroup == kGroup);

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Numbers that become zero, or lose bits, as they are below 2^-126 change a sum by less than k 2^-124 (1 + |x|) (1 + |w|): for
// any k below 2^20 that is less than this, times the same.
constexpr float kFloor = 1e-30f;
// Where |x|, and |w| |x|, are below this, no sum is near the greatest float32.
constexpr float kMost = 1e30f;

// Of an input row, and of what quantising leaves of it; rounded up.
struct Norms {
  float inputs, rest;
};

// Quantises a row as the 8-bit product does: its codes do not depend on other rows.
class Quantizer {
 public:
  explicit Quantizer(int64_t k)
      : k_(k), groups_(static_cast<size_t>((k + kQuantGroup - 1) / kQuantGroup)), memory_(groups_.size() * kQuantGroup + 16) {}

  // Infinite, or not numbers, if a value is.
  Norms norms(const char* x, Dtype dtype) {
    auto* codes = reinterpret_cast<int8_t*>((reinterpret_cast<uintptr_t>(memory_.data()) + 15) / 16 * 16);
    isa().quant->quantize(x, dtype, k_, {codes, nullptr, groups_.data(), static_cast<int64_t>(groups_.size()), 1}, 0);
    double inputs = 0, rest = 0;
    for (int64_t i = 0; i < k_; ++i) {
      const double value = dtype == Dtype::bf16 ? widened(reinterpret_cast<const uint16_t*>(x)[i])
                                                : reinterpret_cast<const float*>(x)[i];
      const double left = value - static_cast<double>(groups_[static_cast<size_t>(i / kQuantGroup)].scale) * codes[i];
      inputs += value * value;
      rest += left * left;
    }
    constexpr double kUp = 1 + 1e-6;  // more than rounding takes off
    return {static_cast<float>(std::sqrt(inputs) * kUp), static_cast<float>(std::sqrt(rest) * kUp)};
  }

 private:
  static float widened(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }

  int64_t k_;
  std::vector<QuantGroup> groups_;
  std::vector<int8_t> memory_;
};

// In steps that want more than the most likely token of each row, the exact product. In others, `tokens` gets them, or the
// reasons for which there are none (choose_token), and what is in `logits` is not defined.
class ScreenedHead : public Op {
 public:
  struct Buffers {
    const char* x;
    int64_t x_stride;  // elements
    Dtype x_dtype;
    float* logits;
    int64_t logits_stride;
    int64_t* tokens;
  };

  // `exact` and `screen` compute all logits of x, with the weights and with their copy in 8 bits; greatest: the greatest |w|.
  ScreenedHead(OpPtr exact, OpPtr screen, std::shared_ptr<const PackedLinear> weights, const Buffers& buffers,
               const float* of_inputs, const float* of_rest, float greatest)
      : exact_(std::move(exact)), screen_(std::move(screen)), weights_(std::move(weights)), b_(buffers),
        of_inputs_(of_inputs), of_rest_(of_rest), greatest_(greatest), quantizer_(weights_->k()) {
    const WeightView& view = weights_->view();
    if (view.bias != nullptr || weights_->order() != PackedLinear::Order::plain || view.dtype != b_.x_dtype)
      throw std::invalid_argument("a screened head has no bias and no gate, and inputs of the type of its weights");
    chunks_ = (view.groups + kGroupsOfTask - 1) / kGroupsOfTask;
  }

  Bytes first_weights(const Step& step, int thread, int threads) const override {
    return (screens(step) ? screen_ : exact_)->first_weights(step, thread, threads);
  }

  void run(const Step& step) override {
    if (screens(step) && measure_inputs(step.tokens)) {
      screen_->run(step);
      find_candidates(step.tokens);
      if (static_cast<int64_t>(candidates_.size()) <= step.tokens * weights_->view().groups / kShare) return choose(step.tokens);
    }
    exact_->run(step);
    if (!step.only_most_likely) return;
    const Filters greedy{0, 1, 1, 0};
    parallel_for(step.tokens, [&](int64_t row) {
      b_.tokens[row] = choose_token(b_.logits + row * b_.logits_stride, weights_->view().n, greedy, nullptr, nullptr);
    });
  }

 private:
  static constexpr int64_t kMostRows = 4;        // measured: 8 rows gain nothing
  static constexpr int64_t kGroupsOfTask = 256;  // whose bounds are looked at
  static constexpr int64_t kShare = 8;           // one in so many groups at most is multiplied one by one

  struct Candidate {
    int64_t row, group;
    int64_t token;  // the most likely of the group
    float logit;
  };

  static bool screens(const Step& step) { return step.only_most_likely && step.tokens <= kMostRows; }

  // Whether errors can be bounded: all is finite, and will be.
  bool measure_inputs(int64_t rows) {
    norms_.resize(static_cast<size_t>(rows));
    for (int64_t row = 0; row < rows; ++row) {
      Norms& norms = norms_[static_cast<size_t>(row)];
      norms = quantizer_.norms(x_of(row), b_.x_dtype);
      if (!(norms.inputs < kMost && norms.inputs * greatest_ < kMost)) return false;
    }
    return true;
  }

  void find_candidates(int64_t rows) {
    const SamplingTable& table = *isa().sampling;
    const int64_t n = weights_->view().n, groups = weights_->view().groups;
    const auto tasks = static_cast<size_t>(rows * chunks_);
    bounds_.resize(tasks);
    counts_.resize(tasks);
    reaching_.resize(tasks * kGroupsOfTask);
    parallel_for(rows * chunks_, [&](int64_t task) {
      const int64_t row = task / chunks_, first = task % chunks_ * kGroupsOfTask * kGroup;
      const Norms& norms = norms_[static_cast<size_t>(row)];
      const LogitErrors errors{of_inputs_, of_rest_, norms.inputs, norms.rest,
                               kFloor * (1 + norms.inputs) * (1 + greatest_)};
      bounds_[static_cast<size_t>(task)] =
          table.bound_logits(logits_of(row), first, std::min(n, first + kGroupsOfTask * kGroup), errors);
    });
    parallel_for(rows * chunks_, [&](int64_t task) {
      const int64_t row = task / chunks_, first = task % chunks_ * kGroupsOfTask;
      const float* bounds = bounds_.data() + row * chunks_;
      counts_[static_cast<size_t>(task)] =
          table.groups_reaching(logits_of(row), n, first, std::min(groups, first + kGroupsOfTask),
                                *std::max_element(bounds, bounds + chunks_), reaching_.data() + task * kGroupsOfTask);
    });
    candidates_.clear();
    for (int64_t task = 0; task < rows * chunks_; ++task)
      for (int64_t i = 0; i < counts_[static_cast<size_t>(task)]; ++i)
        candidates_.push_back({task / chunks_, reaching_[static_cast<size_t>(task * kGroupsOfTask + i)], 0, 0});
  }

  void choose(int64_t rows) {
    const WeightView& view = weights_->view();
    const int64_t stride = (view.k + 15) / 16 * 16;
    inputs_.resize(static_cast<size_t>(rows * stride));
    for (int64_t row = 0; row < rows; ++row)
      isa().gemm->prepare(x_of(row), b_.x_dtype, 0, weights_->k(), view.dtype, inputs_.data() + row * stride, view.k, stride, 1);
    parallel_for(static_cast<int64_t>(candidates_.size()), [&](int64_t i) {
      const auto at = static_cast<size_t>(i);
      multiply(candidates_[at], candidates_[std::min(at + 1, candidates_.size() - 1)].group, stride);
    });
    const Candidate* best = nullptr;
    for (const Candidate& candidate : candidates_) {  // by row, then by token
      if (best == nullptr || best->row != candidate.row || candidate.logit > best->logit) best = &candidate;
      b_.tokens[candidate.row] = best->token;
    }
  }

  // All logits of a candidate's group, and the most likely of them; fetches the group that is multiplied next.
  void multiply(Candidate& candidate, int64_t next, int64_t stride) const {
    Product product;
    product.weights = weights_->view();
    product.x = inputs_.data() + candidate.row * stride;
    product.x_stride = stride;
    product.out = logits_of(candidate.row);
    product.out_stride = b_.logits_stride;
    const int64_t group_bytes = product.weights.k * kGroup * (product.weights.dtype == Dtype::bf16 ? 2 : 4);
    product.next = static_cast<const char*>(product.weights.data) + next * group_bytes;
    isa().gemm->multiply(product, candidate.group, candidate.group + 1, 0, 1);
    const float* logits = logits_of(candidate.row);
    const int64_t first = candidate.group * kGroup, end = std::min(product.weights.n, first + kGroup);
    candidate.token = std::max_element(logits + first, logits + end) - logits;
    candidate.logit = logits[candidate.token];
  }

  const char* x_of(int64_t row) const { return b_.x + row * b_.x_stride * (b_.x_dtype == Dtype::bf16 ? 2 : 4); }
  float* logits_of(int64_t row) const { return b_.logits + row * b_.logits_stride; }

  OpPtr exact_, screen_;
  std::shared_ptr<const PackedLinear> weights_;
  Buffers b_;
  const float* of_inputs_;
  const float* of_rest_;
  float greatest_;
  int64_t chunks_;
  Quantizer quantizer_;
  // Scratch memory of a step.
  std::vector<Norms> norms_;
  std::vector<float> bounds_, inputs_;
  std::vector<int64_t> counts_;
  std::vector<int32_t> reaching_;
  std::vector<Candidate> candidates_;
};

OpPtr screened_head(OpPtr exact, OpPtr screen, std::shared_ptr<const PackedLinear> weights, uintptr_t x, int64_t x_stride,
                    Dtype x_dtype, uintptr_t logits, int64_t logits_stride, uintptr_t tokens, uintptr_t of_inputs,
                    uintptr_t of_rest, float greatest) {
  const ScreenedHead::Buffers buffers{pointer<char>(x), x_stride, x_dtype, pointer<float>(logits), logits_stride,
                                      pointer<int64_t>(tokens)};
  return std::make_shared<ScreenedHead>(std::move(exact), std::move(screen), std::move(weights), buffers,
                                        pointer<float>(of_inputs), pointer<float>(of_rest), greatest);
}

}  // namespace

void bind_screening(nb::module_& m) {
  m.def("screened_head", &screened_head, "exact"_a, "screen"_a, "weights"_a, "x"_a, "x_stride"_a, "x_dtype"_a, "logits"_a,
        "logits_stride"_a, "tokens"_a, "of_inputs"_a, "of_rest"_a, "greatest"_a,
        "The operation `exact` (all logits of x, with the weights); in steps with only_most_likely the token of each row that "
        "its logits make the most likely, with the help of `screen` (the same in 8 bits) and bounds of its errors.");
}

}  // namespace octavo
