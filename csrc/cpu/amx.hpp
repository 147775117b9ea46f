// The tile registers of AMX: permission, configuration, and the instructions as functions of a register's number.
//
// The compiler does not know tile registers: it neither saves nor moves them, so a kernel keeps them within one function
// and calls no other function that uses tiles meanwhile. The instructions are written as assembly with a "memory" clobber,
// which the header of GCC 12 lacks: without it a store that a load of a tile should read may be put off.
#pragma once
#include <cstdint>

#if defined(OCTAVO_EMULATED)
#include "amx_emulated.hpp"
#endif

namespace octavo::amx {

// The operand of LDTILECFG: rows, and bytes of a row, of each of 8 tiles; entries 8 to 15 are zero.
struct alignas(64) Config {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int number_of_rows, int bytes_of_row) {
    rows[tile] = static_cast<uint8_t>(number_of_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes_of_row);
  }
};
static_assert(sizeof(Config) == 64, "");

#if defined(OCTAVO_EMULATED)
inline void configure(const Config& c) { emulated::tiles().configure(&c); }
inline void release() { emulated::tiles().release(); }
template <int T>
inline void zero() { emulated::tiles().zero(T); }
template <int T>
inline void load(const void* p, int64_t stride) { emulated::tiles().load(T, p, stride); }
template <int T>
inline void store(void* p, int64_t stride) { emulated::tiles().store(T, p, stride); }
template <int C, int A, int B>
inline void dot_bf16() { emulated::tiles().dpbf16ps(C, A, B); }
template <int C, int A, int B>
inline void dot_int8() { emulated::tiles().dpbssd(C, A, B); }
#else
#define OCTAVO_TILE_INLINE inline __attribute__((always_inline))
OCTAVO_TILE_INLINE void configure(const Config& c) { asm volatile("ldtilecfg %0" ::"m"(c)); }
OCTAVO_TILE_INLINE void release() { asm volatile("tilerelease"); }
template <int T>
OCTAVO_TILE_INLINE void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T>
OCTAVO_TILE_INLINE void load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
OCTAVO_TILE_INLINE void store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
// C += A * B. In AT&T order the operands are B, A, C.
template <int C, int A, int B>
OCTAVO_TILE_INLINE void dot_bf16() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
// Of signed bytes, in 32 bits.
template <int C, int A, int B>
OCTAVO_TILE_INLINE void dot_int8() { asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
#endif

}  // namespace octavo::amx
