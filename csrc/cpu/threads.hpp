// The pool of threads that all kernels share.
#pragma once
#include <cstdint>
#include <functional>

namespace octavo {

// Runs loops on `size` threads, the caller being one of them. Between the kernels of a step the others wait by
// spinning, as the next loop comes within microseconds; outside a step (see Busy) they sleep in the kernel. A thread
// that finds itself on the processor of another moves away.
class ThreadPool {
 public:
  static ThreadPool& instance();

  // Sets the number of threads, the caller included. With `pin` thread i stays on the i-th processor that the caller
  // may use; the caller itself, thread 0, only during a step, as what it starts between steps would be bound with it.
  // Threads beyond the number of processors are not bound.
  void resize(int size, bool pin);
  int size() const;
  bool pinned() const;

  // Calls f(task) for each task in 0 .. tasks - 1, tasks < 2^32. Each thread starts on an equal run of neighbouring
  // tasks, and then helps the others with theirs, one task at a time: the caller never waits for a thread that another
  // process keeps from running, unless that thread is within a task. Which thread runs a task must not matter to its
  // result. Not reentrant: f must not call it, nor may two threads at once.
  void parallel_for(int64_t tasks, const std::function<void(int64_t)>& f);

  // A step: while one lives, the other threads spin instead of sleeping.
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
