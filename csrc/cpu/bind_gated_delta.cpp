// The gated delta rule and the gate of attention for Python: factories of tape operations.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <stdexcept>

#include "bind.hpp"
#include "gated_delta.hpp"
#include "ranges.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

namespace {

class GatedDeltaOp : public Op {
 public:
  explicit GatedDeltaOp(const GatedDelta& arguments) : arguments_(arguments) {}

  void run(const Step& step) override {
    if (step.sequences == 0) return;
    arguments_.states.check(step);
    const Step own = step.of_group(arguments_.states.group);
    // A head's state is read twice and written once for each token.
    const int64_t numbers = 3 * arguments_.key_dim * arguments_.value_dim;
    const int64_t work = numbers * step.tokens / step.sequences;
    for_row_ranges(arguments_.value_heads * step.sequences, work, [&](int64_t begin, int64_t end) {
      isa().gated_delta->gated_delta(arguments_, own, begin, end);
    });
  }

 private:
  GatedDelta arguments_;
};

class SigmoidGateOp : public TokenOp {
 public:
  explicit SigmoidGateOp(const SigmoidGate& arguments) : TokenOp(4 * arguments.width), arguments_(arguments) {}

  void run_tokens(const Step& step, int64_t begin, int64_t end) const override {
    isa().gated_delta->sigmoid_gate(arguments_, step, begin, end);
  }

 private:
  SigmoidGate arguments_;
};

OpPtr gated_delta(uintptr_t qkv, int64_t qkv_stride, uintptr_t z, int64_t z_stride, uintptr_t b, int64_t b_stride,
                  uintptr_t a, int64_t a_stride, Dtype dtype, uintptr_t out, uintptr_t decay, uintptr_t dt_bias,
                  uintptr_t weight, int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim,
                  double eps, double beta_scale, bool per_channel, bool sigmoid, uintptr_t states, int64_t block_floats,
                  int64_t block_tokens, int64_t drafts, int64_t group, int64_t offset) {
  if (dtype != Dtype::f32 && dtype != Dtype::bf16) throw std::invalid_argument("activations must be f32 or bf16");
  if (key_dim > GatedDelta::kMaxDim || value_dim > GatedDelta::kMaxDim)
    throw std::invalid_argument("heads of a gated delta rule have at most 512 dimensions");
  if (key_heads < 1 || value_heads % key_heads != 0)
    throw std::invalid_argument("value heads must be a multiple of key heads");
  const GatedDelta arguments{
      pointer<void>(qkv), qkv_stride, pointer<void>(z), z_stride, pointer<void>(b), b_stride, pointer<void>(a),
      a_stride, dtype, pointer<void>(out), pointer<float>(decay), pointer<float>(dt_bias), pointer<float>(weight),
      key_heads, value_heads, key_dim, value_dim, static_cast<float>(eps), static_cast<float>(beta_scale), per_channel,
      sigmoid, StateMemory{pointer<float>(states), block_floats, block_tokens, drafts, group}, offset};
  arguments.states.check_room(offset, arguments.floats());
  return std::make_shared<GatedDeltaOp>(arguments);
}

OpPtr sigmoid_gate(uintptr_t x, int64_t x_stride, uintptr_t gate, int64_t gate_stride, int64_t width, Dtype dtype) {
  if (dtype != Dtype::f32 && dtype != Dtype::bf16) throw std::invalid_argument("activations must be f32 or bf16");
  return std::make_shared<SigmoidGateOp>(
      SigmoidGate{pointer<void>(x), x_stride, pointer<void>(gate), gate_stride, width, dtype});
}

}  // namespace

void bind_gated_delta(nb::module_& m) {
  m.def("gated_delta", &gated_delta);
  m.def("sigmoid_gate", &sigmoid_gate);
}

}  // namespace octavo
