#include "gemm_limits.hpp"

#include "dot_rounds.hpp"
#include "vec.hpp"
#if defined(OCTAVO_AMX)
#include "amx.hpp"
#endif

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

int64_t bf16_dot_rounds([[maybe_unused]] int64_t rounds, [[maybe_unused]] float* sink) {
#if defined(OCTAVO_BF16)
  run_dots<F32>(rounds, sink, [](F32& sum, U32 x) { add_pair_products(sum, x, x); });
  return int64_t{4} * kDotChains * kLanes;
#elif defined(OCTAVO_AMX) && !defined(OCTAVO_EMULATED)
  // Products of tiles of zeros with four sums.
  amx::Config config;
  for (int t = 0; t < 8; ++t) config.set(t, 16, 64);
  amx::configure(config);
  amx::zero<4>(), amx::zero<5>();
  amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
  for (int64_t round = 0; round < rounds; ++round) {
    amx::dot_bf16<0, 4, 5>();
    amx::dot_bf16<1, 4, 5>();
    amx::dot_bf16<2, 4, 5>();
    amx::dot_bf16<3, 4, 5>();
  }
  amx::release();
  return int64_t{2} * 4 * 16 * 16 * 32;
#else
  return 0;
#endif
}

}  // namespace octavo::OCTAVO_ISA
