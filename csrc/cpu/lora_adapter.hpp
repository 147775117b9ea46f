// The matrices of one adapter for one layer, and the slots of a layer.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "lora.hpp"

namespace octavo {

// Owns packed copies of an adapter's matrices for one layer, one after the other.
class LowRankAdapter {
 public:
  // down [rank, inputs] and up [outputs, rank], contiguous; rank 0: the adapter has no such part.
  struct Source {
    const void *down, *up;
    int64_t rank, outputs;
  };
  // All float32 or all bfloat16. Without inputs there is no `down`. Uses no thread of the pool. Throws
  // std::invalid_argument.
  LowRankAdapter(const std::vector<Source>& parts, int64_t inputs, Dtype dtype);
  const LowRankView& part(size_t i) const { return parts_[i]; }
  const char* data() const { return static_cast<const char*>(data_.get()); }
  int64_t nbytes() const { return nbytes_; }

 private:
  std::shared_ptr<void> data_;
  std::vector<LowRankView> parts_;
  int64_t nbytes_ = 0;
};

// The same of an embedding: a row of `down`, transposed, is read by token id.
struct LowRankTable {
  std::vector<char> down;  // [rows][rank]
  int64_t rows;
  LowRankAdapter up;
};

// What each slot of a layer holds, null for nothing. It changes between steps only.
template <typename Adapter>
class LowRankSlots {
 public:
  explicit LowRankSlots(int64_t slots) : held_(static_cast<size_t>(slots)) {}
  int64_t size() const { return static_cast<int64_t>(held_.size()); }
  void place(int64_t slot, std::shared_ptr<const Adapter> adapter) { held_.at(static_cast<size_t>(slot)) = std::move(adapter); }
  // Of any number: null also where there is no such slot.
  const Adapter* at(int64_t slot) const { return slot >= 0 && slot < size() ? held_[static_cast<size_t>(slot)].get() : nullptr; }

 private:
  std::vector<std::shared_ptr<const Adapter>> held_;
};

}  // namespace octavo
