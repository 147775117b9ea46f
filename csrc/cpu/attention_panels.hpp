// Where the panels of a sequence's keys and values are.
#pragma once
#include "attention_math.hpp"
#include "attention_tile.hpp"

namespace octavo::OCTAVO_ISA {

namespace {

// One sequence's panels for one KV head. Those of blocks that hold none are gathered into buffers.
template <typename T>
class Panels {
 public:
  Panels(const Attention& a, const int32_t* table, int64_t seq_len, int64_t kv_head)
      : shape_(a.shape), caches_{a.key_cache, a.value_cache}, table_(table), seq_len_(seq_len), kv_head_(kv_head) {}

  static constexpr int kBuffers = kSegments;
  // How many panels before its use one is fetched.
  static constexpr int kAhead = 8;

  // Of each buffer.
  static int64_t floats(const CacheShape& shape) {
    return kPanel * shape.padded() * static_cast<int64_t>(sizeof(T)) / 4;
  }

  // `memory` has room for kBuffers buffers.
  void set_buffers(float* memory) {
    for (T*& buffer : buffers_) {
      buffer = reinterpret_cast<T*>(memory);
      memory += floats(shape_);
    }
  }

  // Looks up where the panels of a piece are; all below are of them.
  void find(Range panels) {
    first_ = panels.begin;
    count_ = panels.end - panels.begin;
    next_count_ = 0;
    locate(table_, kv_head_, panels, offsets_);
  }

  // Looks up the keys that are read after this piece: the first of those panels of a sequence.
  void find_next(const int32_t* table, int64_t kv_head, Range panels) {
    next_count_ = smaller(kAhead, panels.end - panels.begin);
    locate(table, kv_head, {panels.begin, panels.begin + next_count_}, next_);
  }

  const T* keys(int64_t index, int buffer) const {
    if (shape_.panelled()) return found(kKeys, index);
    constexpr int64_t kWord = kInterleaved ? 2 : 1;  // elements that stay together
    const Rows rows(*this, kKeys, index * kPanel);
    T* target = buffers_[buffer];
    for (int64_t d = 0; d < shape_.padded(); d += kWord)
      for (const T* row : rows.at) {
        std::memcpy(target, row + d, kWord * sizeof(T));
        target += kWord;
      }
    return buffers_[buffer];
  }

  const T* values(int64_t index, int buffer) const {
    if (shape_.panelled()) return found(kValues, index);
    const int64_t padded = shape_.padded();
    const Rows rows(*this, kValues, index * kPanel);
    for (int64_t token = 0; token < kPanel; token += 2) {
      T* target = buffers_[buffer] + token * padded;
      const T *first = rows.at[token], *second = rows.at[token + 1];
      if (kInterleaved) {
        for (int64_t d = 0; d < padded; ++d) {
          target[2 * d] = first[d];
          target[2 * d + 1] = second[d];
        }
      } else {
        std::memcpy(target, first, sizeof(T) * static_cast<size_t>(padded));
        std::memcpy(target + padded, second, sizeof(T) * static_cast<size_t>(padded));
      }
    }
    return buffers_[buffer];
  }

  // The panel to prefetch while `in_use` is used, kAhead panels ahead: blocks are anywhere in memory, so the hardware
  // prefetcher cannot predict the next one. A piece's keys are followed by its values, and these by the next piece's
  // keys. Panels of keys and values have equal sizes, so one can be prefetched, in the same order, while the other is
  // read.
  const T* keys_ahead(int64_t index, const T* in_use) const { return ahead(index - first_, in_use); }
  const T* values_ahead(int64_t index, const T* in_use) const { return ahead(count_ + index - first_, in_use); }

  // The scales of an int8 cache: scales[i] for position begin + i, of those in the range.
  void gather_key_scales(Range positions, int64_t begin, float* scales) const {
    gather_scales(kKeys, positions, begin, scales);
  }
  void gather_value_scales(Range positions, int64_t begin, float* scales) const {
    gather_scales(kValues, positions, begin, scales);
  }

 private:
  enum Which { kKeys, kValues };
  static constexpr bool kInterleaved = Pairs<T>::kColumn == 2;

  const char* tile(Which which, int64_t position) const {
    const int64_t block = table_[position / shape_.block_size];
    return caches_[which] + (block * shape_.kv_heads + kv_head_) * shape_.tile_bytes();
  }

  const T* token_at(Which which, int64_t position) const {
    return reinterpret_cast<const T*>(tile(which, position)) + position % shape_.block_size * shape_.padded();
  }

  void locate(const int32_t* table, int64_t kv_head, Range panels, int64_t* offsets) const {
    if (!shape_.panelled()) return;
    const int64_t block_bytes = shape_.kv_heads * shape_.tile_bytes();
    const int64_t panel_bytes = kPanel * shape_.padded() * static_cast<int64_t>(sizeof(T));
    int64_t block = panels.begin * kPanel / shape_.block_size;
    int64_t panel = panels.begin * kPanel % shape_.block_size / kPanel;
    for (int64_t i = 0; i < panels.end - panels.begin; ++i) {
      offsets[i] = table[block] * block_bytes + kv_head * shape_.tile_bytes() + panel * panel_bytes;
      if (++panel * kPanel < shape_.block_size) continue;
      panel = 0;
      ++block;
    }
  }

  const T* at(Which which, int64_t offset) const { return reinterpret_cast<const T*>(caches_[which] + offset); }
  const T* found(Which which, int64_t index) const { return at(which, offsets_[index - first_]); }

  // kAhead panels after the `turn`-th that the piece reads.
  const T* ahead(int64_t turn, const T* in_use) const {
    if (!shape_.panelled()) return in_use;
    turn += kAhead;
    if (turn < count_) return at(kKeys, offsets_[turn]);
    if (turn < 2 * count_) return at(kValues, offsets_[turn - count_]);
    return turn - 2 * count_ < next_count_ ? at(kKeys, next_[turn - 2 * count_]) : in_use;
  }

  // The tokens of a panel, in blocks that hold none. Past the end of the sequence, where there may be no block, they are
  // the first one: no row uses them.
  struct Rows {
    Rows(const Panels& panels, Which which, int64_t position) {
      for (int64_t token = 0; token < kPanel; ++token)
        at[token] = panels.token_at(which, position + token < panels.seq_len_ ? position + token : position);
    }
    const T* at[kPanel];
  };

  void gather_scales(Which which, Range positions, int64_t begin, float* scales) const {
    for (int64_t p = positions.begin; p < positions.end;) {
      const float* of_block = reinterpret_cast<const float*>(tile(which, p) + shape_.data_bytes());
      const int64_t offset = p % shape_.block_size;
      const int64_t count = smaller(shape_.block_size - offset, positions.end - p);
      std::memcpy(scales + p - begin, of_block + offset, sizeof(float) * static_cast<size_t>(count));
      p += count;
    }
  }

  const CacheShape& shape_;
  const char* caches_[2];
  const int32_t* table_;
  int64_t seq_len_, kv_head_;
  T* buffers_[kBuffers];
  int64_t first_ = 0, count_ = 0, next_count_ = 0;
  int64_t offsets_[kPiece / kPanel], next_[kAhead];  // bytes, of keys in their array as of values in theirs
};

}  // namespace

}  // namespace octavo::OCTAVO_ISA
