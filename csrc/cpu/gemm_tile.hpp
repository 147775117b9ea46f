// The matrix products' register tiles.
//
// A tile of R rows times G groups of 16 columns accumulates over a piece of k in order, then over the next; x is broadcast
// element by element, the weights are read in order, a cache line for two k of a group. For bfloat16 a vector holds 32-bit
// words of two consecutive k: shifted left it is the even one in float32, masked the odd one; or one instruction multiplies
// and adds both, and x is broadcast as such words too.
#pragma once
#include "gemm.hpp"
#include "vec.hpp"

namespace octavo::OCTAVO_ISA {

namespace {

constexpr int kVectors = kGroup / kLanes;  // of a group

// Whether bfloat16 is multiplied as it is: x is then rows of bfloat16 for such weights, otherwise of float32.
#if defined(OCTAVO_BF16) || defined(OCTAVO_AMX)
constexpr bool kMultipliesPairs = true;
#else
constexpr bool kMultipliesPairs = false;
#endif

// The most rows of a tile, and the most groups side by side for a number of rows; never more for more rows. Sums fill
// most of the registers: of 16, 12 hold those of 6 rows x 2 vectors or 1 x 12; of 32, 24 hold those of 8 x 3. A
// multiply-add takes 4 cycles, that of pairs 6, and one or two start in each, so that a tile wants 8 sums or more; and
// few rows, which wait for memory, want several streams of weights.
#if defined(OCTAVO_AVX512)
constexpr int kMaxRows = 8;
constexpr int most_groups(int rows) { return rows == 1 ? 8 : rows == 2 ? 6 : rows <= 4 ? 4 : 3; }
#elif defined(OCTAVO_AVX2)
constexpr int kMaxRows = 6;
constexpr int most_groups(int rows) { return rows == 1 ? 6 : rows == 2 ? 2 : 1; }
#else
constexpr int kMaxRows = 2;
constexpr int most_groups(int) { return 1; }
#endif

// Of all tiles.
constexpr int most_sums() {
  int most = 0;
  for (int rows = 1; rows <= kMaxRows; ++rows) most = rows * most_groups(rows) > most ? rows * most_groups(rows) : most;
  return most * kGroup;
}

struct Tile {
  const void* weights;  // of the first group
  int64_t group_bytes;
  int64_t k;  // of a piece
  int pieces;
  const float* x;  // of the first row
  int64_t x_stride;
  const char* ahead;   // fetched into the cache meanwhile: from here and from the same place of the groups beside,
  int64_t ahead_step;  // so many bytes further for each cache line read of a group
  bool apart;          // pieces are not joined
};

template <int R, int G>
OCTAVO_INLINE void multiply_add_row_by_row(F32 (&sums)[R][G * kVectors], const F32 (&w)[G * kVectors], const float* x,
                                           int64_t x_stride) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const F32 element = splat_anew(x + r * x_stride);
#pragma GCC unroll 16
    for (int v = 0; v < G * kVectors; ++v) add_product(sums[r][v], element, w[v]);
  }
}

// The cache that the next groups are prefetched into, for __builtin_prefetch. Measured: L2 for few rows, which read
// weights quickly; L1 for many.
constexpr int kFirstCache = 3, kSecondCache = 2;
constexpr int kManyTiles = 5;

template <int G, int Cache>
OCTAVO_INLINE void fetch_ahead(const char* line, int64_t group_bytes) {
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) __builtin_prefetch(line + g * group_bytes, 0, Cache);
}

// The accumulate_ functions add one piece to the sums and move on to the next.
template <int R, int G, int Cache>
OCTAVO_INLINE void accumulate_bf16(Tile& tile, F32 (&sums)[R][G * kVectors]) {
  const char* line = static_cast<const char*>(tile.weights);
  const char* ahead = tile.ahead;
  const float* x = tile.x;
  for (int64_t pairs = tile.k / 2; pairs > 0; --pairs) {
    F32 w[G * kVectors];
    fetch_ahead<G, Cache>(ahead, tile.group_bytes);
#pragma GCC unroll 16
    for (int v = 0; v < G * kVectors; ++v)
      w[v] = even_bf16(load_as<U32>(line + v / kVectors * tile.group_bytes + v % kVectors * (4 * kLanes)));
    multiply_add_row_by_row<R, G>(sums, w, x, tile.x_stride);
#pragma GCC unroll 16
    for (int v = 0; v < G * kVectors; ++v)
      w[v] = load_odd_bf16(line + v / kVectors * tile.group_bytes + v % kVectors * (4 * kLanes));
    multiply_add_row_by_row<R, G>(sums, w, x + 1, tile.x_stride);
    line += 4 * kGroup;
    ahead += tile.ahead_step;
    x += 2;
  }
  tile.weights = line;
  tile.ahead = ahead;
  tile.x = x;
}

#if defined(OCTAVO_AVX2)
// As accumulate_bf16, for one row. That waits for memory only, and six streams of weights that are left to the processor's own
// prefetching are read as fast as any: on a Zen 3 a step of one sequence takes 0.85 of the time of two streams fetched ahead.
template <int G>
OCTAVO_INLINE void accumulate_bf16_of_one_row(Tile& tile, F32 (&sums)[1][G * kVectors]) {
  const char* line = static_cast<const char*>(tile.weights);
  const float* x = tile.x;
  for (int64_t pairs = tile.k / 2; pairs > 0; --pairs) {
    const F32 even = splat_anew(x), odd = splat_anew(x + 1);
#pragma GCC unroll 16
    for (int v = 0; v < G * kVectors; ++v) {
      const char* words = line + v / kVectors * tile.group_bytes + v % kVectors * (4 * kLanes);
      add_product(sums[0][v], even, even_bf16(load_as<U32>(words)));
      add_product(sums[0][v], odd, load_odd_bf16(words));
    }
    line += 4 * kGroup;
    x += 2;
  }
  tile.weights = line;
  tile.x = x;
}
#endif

#if defined(OCTAVO_AVX512) && !defined(OCTAVO_BF16)
// The rows of a tile of x by a pointer for every three: those between are addressed by the stride and twice it.
template <int R>
class RowsByThrees {
 public:
  OCTAVO_INLINE RowsByThrees(const float* x, int64_t stride) : stride_(stride) {
#pragma GCC unroll 4
    for (int i = 0; i < kBases; ++i) {
      bases_[i] = x + 3 * i * stride;
      asm("" : "+r"(bases_[i]));  // or GCC would see that they are one
    }
  }
  OCTAVO_INLINE const float* row(int r) const { return bases_[r / 3] + r % 3 * stride_; }
  OCTAVO_INLINE void advance(int64_t by) {
#pragma GCC unroll 4
    for (int i = 0; i < kBases; ++i) bases_[i] += by;
  }

 private:
  static constexpr int kBases = (R + 2) / 3;
  const float* bases_[kBases];
  int64_t stride_;
};

// As accumulate_bf16, for many rows of 512 bits. From one pointer GCC makes an offset for each row and each of the two k,
// more than there are registers, and keeps some in those of vectors, from where they come through a port that multiply-adds
// wait for.
template <int R, int G, int Cache>
OCTAVO_INLINE void accumulate_bf16_of_many_rows(Tile& tile, F32 (&sums)[R][G]) {
  const char* line = static_cast<const char*>(tile.weights);
  const char* ahead = tile.ahead;
  RowsByThrees<R> x(tile.x, tile.x_stride);
  for (int64_t pairs = tile.k / 2; pairs > 0; --pairs) {
    F32 w[G];
    fetch_ahead<G, Cache>(ahead, tile.group_bytes);
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
#pragma GCC unroll 16
      for (int g = 0; g < G; ++g) {
        const char* pairs_of_group = line + g * tile.group_bytes;
        w[g] = k == 0 ? even_bf16(load_as<U32>(pairs_of_group)) : load_odd_bf16(pairs_of_group);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const F32 element = splat_anew(x.row(r) + k);
#pragma GCC unroll 16
        for (int g = 0; g < G; ++g) add_product(sums[r][g], element, w[g]);
      }
    }
    line += 4 * kGroup;
    ahead += tile.ahead_step;
    x.advance(2);
  }
  tile.weights = line;
  tile.ahead = ahead;
  tile.x = x.row(0);
}
#endif

#if defined(OCTAVO_BF16)
template <int R, int G, int Cache>
OCTAVO_INLINE void accumulate_pairs(Tile& tile, F32 (&sums)[R][G]) {
  const char* line = static_cast<const char*>(tile.weights);
  const char* ahead = tile.ahead;
  const float* x = tile.x;
  for (int64_t pairs = tile.k / 2; pairs > 0; --pairs) {
    U32 w[G];
    fetch_ahead<G, Cache>(ahead, tile.group_bytes);
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) w[g] = load_as<U32>(line + g * tile.group_bytes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const U32 pair = (U32)splat_anew(x + r * tile.x_stride);
#pragma GCC unroll 16
      for (int g = 0; g < G; ++g) add_pair_products(sums[r][g], w[g], pair);
    }
    line += 4 * kGroup;
    ahead += tile.ahead_step;
    ++x;
  }
  tile.weights = line;
  tile.ahead = ahead;
  tile.x = x;
}
#endif

template <int R, int G, int Cache>
OCTAVO_INLINE void accumulate_f32(Tile& tile, F32 (&sums)[R][G * kVectors]) {
  const char* line = static_cast<const char*>(tile.weights);
  const char* ahead = tile.ahead;
  const float* x = tile.x;
  for (int64_t k = tile.k; k > 0; --k) {
    F32 w[G * kVectors];
    fetch_ahead<G, Cache>(ahead, tile.group_bytes);
#pragma GCC unroll 16
    for (int v = 0; v < G * kVectors; ++v)
      w[v] = load_as<F32>(line + v / kVectors * tile.group_bytes + v % kVectors * (4 * kLanes));
    multiply_add_row_by_row<R, G>(sums, w, x, tile.x_stride);
    line += 4 * kGroup;
    ahead += tile.ahead_step;
    ++x;
  }
  tile.weights = line;
  tile.ahead = ahead;
  tile.x = x;
}

// Calls f(place in rows of G * 16 floats, the vector there) for each vector of the sums.
template <int R, int V, typename F>
OCTAVO_INLINE void for_sums(F32 (&sums)[R][V], const F& f) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) f((r * V + v) * kLanes, sums[r][v]);
}

// All pieces; sums [R][G * 16] to out, or those of each piece one after the other.
template <Dtype dtype, int R, int G, int Cache>
void run_tile(const Tile& tile, float* out) {
  // What waits to be joined, as the bits of `piece` say: the sums of one piece, and those of two.
  alignas(64) float held[kMostLevels][R * G * kGroup];
  Tile rest = tile;
  for (int piece = 0;; ++piece) {
    F32 sums[R][G * kVectors];
    for_sums(sums, [](int, F32& sum) __attribute__((always_inline)) { sum = F32{}; });
    if constexpr (dtype == Dtype::f32)
      accumulate_f32<R, G, Cache>(rest, sums);
    else
#if defined(OCTAVO_BF16)
      accumulate_pairs<R, G, Cache>(rest, sums);
#elif defined(OCTAVO_AVX512)
      if constexpr (R >= 6)
        accumulate_bf16_of_many_rows<R, G, Cache>(rest, sums);
      else
        accumulate_bf16<R, G, Cache>(rest, sums);
#elif defined(OCTAVO_AVX2)
      if constexpr (R == 1)
        accumulate_bf16_of_one_row<G>(rest, sums);
      else
        accumulate_bf16<R, G, Cache>(rest, sums);
#else
      accumulate_bf16<R, G, Cache>(rest, sums);
#endif
    const bool last = piece + 1 == tile.pieces;
    if (tile.apart) {
      float* to = out + piece * (R * G * kGroup);
      for_sums(sums, [&](int place, F32& sum) __attribute__((always_inline)) { store(to + place, sum); });
      if (last) return;
      continue;
    }
    int level = 0;
    for (; piece >> level & 1; ++level)
      for_sums(sums, [&](int place, F32& sum) __attribute__((always_inline)) { sum = load(held[level] + place) + sum; });
    float* to = last ? out : held[level];
    for_sums(sums, [&](int place, F32& sum) __attribute__((always_inline)) { store(to + place, sum); });
    if (last) return;
  }
}

using RunTile = void (*)(const Tile&, float*);

template <Dtype dtype, int Cache, int R, int G = most_groups(R)>
RunTile kernel_of_rows(int groups) {
  if constexpr (G > 1) {
    if (groups < G) return kernel_of_rows<dtype, Cache, R, G - 1>(groups);
  }
  return run_tile<dtype, R, G, Cache>;
}

// The kernel for a tile of Least to R rows.
template <Dtype dtype, int Cache, int Least, int R = kMaxRows>
RunTile tile_kernel(int rows, int groups) {
  if constexpr (R > Least) {
    if (rows < R) return tile_kernel<dtype, Cache, Least, R - 1>(rows, groups);
  }
  return kernel_of_rows<dtype, Cache, R>(groups);
}

RunTile tile_kernel(Dtype dtype, int rows, int groups, bool many_tiles) {
  constexpr int half = (kMaxRows + 1) / 2;  // that many rows has a tile at least where there are several
  if (dtype == Dtype::bf16)
    return many_tiles ? tile_kernel<Dtype::bf16, kFirstCache, half>(rows, groups)
                      : tile_kernel<Dtype::bf16, kSecondCache, 1>(rows, groups);
  return many_tiles ? tile_kernel<Dtype::f32, kFirstCache, half>(rows, groups)
                    : tile_kernel<Dtype::f32, kSecondCache, 1>(rows, groups);
}

}  // namespace

}  // namespace octavo::OCTAVO_ISA
