// Vectors of floats, kLanes wide, for the kernel files: one source for every instruction set.
//
// F32, I32 and U32 are GCC/Clang vector types, so + - * / == < & | << >> and `mask ? a : b` work on them lane by lane
// (a comparison gives I32, all ones or zero). Other operations are functions here.
//
// fma(a, b, c) = a * b + c: one rounding where the processor has the instruction, else a product and a sum. The scalar
// fma is the same operation, for tails: a tail must round like the body. Never write a * b + c where both exist.
//
// bfloat16 is held as uint16_t; rounding to it is to nearest, ties to even, and a NaN stays a NaN.
//
// Kernel files do not use templates of the standard library: the linker might keep an instance that was compiled here
// with wide instructions for the whole program.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(OCTAVO_AVX2) || defined(OCTAVO_AVX512)
#include <immintrin.h>
#endif
#if defined(OCTAVO_EMULATED)
#include "avx512_emulated.hpp"
#endif
#define OCTAVO_INLINE inline __attribute__((always_inline))

namespace octavo::OCTAVO_ISA {

// 16 is a multiple of kLanes on every instruction set: layouts that group 16 columns suit them all.
#if defined(OCTAVO_AVX512)
constexpr int kLanes = 16;
#elif defined(OCTAVO_AVX2)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float F32 __attribute__((vector_size(4 * kLanes), may_alias));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes), may_alias));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes), may_alias));
typedef uint16_t U16 __attribute__((vector_size(2 * kLanes), may_alias));

// ---- loads and stores; no alignment is needed -----------------------------------------------------------------

template <typename V>
OCTAVO_INLINE V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
OCTAVO_INLINE F32 load(const float* p) { return load_as<F32>(p); }
OCTAVO_INLINE void store(float* p, F32 v) { std::memcpy(p, &v, sizeof v); }

// The first n lanes, 0 <= n <= kLanes; the other lanes are zero, and memory past the n-th is not touched.
OCTAVO_INLINE F32 load(const float* p, int n) {
  float lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
OCTAVO_INLINE void store(float* p, F32 v, int n) {
  float lanes[kLanes];
  store(lanes, v);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

OCTAVO_INLINE F32 splat(float x) { return x - F32{}; }  // x - 0 is x for every x, -0 included
OCTAVO_INLINE U32 splat(uint32_t x) { return x + U32{}; }

// ---- bfloat16 ---------------------------------------------------------------------------------------------------

OCTAVO_INLINE float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

OCTAVO_INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

OCTAVO_INLINE F32 widen_bf16(U16 x) {
  // GCC 12 makes several instructions of the conversion below, and of that in store. Here and elsewhere masked
  // with all ones, as it warns of its own unmasked ones.
#if defined(OCTAVO_AVX512)
  return (F32)((U32)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x) << 16);
#elif defined(OCTAVO_AVX2)
  return (F32)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)x), 16);
#else
  return (F32)(__builtin_convertvector(x, U32) << 16);
#endif
}

// The nearest bfloat16 of each lane, in the low 16 bits.
OCTAVO_INLINE U32 round_bf16(F32 x) {
  const U32 bits = (U32)x;
  const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U32 nan = (bits >> 16) | 0x40;
  const U32 is_nan = (U32)(x != x);
  return (is_nan & nan) | (~is_nan & rounded);
}

OCTAVO_INLINE F32 load(const uint16_t* p) { return widen_bf16(load_as<U16>(p)); }
OCTAVO_INLINE void store(uint16_t* p, F32 x) {
#if defined(OCTAVO_AVX512)
  const U16 narrow = (U16)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)round_bf16(x));
#else
  const U16 narrow = __builtin_convertvector(round_bf16(x), U16);
#endif
  std::memcpy(p, &narrow, sizeof narrow);
}
OCTAVO_INLINE F32 load(const uint16_t* p, int n) {
  uint16_t lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
OCTAVO_INLINE void store(uint16_t* p, F32 x, int n) {
  uint16_t lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

// Halves of two vectors side by side, half a vector from each of two places, and a vector's halves to two places; for
// vectors of 16 lanes.
#if defined(OCTAVO_AVX512)
OCTAVO_INLINE F32 low_halves(F32 a, F32 b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
}
OCTAVO_INLINE F32 high_halves(F32 a, F32 b) {
  return __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
OCTAVO_INLINE F32 load_halves(const float* low, const float* high) {
  typedef float Half __attribute__((vector_size(2 * kLanes)));
  return __builtin_shufflevector(load_as<Half>(low), load_as<Half>(high), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,
                                 14, 15);
}
template <typename T>
OCTAVO_INLINE void store_halves(T* low, T* high, F32 x) {
  alignas(64) T lanes[kLanes];
  store(lanes, x);
  std::memcpy(low, lanes, sizeof lanes / 2);
  std::memcpy(high, lanes + kLanes / 2, sizeof lanes / 2);
}
#endif

// A lane that holds two bfloat16: the one of the lower address, and the one of the higher.
OCTAVO_INLINE F32 even_bf16(U32 pairs) { return (F32)(pairs << 16); }
OCTAVO_INLINE F32 odd_bf16(U32 pairs) { return (F32)(pairs & 0xffff0000u); }

#if defined(OCTAVO_AVX2)
alignas(32) constexpr uint32_t kOddMask[8] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                              0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
#endif

// odd_bf16 of the pairs at p, for register tiles: pairs and mask are memory operands, as the sums leave no registers.
OCTAVO_INLINE F32 load_odd_bf16(const void* p) {
#if defined(OCTAVO_AVX2)
  F32 x;
  asm volatile("vmovdqu %1, %0\n\tvpand %2, %0, %0" : "=x"(x) : "m"(*static_cast<const U32*>(p)), "m"(kOddMask));
  return x;
#else
  return odd_bf16(load_as<U32>(p));
#endif
}

// One element of either type, for tails.
OCTAVO_INLINE float load_one(const float* p) { return *p; }
OCTAVO_INLINE float load_one(const uint16_t* p) { return from_bf16(*p); }
OCTAVO_INLINE void store_one(float* p, float x) { *p = x; }
OCTAVO_INLINE void store_one(uint16_t* p, float x) { *p = to_bf16(x); }

// ---- arithmetic -------------------------------------------------------------------------------------------------

// max and min: if either is a NaN, the second.
#if defined(OCTAVO_AVX512)
OCTAVO_INLINE F32 fma(F32 a, F32 b, F32 c) { return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
OCTAVO_INLINE F32 max(F32 a, F32 b) { return (F32)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b); }
OCTAVO_INLINE F32 min(F32 a, F32 b) { return (F32)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b); }
#elif defined(OCTAVO_AVX2)
OCTAVO_INLINE F32 fma(F32 a, F32 b, F32 c) { return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
OCTAVO_INLINE F32 max(F32 a, F32 b) { return (F32)_mm256_max_ps((__m256)a, (__m256)b); }
OCTAVO_INLINE F32 min(F32 a, F32 b) { return (F32)_mm256_min_ps((__m256)a, (__m256)b); }
#else
OCTAVO_INLINE F32 fma(F32 a, F32 b, F32 c) {
#ifdef __FP_FAST_FMAF
  F32 out;
  for (int i = 0; i < kLanes; ++i) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return out;
#else
  return a * b + c;
#endif
}
OCTAVO_INLINE F32 max(F32 a, F32 b) { return a > b ? a : b; }
OCTAVO_INLINE F32 min(F32 a, F32 b) { return a < b ? a : b; }
#endif
OCTAVO_INLINE float fma(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// sum += x * y, in the register of the sum. Otherwise GCC moves sums between registers, runs out of them and spills some
// to memory, which multiplies the latency of their chains.
OCTAVO_INLINE void add_product(F32& sum, F32 x, F32 y) {
#if defined(OCTAVO_AVX512) && !defined(OCTAVO_EMULATED)
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
#elif defined(OCTAVO_AVX2)
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(x), "x"(y));
#else
  sum = fma(x, y, sum);
#endif
}

#if defined(OCTAVO_BF16) || defined(OCTAVO_AMX)
// sum += odd(x) * odd(y), then sum += even(x) * even(y), over lanes of two bfloat16, each step with one rounding to
// nearest. Subnormal inputs and results are zero.
OCTAVO_INLINE void add_pair_products(F32& sum, U32 x, U32 y) {
  sum = (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
}

// As round_bf16, but that subnormal numbers are zero.
OCTAVO_INLINE U16 narrow_bf16(F32 x) { return (U16)_mm512_maskz_cvtneps_pbh(0xffff, (__m512)x); }
#endif

// As store, of a result of arithmetic, which is never subnormal: operations run with those flushed to zero.
OCTAVO_INLINE void store_result(float* p, F32 x) { store(p, x); }
OCTAVO_INLINE void store_result(uint16_t* p, F32 x) {
#if defined(OCTAVO_BF16) || defined(OCTAVO_AMX)
  const U16 narrow = narrow_bf16(x);
  std::memcpy(p, &narrow, sizeof narrow);
#else
  store(p, x);
#endif
}

OCTAVO_INLINE F32 magnitude(F32 x) { return (F32)((U32)x & 0x7fffffffu); }

// Fetches the lines of bytes [p, p + bytes), at least one, to be written.
OCTAVO_INLINE void fetch_to_write(const void* p, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(p) + at, 1);
  __builtin_prefetch(static_cast<const char*>(p) + bytes - 1, 1);
}

// An element in all lanes, always loaded: keeping it would use registers that the sums of a tile need.
OCTAVO_INLINE F32 splat_anew(const float* p) {
#if defined(OCTAVO_AVX512) && !defined(OCTAVO_EMULATED)
  F32 x;
  asm volatile("vbroadcastss %1, %0" : "=v"(x) : "m"(*p));
  return x;
#elif defined(OCTAVO_AVX2)
  F32 x;
  asm volatile("vbroadcastss %1, %0" : "=x"(x) : "m"(*p));
  return x;
#else
  return splat(*p);
#endif
}

OCTAVO_INLINE float max(float a, float b) { return a > b ? a : b; }
OCTAVO_INLINE float min(float a, float b) { return a < b ? a : b; }

// Over all lanes, halving: lane i is joined with lane i + n / 2, until one is left.
#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)
OCTAVO_INLINE float sum_of_4(__m128 x) {
  const __m128 two = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
OCTAVO_INLINE float max_of_4(__m128 x) {
  const __m128 two = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
OCTAVO_INLINE float sum_of_8(__m256 x) {
  return sum_of_4(_mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
OCTAVO_INLINE float max_of_8(__m256 x) {
  return max_of_4(_mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
#if defined(OCTAVO_AVX2)
OCTAVO_INLINE float sum(F32 x) { return sum_of_8((__m256)x); }
OCTAVO_INLINE float max(F32 x) { return max_of_8((__m256)x); }
#else
OCTAVO_INLINE __m256 low_half(F32 x) { return (__m256)__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7); }
OCTAVO_INLINE __m256 high_half(F32 x) { return (__m256)__builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15); }
OCTAVO_INLINE float sum(F32 x) { return sum_of_8(_mm256_add_ps(low_half(x), high_half(x))); }
OCTAVO_INLINE float max(F32 x) { return max_of_8(_mm256_max_ps(low_half(x), high_half(x))); }
#endif
#else
OCTAVO_INLINE float sum(F32 x) { return (x[0] + x[2]) + (x[1] + x[3]); }
OCTAVO_INLINE float max(F32 x) { return max(max(x[0], x[2]), max(x[1], x[3])); }
#endif

// e^x within 2 units in the last place; 0 below -86.5 (and of -inf), inf where float32 overflows, NaN of NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7 (remainder under 2^-27), times 2^n.
OCTAVO_INLINE F32 exp(F32 x) {
  const F32 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
  const F32 bounded = max(splat(-86.5f), min(splat(89.0f), x));
  const F32 shifted = fma(bounded, splat(1.44269504089f), magic);
  const F32 n = shifted - magic;
  F32 r = fma(n, splat(-0.693359375f), bounded);  // ln 2 in two parts, the first with few bits: n times it is exact
  r = fma(n, splat(2.12194440e-4f), r);
  F32 p = splat(1.0f / 5040);
  p = fma(p, r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  // 2^(n - 1), then 2: n may be 128, for which there is no float32.
  const F32 half_scale = (F32)(((U32)shifted - (0x4b400000u - 126u)) << 23);
  const F32 scaled = p * half_scale * 2.0f;
  return x < -86.5f ? F32{} : scaled;
}

// 2^x for x <= 0: 1 for 0, 0 below -126.5, NaN of NaN. The polynomial of 2^r, |r| <= 1/2, has the least greatest error of
// its degree, 1e-7.
OCTAVO_INLINE F32 exp2_not_above_zero(F32 x) {
  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits; and the bias of exponents, which it then has too.
  const F32 magic = splat(12582912.0f + 127.0f);
  const F32 bounded = max(splat(-127.0f), x);
  const F32 shifted = bounded + magic;
  const F32 r = bounded - (shifted - magic);
  F32 p = splat(1.32647269e-03f);
  p = fma(p, r, splat(9.67151266e-03f));
  p = fma(p, r, splat(5.55073374e-02f));
  p = fma(p, r, splat(2.40222421e-01f));
  p = fma(p, r, splat(6.93146978e-01f));
  p = fma(p, r, splat(1.0f));
  return p * (F32)((U32)shifted << 23);  // for -127 the scale is 0
}
OCTAVO_INLINE float exp2_not_above_zero(float x) { return exp2_not_above_zero(splat(x))[0]; }

}  // namespace octavo::OCTAVO_ISA
