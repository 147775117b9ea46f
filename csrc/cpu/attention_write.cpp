// Writes keys and values to their slots in the layout of attention.hpp.
#include "attention_write.hpp"

#include <cstring>
#include <type_traits>

#include "rows.hpp"

namespace octavo::OCTAVO_ISA {

namespace {

// Where a head's dimensions lie: dimension d at first + d / 2 * pair_step + d % 2 * half_step.
struct Place {
  int64_t first, pair_step, half_step;
};

// In a tile, for the token at this offset of its block.
Place key_place(const CacheShape& shape, int64_t offset) {
  if (!shape.panelled()) return {offset * shape.padded(), 2, 1};
  const int64_t panel = offset / kPanel * kPanel * shape.padded(), token = offset % kPanel;
  if (shape.dtype == Dtype::bf16) return {panel + 2 * token, 2 * kPanel, 1};
  return {panel + token, 2 * kPanel, kPanel};
}

Place value_place(const CacheShape& shape, int64_t offset) {
  const bool interleaved = shape.panelled() && shape.dtype == Dtype::bf16;
  if (interleaved) return {offset / 2 * 2 * shape.padded() + offset % 2, 4, 2};
  return {offset * shape.padded(), 2, 1};  // values by planes are simply [tokens][P]
}

template <typename T, typename C>
void put_floats(const T* x, int64_t head_dim, const Place& place, C* tile) {
  C* target = tile + place.first;
  if (std::is_same_v<T, C> && place.pair_step == 2) {
    std::memcpy(target, x, sizeof(T) * static_cast<size_t>(head_dim));
    return;
  }
  for (int64_t d = 0; d < head_dim; d += 2, target += place.pair_step) {
    store_one(target, load_one(x + d));
    store_one(target + place.half_step, load_one(x + d + 1));
  }
}

// As it is: conversion of a bfloat16 to itself.
void put_floats(const uint16_t* x, int64_t head_dim, const Place& place, uint16_t* tile) {
  uint16_t* target = tile + place.first;
  if (place.half_step == 1) {
    for (int64_t d = 0; d < head_dim; d += 2, target += place.pair_step) std::memcpy(target, x + d, 4);
    return;
  }
  for (int64_t d = 0; d < head_dim; d += 2, target += place.pair_step) {
    target[0] = x[d];
    target[place.half_step] = x[d + 1];
  }
}

// Returns the scale. What is not finite cannot be scaled: then the scale, and so every element, is NaN.
template <typename T>
float put_int8(const T* x, int64_t head_dim, const Place& place, int8_t* tile) {
  float largest = 0.0f;
  for (int64_t d = 0; d < head_dim; ++d) {
    const float magnitude = std::fabs(load_one(x + d));
    if (!(magnitude <= largest)) largest = magnitude;
    if (magnitude != magnitude) break;
  }
  const bool finite = largest <= 3.4028235e38f;
  const float scale = finite ? largest / 127.0f : NAN;
  const float inverse = finite && scale > 1e-37f ? 1.0f / scale : 0.0f;  // no less: its inverse would overflow
  for (int64_t d = 0; d < head_dim; ++d) {
    const float level = finite ? __builtin_rintf(min(127.0f, max(-127.0f, load_one(x + d) * inverse))) : 1.0f;
    tile[place.first + d / 2 * place.pair_step + d % 2 * place.half_step] = static_cast<int8_t>(level);
  }
  return scale;
}

template <typename T>
void put_head(const T* x, const CacheShape& shape, const Place& place, int64_t offset, char* tile) {
  if (shape.dtype == Dtype::f32)
    put_floats(x, shape.head_dim, place, reinterpret_cast<float*>(tile));
  else if (shape.dtype == Dtype::bf16)
    put_floats(x, shape.head_dim, place, reinterpret_cast<uint16_t*>(tile));
  else
    reinterpret_cast<float*>(tile + shape.data_bytes())[offset] =
        put_int8(x, shape.head_dim, place, reinterpret_cast<int8_t*>(tile));
}

// A token's vector of a latent cache, from its two parts.
template <typename T>
void put_latent(const T* first, const T* rest, const CacheShape& shape, int64_t offset, char* tile) {
  T* joined = reinterpret_cast<T*>(attention_scratch(shape.head_dim));
  std::memcpy(joined, first, sizeof(T) * static_cast<size_t>(shape.latent));
  std::memcpy(joined + shape.latent, rest, sizeof(T) * static_cast<size_t>(shape.head_dim - shape.latent));
  put_head(joined, shape, key_place(shape, offset), offset, tile);
}

}  // namespace

void write_cache(const CacheWrite& a, const Step& step, int64_t begin, int64_t end) {
  const CacheShape& shape = a.shape;
  const int64_t tile_bytes = shape.tile_bytes();
  with_type(a.dtype, [&](auto type) {
    using T = std::remove_pointer_t<decltype(type)>;
    // Neighbours of a block go together, head by head: their elements share lines of the cache.
    for (int64_t row = begin, count; row < end; row += count) {
      count = 1;
      if (step.slots[row] < 0) continue;
      const int64_t block = step.slots[row] / shape.block_size, first = block * shape.block_size;
      const auto is_neighbour = [&](int64_t slot) { return slot >= first && slot < first + shape.block_size; };
      while (count < kPanel && row + count < end && is_neighbour(step.slots[row + count])) ++count;
      const T *k = static_cast<const T*>(a.k) + row * a.k_stride, *v = static_cast<const T*>(a.v) + row * a.v_stride;
      for (int64_t head = 0; head < shape.kv_heads; ++head) {
        const int64_t tile = (block * shape.kv_heads + head) * tile_bytes, column = head * shape.head_dim;
        for (int64_t i = 0; i < count; ++i) {
          const int64_t offset = step.slots[row + i] - first;
          const T *key = k + i * a.k_stride + column, *value = v + i * a.v_stride + column;
          if (shape.latent) {
            put_latent(key, value, shape, offset, a.key_cache + tile);
            continue;
          }
          put_head(key, shape, key_place(shape, offset), offset, a.key_cache + tile);
          put_head(value, shape, value_place(shape, offset), offset, a.value_cache + tile);
        }
      }
    }
  });
}

}  // namespace octavo::OCTAVO_ISA
