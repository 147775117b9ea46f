// AMX tiles in plain C++, bit for bit as the processor has them: for the check at start, and for tests on any processor.
//
// TDPBF16PS, for each element of C (float32), with rows of A and columns of B of up to 32 bfloat16:
//     even = odd = +0
//     for pair = 0, 1, ...: even = fma(a[2 pair], b[2 pair], even);  odd = fma(a[2 pair + 1], b[2 pair + 1], odd)
//     c = c + (even + odd)
// Each step rounds to nearest even, takes subnormal operands as zeros of their sign, and gives a zero of its sign for a
// result that is tiny after rounding. MXCSR plays no part, and no exception flag is set.
// The first NaN of a, b, the sum so far (and of c, even + odd; of even, odd) is the result, made quiet; without one,
// infinity times zero and infinities that cancel give 0xffc00000.
// Every element depends on its row of A, its column of B and its own C only.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace octavo::amx::emulated {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

// A subnormal number as a zero of its sign.
inline uint32_t flushed(uint32_t bits) { return (bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits; }

constexpr uint32_t kQuiet = 0x00400000u, kDefaultNan = 0xffc00000u, kLeastNormal = 0x00800000u;

// a * b + c; a and b are bfloat16 widened, and the product is exact in double.
inline uint32_t fma_flushed(uint32_t a, uint32_t b, uint32_t c) {
  if (is_nan(a)) return a | kQuiet;
  if (is_nan(b)) return b | kQuiet;
  if (is_nan(c)) return c | kQuiet;
  a = flushed(a);
  b = flushed(b);
  c = flushed(c);
  const uint32_t result = bits_of(std::fma(float_of(a), float_of(b), float_of(c)));
  if (is_nan(result)) return kDefaultNan;  // infinity times zero, or infinities that cancel
  // The least normal number may come from a subnormal one that 24 bits without a bound of the exponent would hold: then it
  // is tiny. Exact: c and the bound are multiples of 2^-151 near each other, and double holds the product.
  if ((result & 0x7fffffffu) == kLeastNormal) {
    const double sign = result >> 31 ? -1 : 1, bound = std::ldexp(1.0, -126) - std::ldexp(1.0, -151);
    const double product = static_cast<double>(float_of(a)) * float_of(b);
    if (sign * product < bound - sign * static_cast<double>(float_of(c))) return result & 0x80000000u;
  }
  return flushed(result);
}

inline uint32_t add_flushed(uint32_t a, uint32_t b) {
  if (is_nan(a)) return a | kQuiet;
  if (is_nan(b)) return b | kQuiet;
  const uint32_t result = bits_of(float_of(flushed(a)) + float_of(flushed(b)));
  return is_nan(result) ? kDefaultNan : flushed(result);
}

// The tile registers of a thread.
class Tiles {
 public:
  // LDTILECFG. What the processor refuses with an exception ends the process. A start row other than 0, which an
  // interrupted load leaves, is not emulated.
  void configure(const void* operand) {
    const auto* bytes = static_cast<const uint8_t*>(operand);
    release();
    if (bytes[0] == 0) return;
    bool valid = bytes[0] == 1 && bytes[1] == 0;
    for (int i = 2; i < 16; ++i) valid &= bytes[i] == 0;
    for (int t = 0; t < 16; ++t) {
      uint16_t row_bytes;
      std::memcpy(&row_bytes, bytes + 16 + 2 * t, 2);
      const uint8_t rows = bytes[48 + t];
      valid &= t < 8 ? row_bytes <= 64 && rows <= 16 && (row_bytes == 0) == (rows == 0) : row_bytes == 0 && rows == 0;
      if (t < 8) row_bytes_[t] = row_bytes, rows_[t] = rows;
    }
    check(valid);
    configured_ = true;
  }
  void release() { *this = Tiles(); }
  void zero(int t) {
    use(t);
    std::memset(data_[t], 0, sizeof data_[t]);
  }
  // Rows and bytes beyond the tile's size become zero.
  void load(int t, const void* p, int64_t stride) {
    zero(t);
    check(row_bytes_[t] % 4 == 0);
    for (int r = 0; r < rows_[t]; ++r) std::memcpy(data_[t][r], static_cast<const char*>(p) + r * stride, row_bytes_[t]);
  }
  void store(int t, void* p, int64_t stride) const {
    use(t);
    check(row_bytes_[t] % 4 == 0);
    for (int r = 0; r < rows_[t]; ++r) std::memcpy(static_cast<char*>(p) + r * stride, data_[t][r], row_bytes_[t]);
  }
  void dpbf16ps(int c, int a, int b) {
    check_product(c, a, b);
    for (int m = 0; m < rows_[c]; ++m)
      for (int n = 0; n < row_bytes_[c] / 4; ++n) {
        uint32_t even = 0, odd = 0;
        for (int k = 0; k < row_bytes_[a] / 4; ++k) {
          const uint32_t x = word(a, m, k), y = word(b, k, n);
          even = fma_flushed(x << 16, y << 16, even);
          odd = fma_flushed(x & 0xffff0000u, y & 0xffff0000u, odd);
        }
        const uint32_t sum = add_flushed(word(c, m, n), add_flushed(even, odd));
        std::memcpy(data_[c][m] + 4 * n, &sum, 4);
      }
  }
  // TDPBSSD: products of signed bytes, four of them added to each int32, which wraps around.
  void dpbssd(int c, int a, int b) {
    check_product(c, a, b);
    for (int m = 0; m < rows_[c]; ++m)
      for (int n = 0; n < row_bytes_[c] / 4; ++n) {
        uint32_t sum = word(c, m, n);
        for (int k = 0; k < row_bytes_[a] / 4; ++k)
          for (int i = 0; i < 4; ++i)
            sum += static_cast<uint32_t>(static_cast<int8_t>(data_[a][m][4 * k + i]) * static_cast<int8_t>(data_[b][k][4 * n + i]));
        std::memcpy(data_[c][m] + 4 * n, &sum, 4);
      }
  }

 private:
  static void check(bool valid) {
    if (!valid) std::abort();
  }
  void check_product(int c, int a, int b) const {
    use(a), use(b), use(c);
    check(a != b && a != c && b != c);
    check(row_bytes_[a] % 4 == 0 && row_bytes_[b] % 4 == 0 && row_bytes_[c] % 4 == 0);
    check(rows_[c] == rows_[a] && row_bytes_[c] == row_bytes_[b] && row_bytes_[a] == 4 * rows_[b]);
  }
  void use(int t) const { check(configured_ && t >= 0 && t < 8 && rows_[t] != 0); }
  uint32_t word(int t, int row, int column) const {
    uint32_t x;
    std::memcpy(&x, data_[t][row] + 4 * column, 4);
    return x;
  }

  bool configured_ = false;
  uint16_t row_bytes_[8] = {};
  uint8_t rows_[8] = {};
  uint8_t data_[8][16][64] = {};
};

inline Tiles& tiles() {
  static thread_local Tiles of_this_thread;
  return of_this_thread;
}

}  // namespace octavo::amx::emulated
