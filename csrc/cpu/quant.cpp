#include "quant.hpp"

namespace octavo::OCTAVO_ISA {

const QuantTable* quant_table() {
  static const QuantTable table{};
  return &table;
}

}  // namespace octavo::OCTAVO_ISA
