// Which instruction sets there are, and the kernels of the chosen ones.
//
// There are two kinds, chosen apart: of integers, for the dot products of quantised weights, and of floats, for all else.
// What is computed in integers is exact, and what the kernels of integers compute in floats they do alike (quant.hpp): the
// results depend on the instruction set of floats alone.
#pragma once
#include <string>
#include <vector>

#include "processor_isas.hpp"

namespace octavo {

// The kernel files' entry points, one table for each instruction set. Each file fills its own part.
struct GatedDeltaTable;
struct GemmTable;
struct PointwiseTable;
struct AttentionTable;
struct QuantResults;
struct SamplingTable;
struct MoeTable;
struct LoraTable;
struct QuantTable;
struct SelectiveScanTable;
struct StatesTable;

struct FloatIsa {
  std::string name;
  const GemmTable* gemm;
  const PointwiseTable* pointwise;
  const AttentionTable* attention;
  const QuantResults* quant_results;
  const SamplingTable* sampling;
  const MoeTable* moe;
  const LoraTable* lora;
  const StatesTable* states;
  const GatedDeltaTable* gated_delta;
  const SelectiveScanTable* selective_scan;
};

struct IntegerIsa {
  std::string name;
  const QuantTable* quant;
};

// The names of what was compiled.
IsaNames built_isas();

// Those of them that this processor can run.
IsaNames available_isas();

// The chosen ones: the best, or those of choose_isa.
const FloatIsa& isa();
const IntegerIsa& integer_isa();

// Both, as "FLOATS+INTEGERS".
std::string chosen_isas();

// Takes "FLOATS+INTEGERS", or one name, for each kind that has it available; of the other the best. Throws
// std::invalid_argument if there is no such instruction set, the processor cannot run it, or it was not compiled; then
// nothing has changed.
void choose_isa(const std::string& names);

}  // namespace octavo
