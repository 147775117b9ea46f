#include "threads.hpp"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {

namespace {
inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins this long at a time before it lets another process have the processor, so that a busy machine is not blocked.
constexpr int kSpins = 4096;

void pin_to(int index) {
#ifdef __linux__
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  int seen = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || seen++ != index) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
    return;
  }
#else
  (void)index;
#endif
}
}  // namespace

struct ThreadPool::State {
  std::mutex mutex;  // guards sleeping and waking only
  std::condition_variable wake;
  std::vector<std::thread> threads;
  std::atomic<int> busy{0};
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> generation{0};  // one more for each loop
  std::atomic<int> unfinished{0};       // threads still in the loop
  std::atomic<int> sleeping{0};
  const std::function<void(int64_t)>* function = nullptr;
  int64_t tasks = 0;
  int size = 1;

  void run_share(int thread) const {
    const int64_t begin = tasks * thread / size, end = tasks * (thread + 1) / size;
    for (int64_t task = begin; task < end; ++task) (*function)(task);
  }

  void work(int thread, bool pin, uint64_t seen) {
    if (pin) pin_to(thread);
    int spins = 0;
    while (true) {
      const uint64_t now = generation.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_relaxed)) return;
      if (now != seen) {
        seen = now;
        run_share(thread);
        unfinished.fetch_sub(1, std::memory_order_release);
        spins = 0;
      } else if (busy.load(std::memory_order_relaxed) > 0) {
        pause_briefly();
        if (++spins % kSpins == 0) std::this_thread::yield();
      } else {
        std::unique_lock<std::mutex> lock(mutex);
        sleeping.fetch_add(1);
        wake.wait(lock, [&] { return stop || busy > 0 || generation != seen; });
        sleeping.fetch_sub(1);
      }
    }
  }

  void wake_all() {
    if (sleeping.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex); }
    wake.notify_all();
  }

  void join() {
    stop = true;
    { std::lock_guard<std::mutex> lock(mutex); }
    wake.notify_all();
    for (auto& thread : threads) thread.join();
    threads.clear();
    stop = false;
  }
};

ThreadPool::ThreadPool() : state_(new State) {}
ThreadPool::~ThreadPool() {
  state_->join();
  delete state_;
}

ThreadPool& ThreadPool::instance() {
  // Never destroyed: at exit other static objects may still be in use, and the threads sleep anyway.
  static ThreadPool* pool = new ThreadPool;
  return *pool;
}

int ThreadPool::size() const { return state_->size; }

void ThreadPool::resize(int size, bool pin) {
  state_->join();
  state_->size = size < 1 ? 1 : size;
  const uint64_t seen = state_->generation;
  for (int i = 1; i < state_->size; ++i) state_->threads.emplace_back([this, i, pin, seen] { state_->work(i, pin, seen); });
}

void ThreadPool::parallel_for(int64_t tasks, const std::function<void(int64_t)>& f) {
  if (tasks <= 0) return;
  State& s = *state_;
  if (s.size == 1 || tasks == 1) {
    for (int64_t task = 0; task < tasks; ++task) f(task);
    return;
  }
  s.function = &f;
  s.tasks = tasks;
  s.unfinished.store(s.size - 1, std::memory_order_relaxed);
  s.generation.fetch_add(1, std::memory_order_seq_cst);
  s.wake_all();
  s.run_share(0);
  int spins = 0;
  while (s.unfinished.load(std::memory_order_acquire) > 0) {
    pause_briefly();
    if (++spins % kSpins == 0) std::this_thread::yield();
  }
}

ThreadPool::Busy::Busy() {
  State& s = *ThreadPool::instance().state_;
  s.busy.fetch_add(1);
  s.wake_all();
}
ThreadPool::Busy::~Busy() { ThreadPool::instance().state_->busy.fetch_sub(1); }

}  // namespace octavo
