#include "gemm.hpp"

namespace octavo::OCTAVO_ISA {

const GemmTable* gemm_table() {
  static const GemmTable table{};
  return &table;
}

}  // namespace octavo::OCTAVO_ISA
