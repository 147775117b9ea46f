// Copies of cache blocks, in all layers at once.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

namespace octavo {

// Block numbers (source, target).
using BlockPairs = std::vector<std::pair<int64_t, int64_t>>;

// Copies blocks of `bytes` within each of the arrays; every source is read before any target is written.
void copy_blocks(const std::vector<uintptr_t>& arrays, const BlockPairs& pairs, int64_t bytes);

// Copies blocks of `bytes` from each source array to the target array of the same index.
void swap_blocks(const std::vector<uintptr_t>& sources, const std::vector<uintptr_t>& targets, const BlockPairs& pairs,
                 int64_t bytes);

// Copies blocks of all arrays to `rows`, of which each has a block's bytes in the arrays one after the other, and back.
// `sizes`: bytes of a block in each array.
void read_blocks(const std::vector<uintptr_t>& arrays, const std::vector<int64_t>& sizes,
                 const std::vector<int64_t>& blocks, uintptr_t rows);
void write_blocks(const std::vector<uintptr_t>& arrays, const std::vector<int64_t>& sizes,
                  const std::vector<int64_t>& blocks, uintptr_t rows);

}  // namespace octavo
