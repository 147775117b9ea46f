#include "pointwise.hpp"

namespace octavo::OCTAVO_ISA {

const PointwiseTable* pointwise_table() {
  static const PointwiseTable table{};
  return &table;
}

}  // namespace octavo::OCTAVO_ISA
