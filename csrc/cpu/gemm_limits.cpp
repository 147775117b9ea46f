#include "gemm_limits.hpp"

#include "vec.hpp"

namespace octavo::OCTAVO_ISA {

// In two streams, left to the processor's own prefetching: that was the fastest of many ways.
void read_once(const void* data, int64_t bytes, float* sink) {
  constexpr int kLine = 64;
  const char* first = static_cast<const char*>(data);
  const int64_t half = bytes / 2 / kLine * kLine;
  const char* second = first + half;
  U32 seen[2] = {};
  for (int64_t at = 0; at < half; at += kLine) {
#pragma GCC unroll 4
    for (int i = 0; i < kLine; i += 4 * kLanes) {
      seen[0] |= load_as<U32>(first + at + i);
      seen[1] |= load_as<U32>(second + at + i);
    }
  }
  store(sink, (F32)(seen[0] | seen[1]));
}

// Twelve chains: more than a multiply-add has cycles, times those that start in each.
int64_t multiply_add_rounds(int64_t rounds, float* sink) {
  constexpr int kChains = 12;
  F32 sums[kChains];
#pragma GCC unroll 12
  for (int i = 0; i < kChains; ++i) sums[i] = splat(static_cast<float>(i));
  float factor = sink[0], term = sink[1];
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = fma(sums[i], splat(factor), splat(term));
  }
#pragma GCC unroll 12
  for (int i = 0; i < kChains; ++i) store(sink, load(sink) + sums[i]);
  return int64_t{2} * kChains * kLanes;
}

#if defined(OCTAVO_ISA_avx512_bf16)

namespace {

// Two start in a cycle and take up to 6: twelve chains are the least. These leave room for a slower next processor.
constexpr int kDotChains = 24;

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

}  // namespace

int64_t bf16_dot_rounds(int64_t rounds, float* sink) {
  run_dots<F32>(rounds, sink, [](F32& sum, U32 x) { add_pair_products(sum, x, x); });
  return int64_t{4} * kDotChains * kLanes;
}

int64_t int8_dot_rounds(int64_t rounds, float* sink) {
  run_dots<I32>(rounds, sink, [](I32& sum, U32 x) {
    sum = (I32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)x);
  });
  return int64_t{8} * kDotChains * kLanes;
}

#else

int64_t bf16_dot_rounds(int64_t, float*) { return 0; }
int64_t int8_dot_rounds(int64_t, float*) { return 0; }

#endif

}  // namespace octavo::OCTAVO_ISA
