// Rounds of independent dot products in registers, which measure how many a processor does.
#pragma once
#include "vec.hpp"

namespace octavo::OCTAVO_ISA {

// Two start in a cycle and take up to 6: twelve chains are the least. Of 32 registers more, which leaves room for a slower
// next processor.
#if defined(OCTAVO_AVX512)
constexpr int kDotChains = 24;
#else
constexpr int kDotChains = 12;
#endif

template <class Vector, class Dot>
void run_dots(int64_t rounds, float* sink, Dot dot) {
  Vector sums[kDotChains];  // different, or one chain would do for all
#pragma GCC unroll 24
  for (int i = 0; i < kDotChains; ++i) sums[i] = (Vector)splat(static_cast<float>(i + 1));
  const U32 factor = (U32)load(sink);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < kDotChains; ++i) dot(sums[i], factor);
  }
#pragma GCC unroll 24
  for (int i = 0; i < kDotChains; ++i) store(sink, (F32)((U32)load(sink) | (U32)sums[i]));
}

}  // namespace octavo::OCTAVO_ISA
