// The AVX-512 and AVX-VNNI instructions that the kernels use, for processors that have AVX2 only: for tests. Kernel files
// compiled with OCTAVO_EMULATED, and without -mavx512... and -mavxvnni, are those of such an instruction set in all but
// speed.
//
// Each function does what Intel's manual says of its instruction. One that is missing here does not compile ("target
// specific option mismatch").
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace octavo::emulated {

typedef uint32_t U32x16 __attribute__((vector_size(64), may_alias));
typedef uint16_t U16x16 __attribute__((vector_size(32), may_alias));
typedef uint8_t U8x16 __attribute__((vector_size(16), may_alias));
typedef int8_t I8x16 __attribute__((vector_size(16), may_alias));
typedef int32_t I32x16 __attribute__((vector_size(64), may_alias));
typedef uint32_t U32x8 __attribute__((vector_size(32), may_alias));
typedef int32_t I32x8 __attribute__((vector_size(32), may_alias));

// Not inlined: the kernels unroll their loops many times, which would take long to compile.
#define OCTAVO_EMULATED_CALL __attribute__((noinline, unused)) static

// ---- by halves, with the same instructions of AVX2 --------------------------------------------------------------

template <typename Whole, typename Half, typename F, typename... Others>
inline Whole by_halves(const F& f, const Others&... operands) {
  Half halves[2];
  for (int h = 0; h < 2; ++h) halves[h] = f(reinterpret_cast<const char*>(&operands) + h * sizeof(operands) / 2 ...);
  Whole whole;
  std::memcpy(&whole, halves, sizeof whole);
  return whole;
}
inline __m256 floats(const char* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
inline __m256i integers(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

OCTAVO_EMULATED_CALL __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return by_halves<__m512, __m256>(
      [](const char* x, const char* y, const char* z) { return _mm256_fmadd_ps(floats(x), floats(y), floats(z)); }, a,
      b, c);
}
OCTAVO_EMULATED_CALL __m512i maddubs_epi16(__m512i a, __m512i b) {
  return by_halves<__m512i, __m256i>(
      [](const char* x, const char* y) { return _mm256_maddubs_epi16(integers(x), integers(y)); }, a, b);
}
OCTAVO_EMULATED_CALL __m512i madd_epi16(__m512i a, __m512i b) {
  return by_halves<__m512i, __m256i>(
      [](const char* x, const char* y) { return _mm256_madd_epi16(integers(x), integers(y)); }, a, b);
}

OCTAVO_EMULATED_CALL __m512i shuffle_epi8(__m512i a, __m512i b) {
  return by_halves<__m512i, __m256i>(
      [](const char* x, const char* y) { return _mm256_shuffle_epi8(integers(x), integers(y)); }, a, b);
}

// ---- lane by lane -----------------------------------------------------------------------------------------------

// If either is a NaN, the second.
inline __m512 maskz_max_ps(__mmask16 mask, __m512 a, __m512 b) {
  __m512 out;
  for (int i = 0; i < 16; ++i) out[i] = mask >> i & 1 ? (a[i] > b[i] ? a[i] : b[i]) : 0.0f;
  return out;
}
inline __m512 maskz_min_ps(__mmask16 mask, __m512 a, __m512 b) {
  __m512 out;
  for (int i = 0; i < 16; ++i) out[i] = mask >> i & 1 ? (a[i] < b[i] ? a[i] : b[i]) : 0.0f;
  return out;
}
inline __m512 maskz_cvtph_ps(__mmask16 mask, __m256i a) {
  __m512 out;
  for (int i = 0; i < 16; ++i) out[i] = mask >> i & 1 ? _cvtsh_ss(((U16x16)a)[i]) : 0.0f;
  return out;
}
inline __m512i maskz_cvtepu8_epi32(__mmask16 mask, __m128i a) {
  U32x16 out;
  for (int i = 0; i < 16; ++i) out[i] = mask >> i & 1 ? ((U8x16)a)[i] : 0u;
  return (__m512i)out;
}
inline __m512i maskz_cvtepi8_epi32(__mmask16 mask, __m128i a) {
  I32x16 out;
  for (int i = 0; i < 16; ++i) out[i] = mask >> i & 1 ? ((I8x16)a)[i] : 0;
  return (__m512i)out;
}
inline __m512i maskz_cvtepu16_epi32(__mmask16 mask, __m256i a) {
  U32x16 out;
  for (int i = 0; i < 16; ++i) out[i] = mask >> i & 1 ? ((U16x16)a)[i] : 0u;
  return (__m512i)out;
}
inline __m256i maskz_cvtepi32_epi16(__mmask16 mask, __m512i a) {
  U16x16 out;
  for (int i = 0; i < 16; ++i) out[i] = static_cast<uint16_t>(mask >> i & 1 ? ((U32x16)a)[i] : 0u);
  return (__m256i)out;
}
inline __m512d maskz_cvtps_pd(__mmask8 mask, __m256 a) {
  __m512d out;
  for (int i = 0; i < 8; ++i) out[i] = mask >> i & 1 ? static_cast<double>(a[i]) : 0.0;
  return out;
}
inline __mmask16 test_epi32_mask(__m512i a, __m512i b) {
  const U32x16 both = (U32x16)a & (U32x16)b;
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (both[i] != 0 ? 1u : 0u) << i;
  return static_cast<__mmask16>(mask);
}
inline __mmask16 movepi32_mask(__m512i a) {
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= ((U32x16)a)[i] >> 31 << i;
  return static_cast<__mmask16>(mask);
}
inline __m512i maskz_compress_epi32(__mmask16 mask, __m512i a) {
  U32x16 out = {};
  for (int i = 0, count = 0; i < 16; ++i)
    if (mask >> i & 1) out[count++] = ((U32x16)a)[i];
  return (__m512i)out;
}
inline __m512 maskz_compress_ps(__mmask16 mask, __m512 a) {
  return (__m512)maskz_compress_epi32(mask, (__m512i)a);
}
inline void storeu_ps(void* p, __m512 a) { std::memcpy(p, &a, sizeof a); }
inline void storeu_si512(void* p, __m512i a) { std::memcpy(p, &a, sizeof a); }

// ---- BF16 and VNNI ----------------------------------------------------------------------------------------------

// Numbers below the least normal one as zeros of their sign.
inline U32x16 flush(U32x16 x) {
  const U32x16 normal = (U32x16)((x & 0x7f800000u) != 0);
  return x & (normal | 0x80000000u);
}
// The product of the odd elements is added first, then that of the even ones, with a rounding after each.
template <typename Pairs>
OCTAVO_EMULATED_CALL __m512 dpbf16_ps(__m512 sum, Pairs a, Pairs b) {
  const U32x16 x = (U32x16)a, y = (U32x16)b;
  const __m512 start = (__m512)flush((U32x16)sum);
  const __m512 odd = fmadd_ps((__m512)flush(x & 0xffff0000u), (__m512)flush(y & 0xffff0000u), start);
  const __m512 even = fmadd_ps((__m512)flush(x << 16), (__m512)flush(y << 16), (__m512)flush((U32x16)odd));
  return (__m512)flush((U32x16)even);
}
// To the nearest bfloat16, ties to even.
inline __m256bh maskz_cvtneps_pbh(__mmask16 mask, __m512 a) {
  const U32x16 bits = flush((U32x16)a);
  U16x16 out;
  for (int i = 0; i < 16; ++i) {
    const bool nan = (bits[i] & 0x7fffffffu) > 0x7f800000u;
    const uint32_t rounded = nan ? bits[i] >> 16 | 0x40 : (bits[i] + 0x7fff + (bits[i] >> 16 & 1)) >> 16;
    out[i] = static_cast<uint16_t>(mask >> i & 1 ? rounded : 0u);
  }
  return (__m256bh)out;
}
// Four products of an unsigned byte of a and a signed byte of b are added to each sum, which wraps around.
template <typename Unsigned, typename Signed>
inline Unsigned add_quads_of_bytes(Unsigned sum, Unsigned a, Unsigned b) {
  for (int byte = 0; byte < 4; ++byte) sum += (a >> (8 * byte) & 0xff) * (Unsigned)((Signed)(b << (24 - 8 * byte)) >> 24);
  return sum;
}
OCTAVO_EMULATED_CALL __m512i dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  return (__m512i)add_quads_of_bytes<U32x16, I32x16>((U32x16)sum, (U32x16)a, (U32x16)b);
}
OCTAVO_EMULATED_CALL __m256i dpbusd_avx_epi32(__m256i sum, __m256i a, __m256i b) {
  return (__m256i)add_quads_of_bytes<U32x8, I32x8>((U32x8)sum, (U32x8)a, (U32x8)b);
}

}  // namespace octavo::emulated

#define _mm512_fmadd_ps octavo::emulated::fmadd_ps
#define _mm512_maddubs_epi16 octavo::emulated::maddubs_epi16
#define _mm512_madd_epi16 octavo::emulated::madd_epi16
#define _mm512_shuffle_epi8 octavo::emulated::shuffle_epi8
#define _mm512_maskz_cvtph_ps octavo::emulated::maskz_cvtph_ps
#define _mm512_maskz_cvtepu8_epi32 octavo::emulated::maskz_cvtepu8_epi32
#define _mm512_maskz_cvtepi8_epi32 octavo::emulated::maskz_cvtepi8_epi32
#define _mm512_maskz_cvtepu16_epi32 octavo::emulated::maskz_cvtepu16_epi32
#define _mm512_maskz_cvtepi32_epi16 octavo::emulated::maskz_cvtepi32_epi16
#define _mm512_maskz_max_ps octavo::emulated::maskz_max_ps
#define _mm512_maskz_min_ps octavo::emulated::maskz_min_ps
#define _mm512_maskz_cvtps_pd octavo::emulated::maskz_cvtps_pd
#define _mm512_test_epi32_mask octavo::emulated::test_epi32_mask
#define _mm512_movepi32_mask octavo::emulated::movepi32_mask
#define _mm512_maskz_compress_epi32 octavo::emulated::maskz_compress_epi32
#define _mm512_maskz_compress_ps octavo::emulated::maskz_compress_ps
#define _mm512_storeu_ps octavo::emulated::storeu_ps
#define _mm512_storeu_si512 octavo::emulated::storeu_si512
#define _mm512_dpbf16_ps octavo::emulated::dpbf16_ps
#define _mm512_maskz_cvtneps_pbh octavo::emulated::maskz_cvtneps_pbh
#define _mm512_dpbusd_epi32 octavo::emulated::dpbusd_epi32
#define _mm256_dpbusd_avx_epi32 octavo::emulated::dpbusd_avx_epi32
