// Recurrent states for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "bind.hpp"
#include "ranges.hpp"
#include "states.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

namespace {

// Channels of a unit of work: whole lines of the cache in every array.
constexpr int64_t kChannels = 32;

class CausalConvOp : public Op {
 public:
  explicit CausalConvOp(const CausalConv& conv) : conv_(conv) {}
  void run(const Step& step) override {
    conv_.states.check(step);
    const Step own = step.of_group(conv_.states.group);
    const int64_t units = (conv_.channels + kChannels - 1) / kChannels;
    for_row_ranges(units, step.tokens * kChannels * (conv_.taps + 4), [&](int64_t begin, int64_t end) {
      isa().states->causal_conv(conv_, own, begin * kChannels, std::min(end * kChannels, conv_.channels));
    });
  }

 private:
  CausalConv conv_;
};

OpPtr causal_conv(uintptr_t x, int64_t x_stride, Dtype dtype, uintptr_t out, uintptr_t weight, int64_t taps,
                  int64_t channels, uintptr_t bias, uintptr_t in_gate, int64_t in_gate_stride, uintptr_t out_gate,
                  int64_t out_gate_stride, bool silu, uintptr_t states, int64_t block_floats, int64_t block_tokens,
                  int64_t drafts, int64_t group, int64_t offset) {
  if (dtype != Dtype::f32 && dtype != Dtype::bf16) throw std::invalid_argument("inputs must be f32 or bf16, not i8");
  if (taps < 2 || taps > CausalConv::kMaxTaps)
    throw std::invalid_argument("a convolution has 2 to " + std::to_string(CausalConv::kMaxTaps) + " taps, not " +
                                std::to_string(taps));
  if (block_tokens < 1) throw std::invalid_argument("a block must have at least 1 token");
  const CausalConv conv{pointer<void>(x), x_stride, dtype, pointer<void>(out), pointer<float>(weight), taps, channels,
                        pointer<float>(bias), pointer<void>(in_gate), in_gate_stride, pointer<void>(out_gate),
                        out_gate_stride, silu,
                        StateMemory{pointer<float>(states), block_floats, block_tokens, drafts, group}, offset};
  conv.states.check_room(offset, conv.floats());
  return std::make_shared<CausalConvOp>(conv);
}

}  // namespace

void bind_states(nb::module_& m) {
  m.def("causal_conv", &causal_conv, "x"_a, "x_stride"_a, "dtype"_a, "out"_a, "weight"_a, "taps"_a, "channels"_a,
        "bias"_a, "in_gate"_a, "in_gate_stride"_a, "out_gate"_a, "out_gate_stride"_a, "silu"_a, "states"_a,
        "block_floats"_a, "block_tokens"_a, "drafts"_a, "group"_a, "offset"_a);
}

}  // namespace octavo
