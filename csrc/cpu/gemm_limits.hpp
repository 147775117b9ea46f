// Measurements of the machine's limits, which products are compared with: see GemmTable.
#pragma once
#include <cstdint>

namespace octavo::OCTAVO_ISA {

void read_once(const void* data, int64_t bytes, float* sink);
int64_t multiply_add_rounds(int64_t rounds, float* sink);
int64_t bf16_dot_rounds(int64_t rounds, float* sink);

}  // namespace octavo::OCTAVO_ISA
