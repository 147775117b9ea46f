// One group of 32 activations to 8-bit codes.
#pragma once
#include "quant.hpp"
#include "quant_dot.hpp"
#include "vec.hpp"

namespace octavo::OCTAVO_ISA {

#if defined(__AVX2__)

struct Activations {
  __m256 value[4];
};

OCTAVO_INLINE Activations load_activations(const float* x) {
  return {{_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8), _mm256_loadu_ps(x + 16), _mm256_loadu_ps(x + 24)}};
}
OCTAVO_INLINE __m256 load_8_bf16(const uint16_t* x) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
OCTAVO_INLINE Activations load_activations(const uint16_t* x) {
  return {{load_8_bf16(x), load_8_bf16(x + 8), load_8_bf16(x + 16), load_8_bf16(x + 24)}};
}

// The greatest magnitude's bits: compared as integers, infinities and NaNs are greater than all numbers.
OCTAVO_INLINE uint32_t greatest_magnitude(const Activations& x) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  __m256i eight = _mm256_setzero_si256();
  for (const __m256& value : x.value) {
    eight = _mm256_max_epu32(eight, _mm256_and_si256(_mm256_castps_si256(value), mask));
  }
  const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1))));
}

// Codes x * inverse to the nearest, ties to even; sums: of codes 0 and 1, and of codes 2 and 3, of all quads.
OCTAVO_INLINE void encode(const Activations& x, float inverse, int8_t (&codes)[kQuantGroup], int (&sums)[2]) {
  const __m256 factor = _mm256_set1_ps(inverse);
  __m256i rounded[4];
  for (int i = 0; i < 4; ++i) rounded[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x.value[i], factor));
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(rounded[0], rounded[1]),
                                            _mm256_packs_epi32(rounded[2], rounded[3]));
  // Packing works on each 128 bits: this puts the quads back in order.
  const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), ordered);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), ordered);
  const __m128i eight = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  const __m128i four = _mm_add_epi16(eight, _mm_shuffle_epi32(eight, 0x4e));
  const __m128i two = _mm_add_epi16(four, _mm_shuffle_epi32(four, 0xb1));
  sums[0] = static_cast<int16_t>(_mm_extract_epi16(two, 0));
  sums[1] = static_cast<int16_t>(_mm_extract_epi16(two, 1));
}

// Two quads in 16 bits, each in the order 0, 2, 1, 3, the second so many values after the first.
OCTAVO_INLINE void write_wide_quads(const int8_t* codes, int16_t* out, int step) {
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  const __m128i ordered = _mm_shufflehi_epi16(_mm_shufflelo_epi16(wide, 0xd8), 0xd8);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), ordered);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out + step), _mm_unpackhi_epi64(ordered, ordered));
}

#else

struct Activations {
  float value[kQuantGroup];
};

template <typename T>
OCTAVO_INLINE Activations load_activations(const T* x) {
  Activations out;
  for (int i = 0; i < kQuantGroup; ++i) out.value[i] = load_one(x + i);
  return out;
}

OCTAVO_INLINE uint32_t greatest_magnitude(const Activations& x) {
  uint32_t greatest = 0;
  for (float value : x.value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits &= 0x7fffffffu;
    greatest = bits > greatest ? bits : greatest;
  }
  return greatest;
}

OCTAVO_INLINE void encode(const Activations& x, float inverse, int8_t (&codes)[kQuantGroup], int (&sums)[2]) {
  sums[0] = sums[1] = 0;
  for (int i = 0; i < kQuantGroup; ++i) {
    // Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
    const float shifted = x.value[i] * inverse + 12582912.0f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, 4);
    codes[i] = static_cast<int8_t>(bits & 0xff);
    sums[i / 2 % 2] += codes[i];
  }
}

OCTAVO_INLINE void write_wide_quads(const int8_t* codes, int16_t* out, int step) {
  constexpr int order[] = {0, 2, 1, 3};
  for (int i = 0; i < 8; ++i) out[i / 4 * step + i % 4] = codes[i / 4 * 4 + order[i % 4]];
}

#endif

// A group whose greatest magnitude is below this counts as zeros: 127 / magnitude must be finite.
constexpr float kLeastMagnitude = 1e-35f;

// A group's quads, so many values apart.
OCTAVO_INLINE void write_codes(const int8_t (&codes)[kQuantGroup], int8_t* out, int step) {
  for (int i = 0; i < kQuantGroup; i += 4) std::memcpy(out + i / 4 * step, codes + i, 4);
}
OCTAVO_INLINE void write_codes(const int8_t (&codes)[kQuantGroup], int16_t* out, int step) {
  for (int i = 0; i < kQuantGroup; i += 8) write_wide_quads(codes + i, out + i / 4 * step, step);
}

OCTAVO_INLINE void quantize_group(const Activations& x, int8_t (&codes)[kQuantGroup], QuantGroup& group) {
  const uint32_t bits = greatest_magnitude(x);
  float magnitude;
  std::memcpy(&magnitude, &bits, 4);
  int sums[2] = {0, 0};
  std::memset(codes, 0, sizeof codes);
  if (!(magnitude <= __FLT_MAX__)) {
    group.scale = __builtin_nanf("");
  } else if (magnitude < kLeastMagnitude) {
    group.scale = 0;
  } else {
    group.scale = magnitude / 127.0f;
    encode(x, 127.0f / magnitude, codes, sums);
  }
  group.scaled_sum = group.scale * static_cast<float>(sums[0] + sums[1]);
  group.start_8bit = -128 * (sums[0] + sums[1]);
  group.start_4bit = start_of_4bit(sums);
}

template <typename T>
void quantize_row(const T* x, int64_t k, const QuantRows& rows, int64_t row) {
  const int tile = rows.rows_of_tile(row);
  QuantGroup* group = rows.groups_of(row);
  for (int64_t at = 0; at < k; at += kQuantGroup, group += tile) {
    int8_t codes[kQuantGroup];
    if (k - at >= kQuantGroup) {
      quantize_group(load_activations(x + at), codes, *group);
    } else {
      T padded[kQuantGroup] = {};
      std::memcpy(padded, x + at, static_cast<size_t>(k - at) * sizeof(T));
      quantize_group(load_activations(padded), codes, *group);
    }
    if (rows.narrow != nullptr) write_codes(codes, rows.codes_of<int8_t>(row) + at * tile, rows.quad_step(row));
    if (rows.wide != nullptr) write_codes(codes, rows.codes_of<int16_t>(row) + at * tile, rows.quad_step(row));
  }
}

}  // namespace octavo::OCTAVO_ISA
