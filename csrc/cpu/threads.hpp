// The pool of threads that all kernels share.
#pragma once
#include <cstdint>
#include <functional>

namespace octavo {

// Runs loops on `size` threads, the caller being one of them. Between the kernels of a step the others wait by
// spinning, as the next loop starts within microseconds; outside a step (see Busy) they sleep. Threads that share a
// processor move to different ones. If another process has the processor of a thread that is within a task, a thread
// that waits for it gives it its own, unless they are pinned: waiting would take as long as the other process's turn,
// some milliseconds.
class ThreadPool {
 public:
  static ThreadPool& instance();

  // Sets the number of threads, the caller included. With `pin`, thread i is bound to the i-th processor that the caller
  // may use; the caller, thread 0, during steps only, as threads and processes that it starts inherit the binding.
  // Threads beyond the number of processors are not bound.
  void resize(int size, bool pin);
  int size() const;
  bool pinned() const;

  // Calls f(task) for each task in 0 .. tasks - 1, tasks < 2^32. Each thread starts with an equal share of consecutive
  // tasks, and then takes tasks of the others, one at a time. A task's result must not depend on its thread. Not reentrant: neither f nor another thread may call
  // it meanwhile.
  void parallel_for(int64_t tasks, const std::function<void(int64_t)>& f);

  // From now on a thread that has ended its tasks of a loop fetches the first of these bytes into its caches while it
  // waits. It does not read them: the memory may be gone by then.
  void fetch_when_idle(int thread, const void* data, int64_t bytes);

  // A step: while an object exists, the other threads spin instead of sleeping.
  struct Busy {
    Busy();
    ~Busy();
  };

 private:
  ThreadPool();
  ~ThreadPool();
  struct State;
  State* state_;
};

inline void parallel_for(int64_t tasks, const std::function<void(int64_t)>& f) {
  ThreadPool::instance().parallel_for(tasks, f);
}

}  // namespace octavo
