// Which instruction sets there are, and the kernels of the chosen one.
#pragma once
#include <string>
#include <vector>

namespace octavo {

// The kernel files' entry points, one table for each instruction set. Each file fills its own part.
struct GemmTable;
struct PointwiseTable;
struct AttentionTable;
struct QuantTable;
struct SamplingTable;
struct MoeTable;
struct LoraTable;

struct Isa {
  std::string name;
  const GemmTable* gemm;
  const PointwiseTable* pointwise;
  const AttentionTable* attention;
  const QuantTable* quant;
  const SamplingTable* sampling;
  const MoeTable* moe;
  const LoraTable* lora;
};

// The names of what was compiled, best first; generic is always the last.
std::vector<std::string> built_isas();

// Those of them that this processor can run, in that order.
const std::vector<Isa>& available_isas();

// The chosen one: the best, or that of choose_isa.
const Isa& isa();

// Throws std::invalid_argument if the processor cannot run it, or it was not compiled.
void choose_isa(const std::string& name);

}  // namespace octavo
