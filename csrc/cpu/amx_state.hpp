// Whether this process may use the tiles of AMX, and whether they compute what they should.
#pragma once
#include <cstdint>
#include <cstring>

#include "amx.hpp"
#include "amx_emulated.hpp"

#if defined(__x86_64__) && !defined(OCTAVO_EMULATED)
#include <cpuid.h>
#if defined(__linux__)
#include <cerrno>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace octavo::amx {

enum class State { available, no_instruction, not_enabled_by_system, small_signal_stack, not_permitted, wrong_results };

inline const char* describe(State state) {
  switch (state) {
    case State::available: return "available";
    case State::no_instruction: return "the processor lacks it";
    case State::not_enabled_by_system: return "the system does not enable it";
    case State::small_signal_stack: return "a thread has a signal stack that is too small for its registers (sigaltstack)";
    case State::not_permitted: return "the system does not permit it (Linux before 5.16, or a filter of system calls)";
    case State::wrong_results: return "its products differ from the specification";
  }
  return "";
}

#if defined(OCTAVO_EMULATED)
inline State state() { return State::available; }
inline bool multiplies_int8() { return true; }
inline void warm_up() {}
#elif !defined(__x86_64__) || !defined(__linux__) || defined(OCTAVO_NO_AMX)  // the assembler does not know it
inline State state() { return State::no_instruction; }
inline bool multiplies_int8() { return false; }
inline void warm_up() {}
#else

// Asks the system for permission. It holds for all threads of the process, and for its children by fork; not after exec.
inline State request() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return State::no_instruction;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  if ((edx & kTile) == 0 || (edx & kBf16) == 0) return State::no_instruction;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx >> 27 & 1) == 0) return State::not_enabled_by_system;  // OSXSAVE
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low >> 17 & 3) != 3) return State::not_enabled_by_system;  // the states of configuration and data
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  if (syscall(SYS_arch_prctl, kRequest, kTileData) == 0) return State::available;
  return errno == ENOSPC ? State::small_signal_stack : State::not_permitted;
}

// The product of whole tiles, and that of the emulation, are the same bits.
template <void (*Dot)(), void (emulated::Tiles::*Emulated)(int, int, int)>
inline bool same_product(const void* a, const void* b, const void* c) {
  uint8_t result[1024], expected[1024];
  Config config;
  for (int t = 0; t < 3; ++t) config.set(t, 16, 64);
  emulated::Tiles tiles;
  tiles.configure(&config);
  tiles.load(0, c, 64);
  tiles.load(1, a, 64);
  tiles.load(2, b, 64);
  (tiles.*Emulated)(0, 1, 2);
  tiles.store(0, expected, 64);
  configure(config);
  load<0>(c, 64);
  load<1>(a, 64);
  load<2>(b, 64);
  Dot();
  store<0>(result, 64);
  release();
  return std::memcmp(result, expected, sizeof result) == 0;
}

// Whether a product of tiles of pseudorandom bfloat16, some of them subnormal, has the bits of the emulation.
inline bool computes_as_specified() {
  uint16_t a[16][32], b[16][32];
  float c[16][16];
  uint32_t x = 1;
  const auto next = [&x] { return x = x * 1664525u + 1013904223u; };
  // Any sign and fraction; exponents from 2^-8 to 2^7, but for one in 16 that is 0.
  const auto number = [&next] {
    const uint32_t r = next() >> 8;
    return static_cast<uint16_t>((r & 0x807fu) | (r >> 16 & 15 ? (119 + (r >> 20 & 15)) << 7 : 0));
  };
  for (auto& row : a)
    for (uint16_t& v : row) v = number();
  for (auto& row : b)
    for (uint16_t& v : row) v = number();
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      const uint32_t bits = static_cast<uint32_t>(number()) << 16;
      std::memcpy(&c[m][n], &bits, 4);
    }
  return same_product<dot_bf16<0, 1, 2>, &emulated::Tiles::dpbf16ps>(a, b, c);
}

inline State state() {
  static const State found = [] {
    const State asked = request();
    return asked == State::available && !computes_as_specified() ? State::wrong_results : asked;
  }();
  return found;
}

// Whether there are products of bytes too, which are as specified: a processor that has tiles has them, so far.
inline bool multiplies_int8() {
  static const bool found = [] {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (state() != State::available || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx >> 25 & 1) == 0) return false;
    uint8_t bytes[3][1024];
    uint32_t x = 1;
    for (auto& tile : bytes)
      for (uint8_t& byte : tile) byte = static_cast<uint8_t>((x = x * 1664525u + 1013904223u) >> 24);
    return same_product<dot_int8<0, 1, 2>, &emulated::Tiles::dpbssd>(bytes[0], bytes[1], bytes[2]);
  }();
  return found;
}

// Uses a tile of this thread once. At the first use the system makes room for the thread's tiles, some 20 us, which a
// thread of the pool spends before its first step.
inline void warm_up() {
  if (state() != State::available) return;
  Config config;
  config.set(0, 16, 64);
  configure(config);
  zero<0>();
  release();
}
#endif

}  // namespace octavo::amx
