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

}  // namespace octavo
