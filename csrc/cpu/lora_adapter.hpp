// The matrices of one adapter for one layer, and the slots of a layer.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "lora.hpp"

namespace octavo {

// Owns a packed copy of the two matrices of a part.
class LowRankPart {
 public:
  // down [rank, inputs] and up [outputs, rank], contiguous, both float32 or both bfloat16. Uses no thread of the pool.
  // Throws std::invalid_argument.
  LowRankPart(const void* down, const void* up, int64_t rank, int64_t inputs, int64_t outputs, Dtype dtype);
  const LowRankView& view() const { return view_; }
  int64_t inputs() const { return inputs_; }
  int64_t nbytes() const { return nbytes_; }

 private:
  std::shared_ptr<void> data_;
  LowRankView view_;
  int64_t inputs_, nbytes_;
};

// The same of an embedding: a row of `down`, transposed, is read by token id.
struct LowRankTable {
  std::vector<char> down;  // [rows][rank]
  int64_t rows;
  LowRankPart up;  // of one input
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

// For each part of a layer, null where the adapter has none.
using LowRankAdapter = std::vector<std::shared_ptr<const LowRankPart>>;

}  // namespace octavo
