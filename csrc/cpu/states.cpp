// Recurrences over the tokens of each sequence: causal convolution.
#include "states.hpp"

#include "activations.hpp"
#include "rows.hpp"

namespace octavo::OCTAVO_ISA {

namespace {

// A vector of channels from `i` on, of one sequence. kTaps: a.taps if it is known, or 0.
template <int kTaps, typename T, typename Lanes>
OCTAVO_INLINE void conv_vector(const CausalConv& a, const StateSpan& span, int64_t i, Lanes lanes) {
  const int64_t taps = kTaps ? kTaps : a.taps;
  F32 weight[kTaps ? kTaps : CausalConv::kMaxTaps], window[kTaps ? kTaps : CausalConv::kMaxTaps];
  const int64_t drafts = a.states.drafts, last = (taps - 1 + drafts) * a.channels;
  const float* before = span.before();
  if (before) {
    before += a.offset + i;
    if (drafts) before += span.accepted(before[last]) * a.channels;
  }
  for (int64_t k = 0; k < taps; ++k) weight[k] = load(a.weight + k * a.channels + i, lanes);
  for (int64_t k = 0; k + 1 < taps; ++k) window[k] = before ? load(before + k * a.channels, lanes) : F32{};
  const F32 bias = a.bias ? load(a.bias + i, lanes) : F32{};
  const T* x = static_cast<const T*>(a.x) + span.row * a.x_stride + i;
  const T* in_gate = a.in_gate ? static_cast<const T*>(a.in_gate) + span.row * a.in_gate_stride + i : nullptr;
  const T* out_gate = a.out_gate ? static_cast<const T*>(a.out_gate) + span.row * a.out_gate_stride + i : nullptr;
  T* out = static_cast<T*>(a.out) + span.row * a.channels + i;
  const auto compute = [&](int64_t token) __attribute__((always_inline)) {
    F32 input = load(x + token * a.x_stride, lanes);
    if (in_gate) input *= load(in_gate + token * a.in_gate_stride, lanes);
    window[taps - 1] = input;
    F32 sum = bias;
    for (int64_t k = 0; k < taps; ++k) sum = fma(window[k], weight[k], sum);
    for (int64_t k = 0; k + 1 < taps; ++k) window[k] = window[k + 1];
    if (a.silu) sum = silu(sum);
    if (out_gate) sum *= load(out_gate + token * a.out_gate_stride, lanes);
    store(out + token * a.channels, sum, lanes);
    return input;
  };
  const auto keep = [&](float* block, int64_t token) {
    float* after = block + a.offset + i;
    for (int64_t k = 0; k + 1 < taps; ++k) store(after + k * a.channels, window[k], lanes);
    if (drafts) store(after + last, splat(span.last(token)), lanes);
  };
  for (int64_t token = 0; token < span.certain;) {
    float* block = span.block_of(span.position + token);
    for (const int64_t end = span.end_of_block(token); token < end; ++token) compute(token);
    keep(block, token - 1);
  }
  span.for_draft_blocks([&](float* block) { keep(block, span.certain - 1); });
  for (int64_t token = span.certain; token < span.tokens; ++token) {
    const F32 input = compute(token);
    const int64_t change = a.offset + i + (taps - 1 + token - span.certain) * a.channels;
    span.for_draft_blocks([&](float* block) { store(block + change, input, lanes); });
  }
}

template <int kTaps>
void conv_channels(const CausalConv& a, const Step& step, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t sequence = 0; sequence < step.sequences; ++sequence) {
      const StateSpan span(a.states, step, sequence);
      if (span.tokens <= 0) continue;
      for_vectors(end - begin, [&](int64_t i, auto lanes) { conv_vector<kTaps, T>(a, span, begin + i, lanes); });
    }
  });
}

void causal_conv(const CausalConv& a, const Step& step, int64_t begin, int64_t end) {
  if (a.taps == 3)
    conv_channels<3>(a, step, begin, end);
  else if (a.taps == 4)
    conv_channels<4>(a, step, begin, end);
  else
    conv_channels<0>(a, step, begin, end);
}

}  // namespace

const StatesTable* states_table() {
  static const StatesTable table{causal_conv};
  return &table;
}

}  // namespace octavo::OCTAVO_ISA
