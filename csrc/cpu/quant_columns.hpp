// Floats of a panel's 16 columns: scales, minima and sums of quantised products.
#pragma once
#include "half.hpp"
#include "quant_dot.hpp"
#include "vec.hpp"

namespace octavo::OCTAVO_ISA {

struct Columns {
  F32 value[kVectors];
};

// f(v) for each vector v.
template <typename F>
OCTAVO_INLINE Columns by_vector(const F& f) {
  Columns out;
  for (int v = 0; v < kVectors; ++v) out.value[v] = f(v);
  return out;
}

OCTAVO_INLINE F32 widen_f16(const uint16_t* p) {
#if defined(OCTAVO_AVX512)
  return (F32)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(OCTAVO_AVX2)
  return (F32)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  F32 out;
  for (int i = 0; i < kLanes; ++i) out[i] = from_f16(p[i]);
  return out;
#endif
}
OCTAVO_INLINE I32 widen_u8(const uint8_t* p) {
#if defined(OCTAVO_AVX512)
  return (I32)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(OCTAVO_AVX2)
  return (I32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  I32 out;
  for (int i = 0; i < kLanes; ++i) out[i] = p[i];
  return out;
#endif
}

OCTAVO_INLINE Columns load_f32(const uint8_t* p) {
  return by_vector([&](int v) { return load(reinterpret_cast<const float*>(p) + v * kLanes); });
}
OCTAVO_INLINE Columns load_f16(const uint8_t* p) {
  return by_vector([&](int v) { return widen_f16(reinterpret_cast<const uint16_t*>(p) + v * kLanes); });
}
OCTAVO_INLINE Columns load_u8(const uint8_t* p) {
  return by_vector([&](int v) { return __builtin_convertvector(widen_u8(p + v * kLanes), F32); });
}
// half_of_e8m0 of each byte.
OCTAVO_INLINE Columns load_half_e8m0(const uint8_t* p) {
  return by_vector([&](int v) {
    const I32 bytes = widen_u8(p + v * kLanes);
    return (F32)((bytes + (bytes != 0)) << 23);  // a comparison that holds is -1
  });
}
OCTAVO_INLINE Columns spread(float x) {
  return by_vector([&](int) { return splat(x); });
}
OCTAVO_INLINE Columns multiply(const Columns& a, const Columns& b) {
  return by_vector([&](int v) { return a.value[v] * b.value[v]; });
}
OCTAVO_INLINE Columns add(const Columns& a, const Columns& b) {
  return by_vector([&](int v) { return a.value[v] + b.value[v]; });
}
OCTAVO_INLINE Columns subtract(const Columns& a, const Columns& b) {
  return by_vector([&](int v) { return a.value[v] - b.value[v]; });
}
template <int Rows>
OCTAVO_INLINE Columns as_float(const Dots<Rows>& dots, int row) {
  return by_vector([&](int v) { return __builtin_convertvector(dots.value[row][v], F32); });
}
OCTAVO_INLINE void to_floats(const Columns& x, float* out) {
  for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, x.value[v]);
}

// Scales and minima of a group's columns; `header` is the block's and `i` the group's number in the block.
template <QuantFormat Format>
OCTAVO_INLINE Columns scales_of(const uint8_t* header, int i) {
  if constexpr (Format == QuantFormat::q4_k) return multiply(load_f16(header), load_u8(header + 64 + i * kPanel));
  if constexpr (Format == QuantFormat::mxfp4) return load_half_e8m0(header);
  return load_f16(header);
}
template <QuantFormat Format>
OCTAVO_INLINE Columns minima_of(const uint8_t* header, int i) {
  if constexpr (Format == QuantFormat::q4_k) return multiply(load_f16(header + 32), load_u8(header + 192 + i * kPanel));
  return load_f16(header + 32);
}

}  // namespace octavo::OCTAVO_ISA
