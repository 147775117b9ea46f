#include "isa.hpp"

#include <algorithm>
#include <stdexcept>

#include "processor_isas.hpp"

namespace octavo {

#define OCTAVO_DECLARE(name)                        \
  namespace name {                                  \
  const GemmTable* gemm_table();                    \
  const PointwiseTable* pointwise_table();          \
  const AttentionTable* attention_table();          \
  const QuantTable* quant_table();                  \
  const SamplingTable* sampling_table();            \
  const MoeTable* moe_table();                      \
  const LoraTable* lora_table();                    \
  }
#define OCTAVO_ROW(name) \
  Isa {                                                                                                   \
    #name, name::gemm_table(), name::pointwise_table(), name::attention_table(), name::quant_table(),     \
        name::sampling_table(), name::moe_table(), name::lora_table()                                     \
  }

OCTAVO_DECLARE(generic)
#ifdef OCTAVO_HAS_avx2
OCTAVO_DECLARE(avx2)
#endif
#ifdef OCTAVO_HAS_avx512
OCTAVO_DECLARE(avx512)
#endif
#ifdef OCTAVO_HAS_avx512_bf16
OCTAVO_DECLARE(avx512_bf16)
#endif

const std::vector<Isa>& available_isas() {
  static const std::vector<Isa> found = [] {
    std::vector<Isa> isas;
    for (const std::string& name : processor_isas()) {
      // Only then: the functions that give the tables may use its instructions too.
#ifdef OCTAVO_HAS_avx512_bf16
      if (name == "avx512_bf16") isas.push_back(OCTAVO_ROW(avx512_bf16));
#endif
#ifdef OCTAVO_HAS_avx512
      if (name == "avx512") isas.push_back(OCTAVO_ROW(avx512));
#endif
#ifdef OCTAVO_HAS_avx2
      if (name == "avx2") isas.push_back(OCTAVO_ROW(avx2));
#endif
      if (name == "generic") isas.push_back(OCTAVO_ROW(generic));
    }
    return isas;
  }();
  return found;
}

std::vector<std::string> built_isas() {
  return {
#ifdef OCTAVO_HAS_avx512_bf16
      "avx512_bf16",
#endif
#ifdef OCTAVO_HAS_avx512
      "avx512",
#endif
#ifdef OCTAVO_HAS_avx2
      "avx2",
#endif
      "generic"};
}

static const Isa*& chosen() {
  static const Isa* isa = &available_isas().front();
  return isa;
}

const Isa& isa() { return *chosen(); }

void choose_isa(const std::string& name) {
  std::string names;
  for (const Isa& isa : available_isas()) {
    if (isa.name == name) {
      chosen() = &isa;
      return;
    }
    names += (names.empty() ? "" : ", ") + isa.name;
  }
  const std::vector<std::string> runs = processor_isas();
  if (std::find(runs.begin(), runs.end(), name) != runs.end())
    throw std::invalid_argument("the kernels were not built for the instruction set '" + name + "' but for: " + names +
                                " (in a checkout OCTAVO_ALL_ISAS=1 make kernels builds all)");
  throw std::invalid_argument("this processor cannot run the instruction set '" + name + "'; it can run: " + names);
}

}  // namespace octavo
