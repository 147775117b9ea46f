// The processors that threads run on, and may run on: where it is Linux; elsewhere nothing is known and nothing changes.
#pragma once
#include <atomic>
#include <cstdint>

#ifdef __linux__
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int current_processor() {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}

// Processors that a thread may use.
#ifdef __linux__
using Processors = cpu_set_t;

inline Processors allowed_processors() {
  Processors allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) CPU_ZERO(&allowed);
  return allowed;
}

// Sets the processors of this thread; an empty set changes nothing.
inline void allow(const Processors& processors) {
  if (CPU_COUNT(&processors) > 0) sched_setaffinity(0, sizeof(processors), &processors);
}

// The index-th of them, or none if there are fewer.
inline Processors only(const Processors& processors, int index) {
  Processors one;
  CPU_ZERO(&one);
  int seen = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &processors) && seen++ == index) CPU_SET(cpu, &one);
  return one;
}

// A thread of the pool as the others see it. Its number is safe to use when it has ended.
class Identity {
 public:
  // Of this thread.
  void set() { id_.store(static_cast<pid_t>(syscall(SYS_gettid)), std::memory_order_relaxed); }

  // Whether it has no processor: its clock stands still.
  bool is_off() const {
    const int64_t before = time();
    for (int i = 0; i < 32; ++i) pause_briefly();
    return before >= 0 && time() == before;
  }

  // Moves it here, at once if it does not run, and lets it run on these processors from then on. It may take this
  // processor before the second half, so it has to allow itself its processors too.
  void bring_here(const Processors& processors) const {
    const int processor = current_processor();
    if (processor < 0 || processor >= CPU_SETSIZE) return;
    Processors here;
    CPU_ZERO(&here);
    CPU_SET(processor, &here);
    let_use(here);
    let_use(processors);
  }

  // Moves it from this processor to another one of these, if it is here.
  void send_away(const Processors& processors) const {
    Processors others = processors;
    const int processor = current_processor();
    if (processor >= 0 && processor < CPU_SETSIZE) CPU_CLR(processor, &others);
    let_use(others);
    let_use(processors);
  }

 private:
  void let_use(const Processors& processors) const {
    const pid_t id = id_.load(std::memory_order_relaxed);
    if (id > 0 && CPU_COUNT(&processors) > 0) sched_setaffinity(id, sizeof(processors), &processors);
  }

  // Nanoseconds of processor time, or -1. The clock's number is as pthread_getcpuclockid makes it.
  int64_t time() const {
    timespec now{};
    const auto id = static_cast<unsigned>(id_.load(std::memory_order_relaxed));
    if (id == 0 || clock_gettime(static_cast<clockid_t>(~id << 3 | 6), &now) != 0) return -1;
    return now.tv_sec * 1000000000 + now.tv_nsec;
  }

  std::atomic<pid_t> id_{0};
};
#else
struct Processors {};
inline Processors allowed_processors() { return {}; }
inline void allow(const Processors&) {}
inline Processors only(const Processors&, int) { return {}; }
struct Identity {
  void set() {}
  bool is_off() const { return false; }
  void bring_here(const Processors&) const {}
  void send_away(const Processors&) const {}
};
#endif

}  // namespace octavo
