// Which of our instruction sets this processor runs: one rule for the kernels' choice at run time and for set-up's.
#pragma once
#include <string>
#include <vector>

namespace octavo {

// Best first; generic, which every processor runs, is the last.
inline std::vector<std::string> processor_isas() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#ifdef OCTAVO_EMULATED  // their kernels use AVX2 only
  const bool avx512 = avx2, bf16 = avx2;
#else
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
#endif
  if (bf16) names.push_back("avx512_bf16");
  if (avx512) names.push_back("avx512");
  if (avx2) names.push_back("avx2");
#endif
  names.push_back("generic");
  return names;
}

}  // namespace octavo
