// Collectives through shared memory.
#include "communicator.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "ranges.hpp"

namespace octavo {

namespace {

constexpr int64_t kHeader = 64;
// Looks at another rank's counter before the processor is offered to others, and before the clock is read.
constexpr int kSpins = 1 << 10;
// Floats that are summed at once, in the first cache.
constexpr int64_t kSummedAtOnce = 1 << 10;

}  // namespace

int64_t Communicator::bytes_for(int size, int64_t slot_floats) {
  return size * (kHeader + 2 * slot_floats * static_cast<int64_t>(sizeof(float)));
}

Communicator::Communicator(void* memory, int64_t bytes, int rank, int size, double timeout)
    : counters_(static_cast<Counter*>(memory)),
      slots_(reinterpret_cast<float*>(static_cast<char*>(memory) + size * kHeader)),
      slot_floats_((bytes / size - kHeader) / 2 / static_cast<int64_t>(sizeof(float))),
      rank_(rank),
      size_(size),
      timeout_(timeout) {
  static_assert(sizeof(Counter) == kHeader);
  if (rank < 0 || rank >= size) throw std::invalid_argument("rank must be 0 to size - 1");
  if (reinterpret_cast<uintptr_t>(memory) % 64 != 0) throw std::invalid_argument("memory must be aligned to 64 bytes");
  if (bytes < bytes_for(size, 1)) throw std::invalid_argument("the shared memory is too small");
}

void Communicator::publish_and_wait() {
  ++pieces_;
  counters_[rank_].published.store(pieces_, std::memory_order_release);
  const auto start = std::chrono::steady_clock::now();
  for (int rank = 0; rank < size_; ++rank) {
    int spins = 0;
    while (counters_[rank].published.load(std::memory_order_acquire) < pieces_) {
      if (++spins % kSpins != 0) continue;
      std::this_thread::yield();
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
      if (waited.count() > timeout_)
        throw std::runtime_error("rank " + std::to_string(rank) + " of " + std::to_string(size_) +
                                 " has not come to a collective for " + std::to_string(timeout_) + " s");
    }
  }
}

void Communicator::sum_ranks(int first, int last, uint64_t parity, int64_t offset, int64_t count, float* out) const {
  if (last - first == 1) {
    std::memcpy(out, slots_ + (2 * first + parity) * slot_floats_ + offset, count * sizeof(float));
    return;
  }
  const int middle = first + (last - first + 1) / 2;
  float others[kSummedAtOnce];
  sum_ranks(first, middle, parity, offset, count, out);
  sum_ranks(middle, last, parity, offset, count, others);
  for (int64_t i = 0; i < count; ++i) out[i] += others[i];
}

void Communicator::all_reduce(float* x, int64_t rows, int64_t width, const float* bias, const float* add,
                              int64_t add_stride) {
  const int64_t count = rows * width;
  for (int64_t done = 0; done < count; done += slot_floats_) {
    const int64_t piece = std::min(slot_floats_, count - done);
    std::memcpy(slot(rank_), x + done, piece * sizeof(float));
    const uint64_t parity = pieces_ & 1;
    publish_and_wait();
    for_row_ranges(piece, 2 * size_, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin, part; i < end; i += part) {
        const int64_t row = (done + i) / width, column = (done + i) % width;
        part = std::min({end - i, width - column, kSummedAtOnce});
        float* out = x + done + i;
        sum_ranks(0, size_, parity, i, part, out);
        if (bias != nullptr)
          for (int64_t j = 0; j < part; ++j) out[j] += bias[column + j];
        if (add != nullptr)
          for (int64_t j = 0; j < part; ++j) out[j] += add[row * add_stride + column + j];
      }
    });
  }
}

void Communicator::all_gather(const float* x, float* out, int64_t rows, int64_t width) {
  if (width > slot_floats_) throw std::invalid_argument("a row is wider than the shared memory's slots");
  const int64_t at_once = slot_floats_ / std::max<int64_t>(width, 1);
  for (int64_t done = 0; done < rows; done += at_once) {
    const int64_t piece = std::min(at_once, rows - done);
    std::memcpy(slot(rank_), x + done * width, piece * width * sizeof(float));
    const uint64_t parity = pieces_ & 1;
    publish_and_wait();
    for_row_ranges(piece, size_ * width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int rank = 0; rank < size_; ++rank)
          std::memcpy(out + ((done + row) * size_ + rank) * width,
                      slots_ + (2 * rank + parity) * slot_floats_ + row * width, width * sizeof(float));
    });
  }
}

}  // namespace octavo
