// float16, held as uint16_t, for processors without instructions for it.
#pragma once
#include <cstdint>
#include <cstring>

namespace octavo {

// Exact: every float16 is a float32.
inline float from_f16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31, fraction = half & 0x3ffu;
  float magnitude;
  if (exponent == 0) {
    magnitude = static_cast<float>(fraction) * 0x1p-24f;
  } else {
    const uint32_t bits = (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    std::memcpy(&magnitude, &bits, 4);
  }
  return sign ? -magnitude : magnitude;
}

// To the nearest, ties to even; what is too great becomes infinite, and NaN stays NaN.
inline uint16_t to_f16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00);
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00);
  if (bits < 0x38800000u) {
    // Below the least normal number: adding 0.5 leaves the multiple of 2^-24 in the low bits.
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  bits += 0xfffu + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | (bits - 0x38000000u) >> 13);
}

}  // namespace octavo
