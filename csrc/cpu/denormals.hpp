// Denormal numbers count as zero while kernels compute: on many processors arithmetic with them takes 10 to 50 times as
// long, and a prompt must not be able to make a step that slow.
#pragma once
#include <cstdint>
#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace octavo {

// The calling thread's way with denormals: read as zeros and written as zeros, or as IEEE 754 has them. An object sets
// it, and puts the one before back when it ends. (vdpbf16ps flushes them in any mode.)
class DenormalMode {
 public:
  static DenormalMode flushed() { return DenormalMode(kFlush); }
  static DenormalMode kept() { return DenormalMode(0); }
  DenormalMode(const DenormalMode&) = delete;
  DenormalMode& operator=(const DenormalMode&) = delete;
  ~DenormalMode() {
    if (changed_) write(before_);
  }

 private:
#if defined(__x86_64__) || defined(_M_X64)
  using Word = uint32_t;
  static constexpr Word kFlush = 0x8040;  // flush to zero, denormals are zero
  static Word read() { return _mm_getcsr(); }
  static void write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kFlush = Word{1} << 24;  // FZ: both
  static Word read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { asm volatile("msr fpcr, %0" ::"r"(word)); }
#else
  using Word = uint32_t;
  static constexpr Word kFlush = 0;
  static Word read() { return 0; }
  static void write(Word) {}
#endif

  explicit DenormalMode(Word bits) : before_(read()), changed_((before_ & kFlush) != bits) {
    if (changed_) write((before_ & ~kFlush) | bits);
  }

  Word before_;
  bool changed_;
};

}  // namespace octavo
