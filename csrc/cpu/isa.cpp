#include "isa.hpp"

#include <stdexcept>

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
#if defined(__x86_64__)
    __builtin_cpu_init();
    [[maybe_unused]] const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#ifdef OCTAVO_EMULATED  // their kernels use AVX2 only
    [[maybe_unused]] const bool avx512 = avx2, bf16 = avx2;
#else
    [[maybe_unused]] const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                                         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                                         __builtin_cpu_supports("avx512dq");
    [[maybe_unused]] const bool bf16 =
        avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
#endif
#ifdef OCTAVO_HAS_avx512_bf16
    if (bf16) isas.push_back(OCTAVO_ROW(avx512_bf16));
#endif
#ifdef OCTAVO_HAS_avx512
    if (avx512) isas.push_back(OCTAVO_ROW(avx512));
#endif
#ifdef OCTAVO_HAS_avx2
    if (avx2) isas.push_back(OCTAVO_ROW(avx2));
#endif
#endif
    isas.push_back(OCTAVO_ROW(generic));
    return isas;
  }();
  return found;
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
  throw std::invalid_argument("this processor cannot run the instruction set '" + name + "'; it can run: " + names);
}

}  // namespace octavo
