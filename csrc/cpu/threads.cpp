#include "threads.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "amx_state.hpp"
#include "denormals.hpp"
#include "processors.hpp"

namespace octavo {
namespace {

// Iterations of spinning before a thread yields its processor to other processes, and before it looks whether the thread
// that it waits for has lost its own: some 20 microseconds.
constexpr int kSpins = 4096, kSpinsToLook = 1024;
// For how long the caller's processor may be another thread's at most, before it looks again.
constexpr auto kMostLent = std::chrono::milliseconds(2);
// Bytes that a thread fetches ahead at most: they must still be in its second-level cache when it reads them.
constexpr int64_t kMostFetched = 256 * 1024;

// The tasks of one loop that one thread starts with. The loop's number and the next task are one word: a thread that
// exchanges it for its successor has taken a task, and the loop is not over.
constexpr uint32_t kClosed = 0xffffffff;  // as the next task: there is none
struct alignas(64) Share {
  std::atomic<uint64_t> loop_and_next{0};
  std::atomic<int> processor{-1};  // where its thread was seen last
  std::atomic<bool> at_work{false};  // its thread runs tasks; of the caller: a step
  std::atomic<bool> moved{false};    // by the caller, to its own processor, until the tasks that it runs end
  Identity identity;
  // What it fetches while it waits.
  std::atomic<const char*> ahead{nullptr};
  std::atomic<int64_t> ahead_bytes{0};
};

// What a thread fetches while it waits, a little at a time, as it must see soon what it waits for.
class Fetching {
 public:
  explicit Fetching(const Share& share) : at_(share.ahead.load(std::memory_order_relaxed)) {
    end_ = at_ + share.ahead_bytes.load(std::memory_order_relaxed);
  }

  bool is_done() const { return at_ >= end_; }
  // To the first level, from which lines go to the second: Zen 4 drops prefetches to the second alone.
  void go_on() {
    for (int line = 0; line < 16; ++line, at_ += 64) __builtin_prefetch(at_);
  }

 private:
  const char *at_, *end_;
};

// Moves this thread to an allowed processor that no other thread of the pool uses, if there is one. On a busy machine the
// scheduler may keep two threads of the pool on one processor, while another one is idle.
void move_apart(const std::vector<Share>& shares) {
#ifdef __linux__
  const Processors allowed = allowed_processors();
  Processors free = allowed;
  for (const Share& share : shares) {
    const int processor = share.processor.load(std::memory_order_relaxed);
    if (processor >= 0 && processor < CPU_SETSIZE) CPU_CLR(processor, &free);
  }
  if (CPU_COUNT(&free) == 0) return;
  allow(free);
  allow(allowed);
#else
  (void)shares;
#endif
}

}  // namespace

struct ThreadPool::State {
  std::mutex mutex;  // guards sleeping and waking only
  std::condition_variable wake;
  std::vector<std::thread> threads;
  std::vector<Share> shares{1};  // one for each thread
  std::atomic<int> busy{0};
  std::atomic<bool> stop{false};
  std::atomic<int> sleeping{0};
  // Fields of the loop. A late thread may read the values of the next loop; the shares of its loop are closed by then,
  // and its exchange fails.
  std::atomic<const std::function<void(int64_t)>*> function{nullptr};
  std::atomic<int64_t> tasks{0};
  alignas(64) std::atomic<uint32_t> loop{0};     // one more for each loop
  alignas(64) std::atomic<int64_t> finished{0};  // tasks of this loop
  int size = 1;
  bool pinned = false;
  Processors callers{};  // of the caller outside of a step
  std::condition_variable returned;  // a moved thread has ended its tasks
  std::atomic<int> gave_way{0};      // the thread that moves the caller to its processor, or 0

  int64_t first_task(int64_t tasks_now, int thread) const { return tasks_now * thread / size; }

  // Runs the tasks of one share until none is left; returns how many it ran.
  int64_t run_share(int thread, uint32_t now) {
    std::atomic<uint64_t>& ticket = shares[thread].loop_and_next;
    int64_t ran = 0;
    uint64_t seen = ticket.load(std::memory_order_acquire);
    while (seen >> 32 == now) {
      const auto* f = function.load(std::memory_order_acquire);
      const int64_t task = static_cast<uint32_t>(seen);
      if (task >= first_task(tasks.load(std::memory_order_acquire), thread + 1)) break;
      if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      (*f)(task);
      ++ran;
      seen = ticket.load(std::memory_order_acquire);
    }
    return ran;
  }

  void run_loop(int thread, uint32_t now) {
    for (int i = 0; i < size; ++i) {
      const int64_t ran = run_share((thread + i) % size, now);
      if (ran > 0) finished.fetch_add(ran, std::memory_order_acq_rel);
    }
  }

  // Of a thread that is not the caller.
  void work_in_loop(int thread, uint32_t now, const Processors& processors) {
    Share& own = shares[thread];
    note_processor(thread);
    own.at_work.store(true, std::memory_order_release);
    run_loop(thread, now);
    own.at_work.store(false, std::memory_order_seq_cst);
    if (!own.moved.load(std::memory_order_seq_cst)) return;
    own.moved.store(false, std::memory_order_relaxed);
    { std::lock_guard<std::mutex> lock(mutex); }
    returned.notify_one();
    allow(processors);
    note_processor(thread);  // away from the caller
  }

  // The caller waits for the last tasks of others. Another process may have the processor of such a thread for some
  // milliseconds, so that thread ends its task on the caller's.
  void lend_processor() {
    if (pinned) return;
    for (int i = 1; i < size; ++i) {
      Share& late = shares[i];
      if (!late.at_work.load(std::memory_order_acquire) || !late.identity.is_off()) continue;
      late.moved.store(true, std::memory_order_seq_cst);
      late.identity.bring_here(allowed_processors());
      shares[0].at_work.store(false, std::memory_order_relaxed);
      std::unique_lock<std::mutex> lock(mutex);
      returned.wait_for(lock, kMostLent, [&] { return !late.at_work.load(std::memory_order_seq_cst); });
      shares[0].at_work.store(true, std::memory_order_relaxed);
      return;
    }
  }

  // A thread waits for the caller. If that has no processor, it gets this one, and this thread another: returns whether.
  bool swap_with_caller(int thread) {
    if (pinned || !shares[0].at_work.load(std::memory_order_acquire)) return false;
    Processors allowed;
    {
      std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
      if (!lock || busy.load() == 0 || gave_way.load() != 0 || !shares[0].identity.is_off()) return false;
      allowed = callers;
      gave_way.store(thread);
    }
    shares[0].processor.store(current_processor(), std::memory_order_relaxed);
    shares[0].identity.bring_here(allowed);
    note_processor(thread);
    int self = thread;
    gave_way.compare_exchange_strong(self, 0);
    if (current_processor() == shares[0].processor.load(std::memory_order_relaxed)) std::this_thread::yield();
    return true;
  }

  // The caller was moved, and may run before the thread that gave way could go: that waits for its processor.
  void finish_swap() {
    if (gave_way.load(std::memory_order_relaxed) == 0) return;
    const int thread = gave_way.exchange(0);
    if (thread == 0) return;
    allow(callers);
    shares[thread].identity.send_away(callers);
  }

  // Records the processor of a thread; if the caller or an earlier thread is on it, the thread moves to another.
  void note_processor(int thread) {
    const int here = current_processor();
    shares[thread].processor.store(here, std::memory_order_relaxed);
    for (int i = 0; i < thread; ++i) {
      if (here < 0 || shares[i].processor.load(std::memory_order_relaxed) != here) continue;
      move_apart(shares);
      shares[thread].processor.store(current_processor(), std::memory_order_relaxed);
      return;
    }
  }

  void work(int thread, const Processors& processors, uint32_t seen) {
    const auto mode = DenormalMode::flushed();
    allow(processors);
    shares[thread].identity.set();
    amx::warm_up();
    int spins = 0;
    bool swapped = false;  // since the last loop
    Fetching fetching(shares[thread]);
    while (true) {
      const uint32_t now = loop.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_relaxed)) return;
      if (now != seen) {
        seen = now;
        work_in_loop(thread, now, processors);
        spins = 0;
        swapped = false;
        fetching = Fetching(shares[thread]);
      } else if (!fetching.is_done()) {
        fetching.go_on();
      } else if (busy.load(std::memory_order_relaxed) > 0) {
        pause_briefly();
        if (++spins % kSpinsToLook == 0 && !swapped) swapped = swap_with_caller(thread);
        if (spins % kSpins == 0) std::this_thread::yield();
      } else {
        std::unique_lock<std::mutex> lock(mutex);
        sleeping.fetch_add(1);
        wake.wait(lock, [&] { return stop || busy > 0 || loop != seen; });
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
  // Never destroyed: at exit other static objects may still use it, and its threads are asleep.
  static ThreadPool* pool = new ThreadPool;
  return *pool;
}

int ThreadPool::size() const { return state_->size; }
bool ThreadPool::pinned() const { return state_->pinned; }

void ThreadPool::resize(int size, bool pin) {
  State& s = *state_;
  s.join();
  s.size = size < 1 ? 1 : size;
  s.pinned = pin;
  s.shares = std::vector<Share>(s.size);
  const uint32_t seen = s.loop;
  amx::warm_up();
  const Processors all = allowed_processors();
  for (int i = 1; i < s.size; ++i) {
    const Processors own = pin ? only(all, i) : all;
    s.threads.emplace_back([&s, i, own, seen] { s.work(i, own, seen); });
  }
}

void ThreadPool::fetch_when_idle(int thread, const void* data, int64_t bytes) {
  Share& share = state_->shares[thread];
  share.ahead.store(static_cast<const char*>(data), std::memory_order_relaxed);
  share.ahead_bytes.store(std::min(bytes, kMostFetched), std::memory_order_relaxed);
}

void ThreadPool::parallel_for(int64_t tasks, const std::function<void(int64_t)>& f) {
  if (tasks <= 0) return;
  const auto mode = DenormalMode::flushed();  // as the other threads, so that it does not matter which has a task
  State& s = *state_;
  if (s.size == 1 || tasks == 1) {
    for (int64_t task = 0; task < tasks; ++task) f(task);
    return;
  }
  s.finish_swap();
  const uint32_t now = s.loop.load(std::memory_order_relaxed) + 1;
  for (Share& share : s.shares) share.loop_and_next.store(kClosed, std::memory_order_relaxed);
  s.function.store(&f, std::memory_order_release);
  s.tasks.store(tasks, std::memory_order_release);
  s.finished.store(0, std::memory_order_relaxed);
  for (int i = 0; i < s.size; ++i) {
    const uint64_t first = static_cast<uint64_t>(s.first_task(tasks, i));
    s.shares[i].loop_and_next.store(uint64_t{now} << 32 | first, std::memory_order_release);
  }
  s.note_processor(0);
  s.loop.store(now, std::memory_order_seq_cst);
  s.wake_all();
  s.run_loop(0, now);
  int spins = 0;
  Fetching fetching(s.shares[0]);
  while (s.finished.load(std::memory_order_acquire) < tasks) {
    if (!fetching.is_done()) {
      fetching.go_on();
      continue;
    }
    pause_briefly();
    if (++spins % kSpinsToLook == 0) s.lend_processor();
    if (spins % kSpins == 0) std::this_thread::yield();
  }
}

ThreadPool::Busy::Busy() {
  State& s = *ThreadPool::instance().state_;
  if (s.busy.load() == 0) {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.callers = allowed_processors();
    s.shares[0].identity.set();
    if (s.pinned) allow(only(s.callers, 0));
  }
  s.shares[0].at_work.store(true, std::memory_order_release);
  s.busy.fetch_add(1);
  s.wake_all();
}
ThreadPool::Busy::~Busy() {
  State& s = *ThreadPool::instance().state_;
  s.shares[0].at_work.store(false, std::memory_order_relaxed);
  s.finish_swap();
  if (s.busy.fetch_sub(1) == 1 && s.pinned) allow(s.callers);
}

}  // namespace octavo
