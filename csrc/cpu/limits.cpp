#include "limits.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "arena.hpp"
#include "gemm.hpp"

namespace octavo {
namespace {

// Short passes: a long one is never free of other processes' work on a shared machine.
constexpr int kPasses = 64;

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
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
  work(0);
  for (std::thread& other : others) other.join();
  return best;
}

void check(int threads) {
  if (threads < 1 || threads > 4096)
    throw std::invalid_argument("threads must be between 1 and 4096, not " + std::to_string(threads));
}

}  // namespace

double measure_read_bandwidth(int threads) {
  check(threads);
  constexpr int64_t kBytes = int64_t{256} << 20;
  const std::shared_ptr<void> memory = allocate_weights(kBytes);
  char* const data = static_cast<char*>(memory.get());
  std::fill_n(data, kBytes, 1);  // pages that were never written are all one page of zeros
  // Each pass reads another part, which the passes in between have driven out of the caches.
  constexpr int64_t kParts = 8;
  const int64_t share = kBytes / kParts / threads / 4096 * 4096;
  const double seconds = best_seconds(threads, [&](int pass, int thread) {
    float sink[16];
    isa().gemm->read(data + (pass % kParts * threads + thread) * share, share, sink);
  });
  return static_cast<double>(share * threads) / seconds;
}

double measure_fma_peak(int threads) {
  check(threads);
  constexpr int64_t kRounds = 100000;
  std::atomic<int64_t> operations{0};
  const double seconds = best_seconds(threads, [&](int, int) {
    float sink[16] = {0.5f, 0.5f};
    operations = kRounds * isa().gemm->multiply_add(kRounds, sink);
  });
  return static_cast<double>(operations * threads) / seconds;
}

}  // namespace octavo
