#include "limits.hpp"

#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "arena.hpp"
#include "gemm.hpp"
#include "quant.hpp"

namespace octavo {
namespace {

// Short passes: a long one is never free of other processes' work on a shared machine.
constexpr int kPasses = 64;

#ifdef __linux__
std::vector<int> allowed_processors() {
  std::vector<int> found;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0)
    for (int processor = 0; processor < CPU_SETSIZE; ++processor)
      if (CPU_ISSET(processor, &allowed)) found.push_back(processor);
  return found;
}

// Two threads on one processor would take turns, which is not what they could do.
void pin_to(int processor) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(processor, &one);
  sched_setaffinity(0, sizeof(one), &one);
}
#else
std::vector<int> allowed_processors() { return {}; }
void pin_to(int) {}
#endif

// Least seconds of kPasses passes of f(pass, thread), started in all threads at once and ended when the last one ends.
double best_seconds(int threads, const std::function<void(int, int)>& f) {
  using Clock = std::chrono::steady_clock;
  std::atomic<int> arrived{0};
  const auto meet = [&](int times) {
    arrived.fetch_add(1);
    while (arrived.load() < times * threads) std::this_thread::yield();
  };
  double best = 1e30;
  const auto work = [&](int thread) {
    for (int pass = 0; pass < kPasses; ++pass) {
      meet(2 * pass + 1);
      const auto start = Clock::now();
      f(pass, thread);
      meet(2 * pass + 2);
      if (thread == 0) best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
    }
  };
  // None is the caller, which stays free to run anywhere.
  const std::vector<int> processors = allowed_processors();
  std::vector<std::thread> others;
  for (int thread = 0; thread < threads; ++thread)
    others.emplace_back([&, thread] {
      if (!processors.empty()) pin_to(processors[thread % processors.size()]);
      work(thread);
    });
  for (std::thread& other : others) other.join();
  return best;
}

void check(int threads) {
  if (threads < 1 || threads > 4096)
    throw std::invalid_argument("threads must be between 1 and 4096, not " + std::to_string(threads));
}

}  // namespace

namespace {

constexpr int64_t kBytes = int64_t{256} << 20;
// Each pass reads another part, which the passes in between have driven out of the caches.
constexpr int64_t kParts = 8;

using Read = void (*)(const char* data, int64_t bytes, float* sink);

double read_bandwidth(int threads, Read read) {
  check(threads);
  // Kept, as it is measured again and again between kernels.
  static const std::shared_ptr<void> memory = [] {
    std::shared_ptr<void> made = allocate_weights(kBytes);
    std::fill_n(static_cast<char*>(made.get()), kBytes, 1);  // pages never written are all one page of zeros
    return made;
  }();
  const char* const data = static_cast<const char*>(memory.get());
  const int64_t share = kBytes / kParts / threads / 4096 * 4096;
  const double seconds = best_seconds(threads, [&](int pass, int thread) {
    float sink[16];
    read(data + (pass % kParts * threads + thread) * share, share, sink);
  });
  return static_cast<double>(share * threads) / seconds;
}

void read_chunks(const char* data, int64_t bytes, float* sink) {
  constexpr int64_t kChunk = 2048, kLine = 64;
  const int64_t chunks = bytes / kChunk;
  // Steps of an odd number without a common factor with the count visit every chunk once, far from the one before.
  int64_t step = chunks * 5 / 8 | 1;
  while (std::gcd(step, chunks) != 1) step += 2;
  const auto read = isa().gemm->read;
  for (int64_t i = 0, at = 0; i < chunks; ++i) {
    const int64_t next = (at + step) % chunks;
    // Whole and to the second level: by parts or to the first level it was slower.
    for (int64_t line = 0; line < kChunk; line += kLine) __builtin_prefetch(data + next * kChunk + line, 0, 2);
    read(data + at * kChunk, kChunk, sink);
    at = next;
  }
}

using Rounds = int64_t (*)(int64_t rounds, float* sink);

double peak(int threads, Rounds rounds) {
  check(threads);
  constexpr int64_t kRounds = 100000;
  std::atomic<int64_t> operations{0};
  const double seconds = best_seconds(threads, [&](int, int) {
    float sink[16] = {0.5f, 0.5f};
    operations = kRounds * rounds(kRounds, sink);
  });
  return static_cast<double>(operations * threads) / seconds;
}

}  // namespace

double measure_read_bandwidth(int threads) {
  return read_bandwidth(threads,
                        [](const char* data, int64_t bytes, float* sink) { isa().gemm->read(data, bytes, sink); });
}

double measure_chunk_bandwidth(int threads) { return read_bandwidth(threads, read_chunks); }

double measure_fma_peak(int threads) { return peak(threads, isa().gemm->multiply_add); }

double measure_bf16_dot_peak(int threads) { return peak(threads, isa().gemm->bf16_dot); }

double measure_int8_dot_peak(int threads) { return peak(threads, integer_isa().quant->int8_dot); }

}  // namespace octavo
