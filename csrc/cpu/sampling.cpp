// The passes over a row of logits that sampling and logprobs are made of.
#include "sampling.hpp"

#include <limits>

#include "rows.hpp"

namespace octavo::OCTAVO_ISA {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Whether any lane of a comparison is true.
OCTAVO_INLINE bool any(I32 mask) {
#if defined(OCTAVO_AVX512)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(OCTAVO_AVX2)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

OCTAVO_INLINE I32 load_ids(const int32_t* p, Full) { return load_as<I32>(p); }
OCTAVO_INLINE I32 load_ids(const int32_t* p, Tail tail) {
  I32 v = {};
  std::memcpy(&v, p, tail.lanes * sizeof *p);
  return v;
}

OCTAVO_INLINE I32 lane_numbers() {
  I32 numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = i;
  return numbers;
}

// -0.0 + 0 is 0, so that no distance is -0.0.
OCTAVO_INLINE F32 distance_of(F32 logits, float top) { return (top + 0.0f) - logits; }

// For up to 32 tokens, the bits of one word.
OCTAVO_INLINE void apply_word(float* row, int64_t size, uint32_t word) {
  for_vectors(size, [&](int64_t i, auto lanes) {
    const U32 bits = splat(word) >> (U32)(lane_numbers() + static_cast<int32_t>(i)) & 1;
    store(row + i, bits != 0 ? load(row + i, lanes) : splat(-kInfinity), lanes);
  });
}

void apply_mask(float* row, int64_t size, const uint32_t* allowed) {
  constexpr int64_t kGroup = 8;  // words looked at together, as most often all tokens are allowed, or few
  const int64_t words = (size + 31) / 32;
  for (int64_t group = 0; group < words; group += kGroup) {
    const int64_t end = group + kGroup < words ? group + kGroup : words;
    uint32_t all = ~0u;
    for (int64_t w = group; w < end; ++w) all &= allowed[w];
    if (all == ~0u) continue;
    for (int64_t w = group; w < end; ++w)
      if (allowed[w] != ~0u) apply_word(row + 32 * w, 32 * w + 32 < size ? 32 : size - 32 * w, allowed[w]);
  }
}

float survey(const float* row, int64_t size, float* columns, int64_t* num_columns) {
  constexpr int64_t kChunk = kColumn * kLanes;
  F32 tops = splat(-kInfinity);
  I32 nan = {};
  int64_t i = 0, count = 0;
  for (; i + kChunk <= size; i += kChunk, count += kLanes) {
    F32 chunk_tops = splat(-kInfinity);
    for (int64_t j = i; j < i + kChunk; j += kLanes) {
      const F32 x = load(row + j);
      chunk_tops = max(x, chunk_tops);
      nan |= x != x;
    }
    store(columns + count, chunk_tops);
    tops = max(chunk_tops, tops);
  }
  float top = max(tops);
  bool tail_nan = false;
  for (; i < size; ++i) {
    tail_nan |= row[i] != row[i];
    top = max(row[i], top);
  }
  *num_columns = count;
  return any(nan) || tail_nan ? std::numeric_limits<float>::quiet_NaN() : top;
}

// Writes the lanes of a vector that the mask chooses next to each other, and others behind them, kLanes in all; returns
// how many are chosen.
#if defined(OCTAVO_AVX512)
OCTAVO_INLINE int compress(I32 mask, F32 x, I32 y, float* xs, int32_t* ys) {
  const __mmask16 chosen = _mm512_movepi32_mask((__m512i)mask);
  _mm512_storeu_ps(xs, _mm512_maskz_compress_ps(chosen, (__m512)x));
  _mm512_storeu_si512(ys, _mm512_maskz_compress_epi32(chosen, (__m512i)y));
  return __builtin_popcount(chosen);
}
#elif defined(OCTAVO_AVX2)
// For each mask of eight lanes, the numbers of those chosen, a byte each.
struct Orders {
  uint64_t of[256] = {};
  constexpr Orders() {
    for (int mask = 0; mask < 256; ++mask)
      for (int lane = 7; lane >= 0; --lane)
        if (mask >> lane & 1) of[mask] = of[mask] << 8 | static_cast<uint64_t>(lane);
  }
};
constexpr Orders kOrders;

OCTAVO_INLINE int compress(I32 mask, F32 x, I32 y, float* xs, int32_t* ys) {
  const int chosen = _mm256_movemask_ps((__m256)mask);
  const __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(kOrders.of[chosen])));
  _mm256_storeu_ps(xs, _mm256_permutevar8x32_ps((__m256)x, order));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(ys), _mm256_permutevar8x32_epi32((__m256i)y, order));
  return __builtin_popcount(static_cast<unsigned>(chosen));
}
#else
OCTAVO_INLINE int compress(I32 mask, F32 x, I32 y, float* xs, int32_t* ys) {
  int count = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    xs[count] = x[lane];
    ys[count] = y[lane];
    count -= mask[lane];
  }
  return count;
}
#endif

int64_t within(const float* row, int64_t size, float top, float reach, float* logits, int32_t* ids) {
  // Vectors by fours: a branch for each would mostly be guessed wrong where a few lanes of many vectors are chosen.
  constexpr int kGroup = 4;
  int64_t i = 0, found = 0;  // found <= i, so that a whole vector has room
  for (; i + kGroup * kLanes <= size; i += kGroup * kLanes) {
    I32 near[kGroup], any_near = {};
    for (int j = 0; j < kGroup; ++j) any_near |= near[j] = distance_of(load(row + i + j * kLanes), top) <= reach;
    if (!any(any_near)) continue;
    for (int j = 0; j < kGroup; ++j) {
      const int64_t at = i + j * kLanes;
      found += compress(near[j], load(row + at), lane_numbers() + static_cast<int32_t>(at), logits + found, ids + found);
    }
  }
  for (; i < size; ++i) {
    if (!((top + 0.0f) - row[i] <= reach)) continue;
    logits[found] = row[i];
    ids[found++] = static_cast<int32_t>(i);
  }
  return found;
}

OCTAVO_INLINE F32 weight_of(F32 logits, float top, float temperature) {
  return exp(distance_of(logits, top) / -temperature);
}

void weights(const float* logits, int64_t size, float top, float temperature, float* out) {
  for_vectors(size, [&](int64_t i, auto lanes) {
    store(out + i, weight_of(load(logits + i, lanes), top, temperature), lanes);
  });
}

// A float64 for half of a vector's lanes, with its own instructions where GCC 12 makes far slower ones of a conversion.
typedef double F64 __attribute__((vector_size(4 * kLanes)));
#if defined(OCTAVO_AVX512)
// Masked with all ones, as GCC 12 warns of its own unmasked one.
OCTAVO_INLINE F64 widen_low(F32 x) { return (F64)_mm512_maskz_cvtps_pd(0xff, low_half(x)); }
OCTAVO_INLINE F64 widen_high(F32 x) { return (F64)_mm512_maskz_cvtps_pd(0xff, high_half(x)); }
#elif defined(OCTAVO_AVX2)
OCTAVO_INLINE F64 widen_low(F32 x) { return (F64)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x)); }
OCTAVO_INLINE F64 widen_high(F32 x) { return (F64)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1)); }
#else
OCTAVO_INLINE F64 widen_low(F32 x) { return F64{x[0], x[1]}; }
OCTAVO_INLINE F64 widen_high(F32 x) { return F64{x[2], x[3]}; }
#endif

double mass(const float* logits, int64_t size, float top, float temperature) {
  F64 low = {}, high = {};
  for_vectors(size, [&](int64_t i, auto lanes) {
    const F32 weight = keep(weight_of(load(logits + i, lanes), top, temperature), lanes);
    low += widen_low(weight);
    high += widen_high(weight);
  });
  double sum = 0;
  for (int lane = 0; lane < kLanes / 2; ++lane) sum += low[lane] + high[lane];
  return sum;
}

int64_t count_greater(const float* row, int64_t size, float logit) {
  I32 counts = {};
  int64_t i = 0, count = 0;
  for (; i + kLanes <= size; i += kLanes) counts -= load(row + i) > logit;
  for (; i < size; ++i) count += row[i] > logit;
  for (int lane = 0; lane < kLanes; ++lane) count += counts[lane];
  return count;
}

// ---- the race -----------------------------------------------------------------------------------------------------

OCTAVO_INLINE F32 or_infinity(F32 x, Full) { return x; }
OCTAVO_INLINE F32 or_infinity(F32 x, Tail tail) { return lane_numbers() < tail.lanes ? x : splat(kInfinity); }

OCTAVO_INLINE F32 bound_of(F32 logits, I32 ids, const Race& race) {
  const U32 bits = random_bits((U32)ids, race.key);
  // Not above (bits + 1/2) / 2; half, as there is no conversion of unsigned numbers before AVX-512.
  const F32 uniform = __builtin_convertvector((I32)(bits >> 1), F32) + 0.25f;
  const F32 log2 = __builtin_convertvector((I32)uniform, F32);
  return fma(distance_of(logits, race.top), splat(race.slope), log2);
}

// Calls f(offset, bounds, lanes) for the vectors of tokens [begin, end).
template <typename F>
OCTAVO_INLINE void for_bounds(const Tokens& tokens, const Race& race, int64_t begin, int64_t end, const F& f) {
  const auto ids_at = [&](int64_t i, auto lanes) {
    if (tokens.ids == nullptr) return lane_numbers() + static_cast<int32_t>(i);
    return load_ids(tokens.ids + i, lanes);
  };
  for_vectors(end - begin, [&](int64_t offset, auto lanes) {
    const int64_t i = begin + offset;
    f(offset, bound_of(load(tokens.logits + i, lanes), ids_at(i, lanes), race), lanes);
  });
}

void bounds(const Tokens& tokens, const Race& race, int64_t begin, int64_t end, float* out) {
  for_bounds(tokens, race, begin, end,
             [&](int64_t offset, F32 bounds, auto lanes) { store(out + offset, bounds, lanes); });
}

void lowest_bounds(const Tokens& tokens, const Race& race, float* out) {
  for (int64_t begin = 0; begin < tokens.size; begin += kRaceBlock) {
    const int64_t end = begin + kRaceBlock < tokens.size ? begin + kRaceBlock : tokens.size;
    F32 lowest = splat(kInfinity);
    for_bounds(tokens, race, begin, end,
               [&](int64_t, F32 bounds, auto lanes) { lowest = min(or_infinity(bounds, lanes), lowest); });
    *out++ = -max(-lowest);
  }
}

}  // namespace

const SamplingTable* sampling_table() {
  static const SamplingTable table{apply_mask, survey, within, weights, mass, count_greater,
                                   bounds, lowest_bounds};
  return &table;
}

}  // namespace octavo::OCTAVO_ISA
