// Selective state spaces for Python: factories of tape operations.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "bind.hpp"
#include "ranges.hpp"
#include "selective_scan.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

namespace {

// Channels of a unit of work: whole lines of the cache in every array.
constexpr int64_t kChannels = 32;
// Work of a number of a state in one token: mostly its exponential function.
constexpr int64_t kWorkOfNumber = 16;

void check(Dtype dtype, int64_t state_size, int64_t most, const StateMemory& states) {
  if (dtype != Dtype::f32 && dtype != Dtype::bf16) throw std::invalid_argument("activations must be f32 or bf16");
  if (state_size < 1 || state_size > most)
    throw std::invalid_argument("a scan has states of 1 to " + std::to_string(most) + " numbers, not " +
                                std::to_string(state_size));
  if (states.block_tokens < 1) throw std::invalid_argument("a block must have at least 1 token");
}

class SelectiveScanOp : public Op {
 public:
  explicit SelectiveScanOp(const SelectiveScan& arguments) : arguments_(arguments) {}
  void run(const Step& step) override {
    arguments_.states.check(step);
    const Step own = step.of_group(arguments_.states.group);
    const int64_t channels = arguments_.channels, units = (channels + kChannels - 1) / kChannels;
    const int64_t work = step.tokens * kChannels * arguments_.state_size * kWorkOfNumber;
    for_row_ranges(units, work, [&](int64_t begin, int64_t end) {
      isa().selective_scan->selective_scan(arguments_, own, begin * kChannels, std::min(end * kChannels, channels));
    });
  }

 private:
  SelectiveScan arguments_;
};

class SsdScanOp : public Op {
 public:
  explicit SsdScanOp(const SsdScan& arguments) : arguments_(arguments) {}
  void run(const Step& step) override {
    if (step.sequences == 0) return;
    arguments_.states.check(step);
    const Step own = step.of_group(arguments_.states.group);
    // A head's state is read and written once for each token.
    const int64_t work = 2 * arguments_.state_size * arguments_.head_dim * step.tokens / step.sequences;
    for_row_ranges(arguments_.heads * step.sequences, work, [&](int64_t begin, int64_t end) {
      isa().selective_scan->ssd_scan(arguments_, own, begin, end);
    });
  }

 private:
  SsdScan arguments_;
};

class SiluGateOp : public TokenOp {
 public:
  explicit SiluGateOp(const SiluGate& arguments) : TokenOp(8 * arguments.width), arguments_(arguments) {}
  void run_tokens(const Step& step, int64_t begin, int64_t end) const override {
    isa().selective_scan->silu_gate(arguments_, step, begin, end);
  }

 private:
  SiluGate arguments_;
};

OpPtr selective_scan(uintptr_t x, int64_t x_stride, uintptr_t z, int64_t z_stride, Dtype dtype, uintptr_t out,
                     uintptr_t dt, int64_t dt_stride, uintptr_t b, int64_t b_stride, uintptr_t c, int64_t c_stride,
                     uintptr_t decay, uintptr_t dt_bias, uintptr_t skip, int64_t channels, int64_t state_size,
                     uintptr_t states, int64_t block_floats, int64_t block_tokens, int64_t drafts,
                     int64_t group, int64_t offset) {
  const StateMemory memory{pointer<float>(states), block_floats, block_tokens, drafts, group};
  check(dtype, state_size, SelectiveScan::kMaxStateSize, memory);
  const SelectiveScan arguments{
      pointer<void>(x), x_stride, pointer<void>(z), z_stride, dtype, pointer<void>(out), pointer<float>(dt), dt_stride,
      pointer<float>(b), b_stride, pointer<float>(c), c_stride, pointer<float>(decay), pointer<float>(dt_bias),
      pointer<float>(skip), channels, state_size, memory, offset};
  memory.check_room(offset, arguments.floats());
  return std::make_shared<SelectiveScanOp>(arguments);
}

OpPtr ssd_scan(uintptr_t xbc, int64_t xbc_stride, uintptr_t dt, int64_t dt_stride, uintptr_t z, int64_t z_stride,
               Dtype dtype, uintptr_t out, Dtype out_dtype, uintptr_t decay, uintptr_t dt_bias, uintptr_t skip,
               int64_t heads, int64_t groups, int64_t head_dim, int64_t state_size, double dt_least, double dt_most,
               double dt_scale, double gate_scale, double scale, uintptr_t states, int64_t block_floats,
               int64_t block_tokens, int64_t drafts, int64_t group, int64_t offset) {
  const StateMemory memory{pointer<float>(states), block_floats, block_tokens, drafts, group};
  check(dtype, state_size, SsdScan::kMaxStateSize, memory);
  if (out_dtype != Dtype::f32 && out_dtype != Dtype::bf16) throw std::invalid_argument("results must be f32 or bf16");
  if (groups < 1 || heads % groups != 0) throw std::invalid_argument("heads must be a multiple of groups");
  const auto f32 = [](double value) { return static_cast<float>(value); };
  const SsdScan arguments{
      pointer<void>(xbc), xbc_stride, pointer<void>(dt), dt_stride, pointer<void>(z), z_stride, dtype,
      pointer<void>(out), out_dtype, pointer<float>(decay), pointer<float>(dt_bias), pointer<float>(skip), heads,
      groups, head_dim, state_size, f32(dt_least), f32(dt_most), f32(dt_scale), f32(gate_scale), f32(scale), memory,
      offset};
  memory.check_room(offset, arguments.floats());
  return std::make_shared<SsdScanOp>(arguments);
}

OpPtr silu_gate(uintptr_t x, int64_t x_stride, uintptr_t gate, int64_t gate_stride, int64_t width, double scale,
                Dtype dtype, uintptr_t out) {
  if (dtype != Dtype::f32 && dtype != Dtype::bf16) throw std::invalid_argument("activations must be f32 or bf16");
  return std::make_shared<SiluGateOp>(SiluGate{pointer<float>(x), x_stride, pointer<void>(gate), gate_stride, width,
                                               static_cast<float>(scale), dtype, pointer<void>(out)});
}

}  // namespace

void bind_selective_scan(nb::module_& m) {
  m.def("selective_scan", &selective_scan);
  m.def("ssd_scan", &ssd_scan);
  m.def("silu_gate", &silu_gate);
}

}  // namespace octavo
