// Which of our instruction sets this processor runs: one rule for the kernels' choice at run time and for set-up's.
#pragma once
#include <string>
#include <vector>

#include "amx_state.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace octavo {

// Names of instruction sets by what they are for: `integers` do the dot products of quantised weights, `floats` all else.
// Both best first; generic, which every processor runs, is the last.
struct IsaNames {
  std::vector<std::string> floats, integers;
};

inline IsaNames processor_isas() {
  IsaNames names;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#ifdef OCTAVO_EMULATED  // their kernels use AVX2 only
  const bool avx512 = avx2, bf16 = avx2, vnni = avx2, avx_vnni = avx2;
#else
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  // Compilers differ in whether they have a name for it. Its registers are those of AVX2.
  unsigned eax = 0, ebx, ecx, edx;
  const bool avx_vnni = avx2 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0;
#endif
  if (bf16 && amx::state() == amx::State::available) names.floats.push_back("amx_bf16");
  // Intel's processors run dot products of bfloat16 at half the rate of float32 multiply-adds, AMD's at twice the rate.
  const bool fast_bf16 = bf16 && !__builtin_cpu_is("intel");
  if (fast_bf16) names.floats.push_back("avx512_bf16");
  if (avx512) names.floats.push_back("avx512");
  if (bf16 && !fast_bf16) names.floats.push_back("avx512_bf16");
  if (avx2) names.floats.push_back("avx2");
  if (vnni && amx::multiplies_int8()) names.integers.push_back("amx_int8");
  if (vnni) names.integers.push_back("avx512_vnni");
  if (avx_vnni) names.integers.push_back("avx_vnni");
  if (avx512) names.integers.push_back("avx512");
  if (avx2) names.integers.push_back("avx2");
#endif
  names.floats.push_back("generic");
  names.integers.push_back("generic");
  return names;
}

}  // namespace octavo
