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

  // Each row of x [rows, width] becomes the sum over the ranks + bias [width] + the same row of `add`, which has rows
  // `add_stride` floats apart; bias and add may be null. The ranks are joined as a binary tree, as even as possible,
  // (0 + 1) + (2 + 3): the same bits on every rank. Throws std::runtime_error after the timeout.
  void all_reduce(float* x, int64_t rows, int64_t width, const float* bias, const float* add, int64_t add_stride);

  // out [rows, size * width] becomes the ranks' x [rows, width] beside each other, in order of rank.
  void all_gather(const float* x, float* out, int64_t rows, int64_t width);

 private:
  struct alignas(64) Counter {
    std::atomic<uint64_t> published;
  };

  // out[0 .. count) becomes the sum of these ranks' slots from `offset` on.
  void sum_ranks(int first, int last, uint64_t parity, int64_t offset, int64_t count, float* out) const;
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
