// The pool of threads that all kernels share.
#pragma once
#include <cstdint>
#include <functional>

namespace octavo {

// Runs loops on `size` threads, the caller being one of them. Between the kernels of a step the others wait by
// spinning, as the next loop comes within microseconds; outside a step (see Busy) they sleep in the kernel.
class ThreadPool {
 public:
  static ThreadPool& instance();

  // Sets the number of threads, the caller included; pins thread i to the i-th processor of the process if asked.
  void resize(int size, bool pin);
  int size() const;

  // Calls f(task) for each task in 0 .. tasks - 1. Tasks are handed out in runs fixed by `tasks` and the number of
  // threads; which thread runs a task must not matter to its result. Not reentrant: f must not call it.
  void parallel_for(int64_t tasks, const std::function<void(int64_t)>& f);

  // While one lives, the other threads spin instead of sleeping.
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
