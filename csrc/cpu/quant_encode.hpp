// Weights to codes, at load. The sums run in 8 lanes on every instruction set, so that all give the same codes.
#pragma once
#include "half.hpp"
#include "quant.hpp"
#include "vec.hpp"

// Everything here is inlined: how such vectors would be passed to functions does not matter.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace octavo::OCTAVO_ISA {

typedef float F8 __attribute__((vector_size(32), may_alias));

typedef uint32_t U8x32 __attribute__((vector_size(32), may_alias));
typedef uint16_t U8x16 __attribute__((vector_size(16), may_alias));

OCTAVO_INLINE F8 widen_8(const float* w) {
  F8 out;
  std::memcpy(&out, w, sizeof out);
  return out;
}
OCTAVO_INLINE F8 widen_8(const uint16_t* w) {
  U8x16 halves;
  std::memcpy(&halves, w, sizeof halves);
  return (F8)(__builtin_convertvector(halves, U8x32) << 16);
}

// x rounded to an integer, ties to even, and kept within least .. greatest; |x| < 2^22.
OCTAVO_INLINE F8 nearest_code(F8 x, float least, float greatest) {
  const F8 rounded = (x + 12582912.0f) - 12582912.0f;
  const F8 low = least - F8{}, high = greatest - F8{};
  const F8 above = rounded < low ? low : rounded;
  return above > high ? high : above;
}

OCTAVO_INLINE float sum_8(F8 x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

// The value of greatest magnitude, or a NaN if a value is infinite or not a number.
template <typename T>
OCTAVO_INLINE float extreme_of(const T* w, int64_t count) {
  float extreme = 0, magnitude = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float value = load_one(w + i);
    if (!(__builtin_fabsf(value) <= __FLT_MAX__)) return __builtin_nanf("");
    if (__builtin_fabsf(value) > magnitude) {
      extreme = value;
      magnitude = __builtin_fabsf(value);
    }
  }
  return extreme;
}

constexpr int64_t kMostInGroup = 128;  // of 4 bits

// The scale of least squared error among those found from codes that put the extreme value on one of these. For given
// codes q the best scale is sum(w q) / sum(q q); it leaves the error sum(w w) - sum(w q)^2 / sum(q q).
template <typename T>
OCTAVO_INLINE float best_scale_of_4_bits(const T* w, int64_t count, float extreme) {
  F8 values[kMostInGroup / 8];
  for (int64_t i = 0; i < count / 8; ++i) values[i] = widen_8(w + i * 8);
  constexpr float kTargets[] = {-8.5f, -8.0f, -7.5f, -7.0f, -6.5f, -6.0f, 6.0f, 6.5f, 7.0f, 7.5f};
  float best_gain = 0, best = 0;
  for (float target : kTargets) {
    const float inverse = target / extreme;
    F8 products = {}, squares = {};
    for (int64_t i = 0; i < count / 8; ++i) {
      const F8 code = nearest_code(values[i] * inverse, -8, 7);
      products += values[i] * code;
      squares += code * code;
    }
    const float product = sum_8(products), square = sum_8(squares);
    if (product * product > best_gain * square) {
      best_gain = product * product / square;
      best = product / square;
    }
  }
  return best;
}

// Codes of w / scale: 8 bits as signed bytes, 4 bits with 8 added.
template <typename T>
OCTAVO_INLINE void write_codes(const T* w, int64_t count, float scale, int bits, uint8_t* codes) {
  const float inverse = scale == 0 || !(__builtin_fabsf(scale) <= __FLT_MAX__) ? 0 : 1.0f / scale;
  const float least = bits == 4 ? -8 : -127, greatest = bits == 4 ? 7 : 127, offset = bits == 4 ? 8 : 0;
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const F8 code = nearest_code(widen_8(w + i) * inverse, least, greatest) + offset;
    for (int lane = 0; lane < 8; ++lane) codes[i + lane] = static_cast<uint8_t>(static_cast<int>(code[lane]));
  }
  for (; i < count; ++i) {
    const F8 code = nearest_code(load_one(w + i) * inverse - F8{}, least, greatest) + offset;
    codes[i] = static_cast<uint8_t>(static_cast<int>(code[0]));
  }
}

template <typename T>
void encode_groups(const T* w, int64_t k, int64_t group, int bits, uint8_t* codes, void* scales) {
  const int64_t count = group == 0 ? k : group;
  for (int64_t g = 0; g < k / count; ++g) {
    const T* values = w + g * count;
    const float extreme = extreme_of(values, count);
    // A group whose greatest magnitude is this small counts as zeros: its inverse must be finite.
    const bool is_zero = __builtin_fabsf(extreme) < 1e-30f;
    float scale = 0;
    if (extreme != extreme) {
      scale = extreme;
    } else if (!is_zero) {
      scale = bits == 8 ? __builtin_fabsf(extreme) / 127.0f : best_scale_of_4_bits(values, count, extreme);
    }
    if (group == 0) {
      std::memcpy(scales, &scale, 4);
    } else {
      const uint16_t half = to_f16(scale);
      std::memcpy(static_cast<char*>(scales) + g * 2, &half, 2);
      scale = from_f16(half);
    }
    write_codes(values, count, scale, bits, codes + g * count);
  }
}

inline void encode_weights(const void* w, Dtype dtype, int64_t k, int64_t group, int bits, uint8_t* codes,
                           void* scales) {
  if (dtype == Dtype::f32) {
    encode_groups(static_cast<const float*>(w), k, group, bits, codes, scales);
  } else {
    encode_groups(static_cast<const uint16_t*>(w), k, group, bits, codes, scales);
  }
}

}  // namespace octavo::OCTAVO_ISA
