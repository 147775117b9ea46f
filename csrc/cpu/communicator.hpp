// Collectives of the ranks of a tensor-parallel group on one machine, through memory that all of them map.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

namespace octavo {

// One rank of the group. The shared memory, zero at first, holds a counter and two slots for each rank. A collective is
// done in pieces of at most one slot. A rank copies its piece into one of its slots, by the piece's parity, increments
// its counter, and reads the pieces of the others when their counters are as high. So a slot is overwritten only after
// every rank has published a later piece, that is, has read this one.
class Communicator {
 public:
  // `memory` is aligned to 64 bytes. `timeout`: seconds to wait for the other ranks.
  Communicator(void* memory, int64_t bytes, int rank, int size, double timeout);

  // Bytes of shared memory for slots of this many floats.
  static int64_t bytes_for(int size, int64_t slot_floats);

  // x[i] becomes the sum over the ranks, added in the order of the ranks: the same bits on every rank.
  // Throws std::runtime_error after the timeout.
  void all_reduce(float* x, int64_t count);

  // out [rows, size * width] becomes the ranks' x [rows, width] beside each other, in order of rank.
  void all_gather(const float* x, float* out, int64_t rows, int64_t width);

 private:
  struct alignas(64) Counter {
    std::atomic<uint64_t> published;
  };

  float* slot(int rank) const { return slots_ + (2 * rank + (pieces_ & 1)) * slot_floats_; }
  void publish_and_wait();

  Counter* counters_;
  float* slots_;
  int64_t slot_floats_;
  int rank_, size_;
  double timeout_;
  uint64_t pieces_ = 0;
};

}  // namespace octavo
