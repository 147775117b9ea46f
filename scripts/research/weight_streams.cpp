// What reading weights costs two threads, by streams read side by side and by prefetching, without an engine around it. AVX2.
//
//     g++ -O3 -mavx2 -mfma -pthread scripts/research/weight_streams.cpp -o /tmp/weight_streams && /tmp/weight_streams
//
// The products of a decode step of SmolLM2-135M in bfloat16, one row, a barrier after each. Ways take turns; medians of all turns.
#include <immintrin.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr long kGroup = 16, kLine = 64;  // columns side by side; bytes of two k of them

struct Product {
  const char* weights;
  long k, groups;
  long group_bytes() const { return k * kGroup * 2; }
};

std::vector<Product> products;
float x[2048], sums[2][16 * 16];
const __m256i kOdd = _mm256_set1_epi32(static_cast<int>(0xffff0000u));

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

__m256 even(const char* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_load_si256((const __m256i*)p), 16)); }
__m256 odd(const char* p) { return _mm256_castsi256_ps(_mm256_and_si256(_mm256_load_si256((const __m256i*)p), kOdd)); }

// One row by so many groups; Ahead: prefetched so many bytes ahead of each stream, or nothing if negative.
template <int Groups, long Ahead>
void multiply_row(const char* weights, long group_bytes, long k, float* out) {
  __m256 sum[2 * Groups];
  for (auto& s : sum) s = _mm256_setzero_ps();
  for (long i = 0; i < k; i += 2, weights += kLine) {
    const __m256 first = _mm256_broadcast_ss(x + i), second = _mm256_broadcast_ss(x + i + 1);
#pragma GCC unroll 8
    for (int g = 0; g < Groups; ++g) {
      const char* line = weights + g * group_bytes;
      if (Ahead >= 0) __builtin_prefetch(line + Ahead, 0, 2);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        sum[2 * g + v] = _mm256_fmadd_ps(first, even(line + 32 * v), sum[2 * g + v]);
        sum[2 * g + v] = _mm256_fmadd_ps(second, odd(line + 32 * v), sum[2 * g + v]);
      }
    }
  }
  for (int i = 0; i < 2 * Groups; ++i) _mm256_storeu_ps(out + 8 * i, sum[i]);
}

template <int Groups, long Ahead>
void run_half(int thread, const Product& p) {
  long group = p.groups * thread / 2;
  const long end = p.groups * (thread + 1) / 2;
  const auto weights = [&] { return p.weights + group * p.group_bytes(); };
  for (; group + Groups <= end; group += Groups) multiply_row<Groups, Ahead>(weights(), p.group_bytes(), p.k, sums[thread]);
  for (; group < end; ++group) multiply_row<1, Ahead>(weights(), p.group_bytes(), p.k, sums[thread]);
}

void read_half(int thread, const Product& p) {
  const long bytes = p.group_bytes() * p.groups / 2, half = bytes / 2;
  const char* from = p.weights + thread * bytes;
  __m256i seen = _mm256_setzero_si256();
  for (long at = 0; at < half; at += 32) {
    seen = _mm256_or_si256(seen, _mm256_load_si256((const __m256i*)(from + at)));
    seen = _mm256_or_si256(seen, _mm256_load_si256((const __m256i*)(from + half + at)));
  }
  _mm256_storeu_si256((__m256i*)sums[thread], seen);
}

struct Way {
  const char* name;
  void (*half)(int thread, const Product&);
};
const Way kWays[] = {{"reading alone", read_half},          {"1 stream", run_half<1, -1>},
                     {"2 streams", run_half<2, -1>},        {"4 streams", run_half<4, -1>},
                     {"6 streams", run_half<6, -1>},        {"2, 1 KiB ahead", run_half<2, 1024>},
                     {"2, 4 KiB ahead", run_half<2, 4096>}, {"4, 1 KiB ahead", run_half<4, 1024>},
                     {"4, 4 KiB ahead", run_half<4, 4096>}, {"6, 2 KiB ahead", run_half<6, 2048>}};

class Barrier {
 public:
  void wait() {
    const int turn = turn_;
    if (arrived_.fetch_add(1) == 1) {
      arrived_ = 0;
      turn_ = turn + 1;
    } else {
      while (turn_ == turn) _mm_pause();
    }
  }

 private:
  std::atomic<int> arrived_{0}, turn_{0};
};

long make_products() {
  long bytes = 0;
  const auto add = [&](long k, long n) {
    products.push_back({reinterpret_cast<const char*>(bytes), k, n / kGroup});
    bytes += k * n * 2;
  };
  for (int layer = 0; layer < 30; ++layer) {
    add(576, 960);
    add(576, 576);
    add(576, 3072);
    add(1536, 576);
  }
  add(576, 49152);
  constexpr long kPage = 2 << 20;
  void* memory = mmap(nullptr, bytes + 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char* begin = (char*)(((uintptr_t)memory + kPage - 1) / kPage * kPage);
  madvise(begin, bytes + kPage, MADV_HUGEPAGE);
  std::memset(begin, 0x3c, bytes + kPage);
  for (Product& p : products) p.weights = begin + (intptr_t)p.weights;
  return bytes;
}

void print(const char* name, std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  std::printf("%-16s %6.2f ms (%.2f to %.2f)\n", name, 1e3 * seconds[seconds.size() / 2], 1e3 * seconds.front(), 1e3 * seconds.back());
}

void pin(int processor) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

}  // namespace

int main() {
  constexpr int kTurns = 40, kNumWays = sizeof kWays / sizeof *kWays;
  const long bytes = make_products();
  for (float& value : x) value = 1e-3f;
  Barrier barrier;
  std::atomic<int> way{-1};
  const auto run = [&](int thread) {
    for (const Product& p : products) {
      kWays[way].half(thread, p);
      barrier.wait();
    }
  };
  std::thread other([&] {
    pin(1);
    for (barrier.wait(); way >= 0; barrier.wait()) run(1);
  });
  pin(0);
  std::vector<double> seconds[kNumWays];
  for (int turn = 0; turn < kTurns; ++turn) {
    for (int w = 0; w < kNumWays; ++w) {
      way = w;
      const double start = now();
      barrier.wait();
      run(0);
      seconds[w].push_back(now() - start);
    }
  }
  way = -1;
  barrier.wait();
  other.join();
  std::printf("%.0f MB in %zu products\n", bytes / 1e6, products.size());
  for (int w = 0; w < kNumWays; ++w) print(kWays[w].name, seconds[w]);
}
