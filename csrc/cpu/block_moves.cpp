#include "block_moves.hpp"

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_set>

#include "ranges.hpp"

namespace octavo {

namespace {

// Whether a block is both read and written, so that the order of the copies matters.
bool entangled(const BlockPairs& pairs) {
  std::unordered_set<int64_t> sources;
  for (const auto& pair : pairs) sources.insert(pair.first);
  for (const auto& pair : pairs)
    if (sources.count(pair.second)) return true;
  return false;
}

void check(const BlockPairs& pairs, int64_t bytes) {
  if (bytes < 0) throw std::invalid_argument("a block has at least 0 bytes, not " + std::to_string(bytes));
  for (const auto& pair : pairs)
    if (pair.first < 0 || pair.second < 0)
      throw std::invalid_argument("there is no block " + std::to_string(std::min(pair.first, pair.second)));
}

char* block(uintptr_t array, int64_t index, int64_t bytes) { return reinterpret_cast<char*>(array) + index * bytes; }

void copy_entangled(uintptr_t array, const BlockPairs& pairs, int64_t bytes) {
  std::unique_ptr<char[]> held(new char[static_cast<size_t>(bytes) * pairs.size()]);
  char* place = held.get();
  for (const auto& pair : pairs) {
    std::memcpy(place, block(array, pair.first, bytes), static_cast<size_t>(bytes));
    place += bytes;
  }
  place = held.get();
  for (const auto& pair : pairs) {
    std::memcpy(block(array, pair.second, bytes), place, static_cast<size_t>(bytes));
    place += bytes;
  }
}

// Copying 16 bytes costs about as much as one unit of work.
int64_t work_of(int64_t bytes) { return bytes / 16 + 1; }

// Calls copy(place in a cache array, place in a row, bytes) for each block in each array.
template <typename Copy>
void for_rows(const std::vector<uintptr_t>& arrays, const std::vector<int64_t>& sizes,
              const std::vector<int64_t>& blocks, uintptr_t rows, const Copy& copy) {
  const int64_t count = static_cast<int64_t>(arrays.size());
  if (sizes.size() != arrays.size())
    throw std::invalid_argument("as many sizes as arrays are needed, not " + std::to_string(sizes.size()) + " and " +
                                std::to_string(count));
  std::vector<int64_t> offsets(arrays.size() + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    if (sizes[i] < 0) throw std::invalid_argument("a block has at least 0 bytes, not " + std::to_string(sizes[i]));
    offsets[i + 1] = offsets[i] + sizes[i];
  }
  for (const int64_t block : blocks)
    if (block < 0) throw std::invalid_argument("there is no block " + std::to_string(block));
  const int64_t row = offsets[count];
  if (count == 0) return;
  for_row_ranges(static_cast<int64_t>(blocks.size()) * count, work_of(row / count), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t array = i % count;
      copy(block(arrays[array], blocks[i / count], sizes[array]), block(rows, i / count, row) + offsets[array],
           static_cast<size_t>(sizes[array]));
    }
  });
}

}  // namespace

void copy_blocks(const std::vector<uintptr_t>& arrays, const BlockPairs& pairs, int64_t bytes) {
  if (!entangled(pairs)) {
    swap_blocks(arrays, arrays, pairs, bytes);
    return;
  }
  check(pairs, bytes);
  const int64_t count = static_cast<int64_t>(pairs.size());
  for_row_ranges(static_cast<int64_t>(arrays.size()), work_of(bytes) * count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) copy_entangled(arrays[i], pairs, bytes);
  });
}

void swap_blocks(const std::vector<uintptr_t>& sources, const std::vector<uintptr_t>& targets, const BlockPairs& pairs,
                 int64_t bytes) {
  if (sources.size() != targets.size())
    throw std::invalid_argument("as many source as target arrays are needed, not " + std::to_string(sources.size()) +
                                " and " + std::to_string(targets.size()));
  check(pairs, bytes);
  const int64_t count = static_cast<int64_t>(pairs.size());
  for_row_ranges(static_cast<int64_t>(sources.size()) * count, work_of(bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto& pair = pairs[i % count];
      if (sources[i / count] == targets[i / count] && pair.first == pair.second) continue;
      std::memcpy(block(targets[i / count], pair.second, bytes), block(sources[i / count], pair.first, bytes),
                  static_cast<size_t>(bytes));
    }
  });
}

void read_blocks(const std::vector<uintptr_t>& arrays, const std::vector<int64_t>& sizes,
                 const std::vector<int64_t>& blocks, uintptr_t rows) {
  for_rows(arrays, sizes, blocks, rows,
           [](const char* in_cache, char* in_row, size_t bytes) { std::memcpy(in_row, in_cache, bytes); });
}

void write_blocks(const std::vector<uintptr_t>& arrays, const std::vector<int64_t>& sizes,
                  const std::vector<int64_t>& blocks, uintptr_t rows) {
  for_rows(arrays, sizes, blocks, rows,
           [](char* in_cache, const char* in_row, size_t bytes) { std::memcpy(in_cache, in_row, bytes); });
}

}  // namespace octavo
