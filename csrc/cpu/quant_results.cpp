// Quantised products with an activation: what becomes of their sums, of an instruction set of floats.
#include "activations.hpp"
#include "quant_store.hpp"

namespace octavo::OCTAVO_ISA {

static void store_activated(const QuantOutput& out, int64_t n, int64_t panel, int panels, int64_t row, int rows,
                            const float (*sums)[kQuantTile][kPanel]) {
  with_activation(out.activation, [&](auto f) {
    if (out.dtype == Dtype::f32)
      store_tile<float>(out, n, panel, panels, row, rows, sums, f);
    else
      store_tile<uint16_t>(out, n, panel, panels, row, rows, sums, f);
  });
}

const QuantResults* quant_results() {
  static const QuantResults table{store_activated};
  return &table;
}

}  // namespace octavo::OCTAVO_ISA
