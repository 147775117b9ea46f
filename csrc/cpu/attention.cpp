#include "attention.hpp"

namespace octavo::OCTAVO_ISA {

const AttentionTable* attention_table() {
  static const AttentionTable table{};
  return &table;
}

}  // namespace octavo::OCTAVO_ISA
