// The matrix products' kernels: all rows of a call are multiplied with a group of columns while it is in the cache, in
// register tiles (gemm_tile.hpp), and the next group is prefetched meanwhile.
#include "gemm.hpp"

#include "activations.hpp"
#include "gemm_limits.hpp"
#include "gemm_tile.hpp"
#if defined(OCTAVO_AMX)
#include <algorithm>
#include <vector>

#include "amx_blocks.hpp"
#endif

namespace octavo::OCTAVO_ISA {
namespace {

// ---- epilogue: bias, add, activation, store ---------------------------------------------------------------------

// One row of one group, sums [16], into the first `columns` of out.
template <typename T, typename F>
OCTAVO_INLINE void store_row(T* out, float* sums, int64_t columns, const F& f) {
#pragma GCC unroll 4
  for (int c = 0; c < kGroup; c += kLanes) {
    const F32 result = f(load(sums + c));
    if (columns >= kGroup)
      store(out + c, result);
    else
      store(sums + c, result);
  }
  if (columns >= kGroup) return;
  for (int c = 0; c < columns; ++c) store_one(out + c, sums[c]);
}

// Eight columns of the gate, then the same eight of up.
template <typename T, typename F>
OCTAVO_INLINE void store_gated_row(T* out, const float* sums, int64_t columns, const F& f) {
  constexpr int half = kGroup / 2;
  float products[half];
  if constexpr (kLanes > half) {
    store(products, gated(f, load(sums, half), load(sums + half, half)), half);
  } else {
#pragma GCC unroll 4
    for (int c = 0; c < half; c += kLanes) {
      const F32 product = gated(f, load(sums + c), load(sums + half + c));
      if (columns >= half)
        store(out + c, product);
      else
        store(products + c, product);
    }
    if (columns >= half) return;
  }
  for (int c = 0; c < columns && c < half; ++c) store_one(out + c, products[c]);
}

// The same of whole rows, two at a time: a vector holds the gates of both. Returns how many rows, an even number.
template <typename T, typename F>
OCTAVO_INLINE int store_gated_pairs([[maybe_unused]] T* out, [[maybe_unused]] int64_t out_stride,
                                    [[maybe_unused]] const float* sums, [[maybe_unused]] int64_t sums_stride,
                                    [[maybe_unused]] int rows, [[maybe_unused]] const F& f) {
  int r = 0;
#if defined(OCTAVO_AVX512)
  for (; r + 2 <= rows; r += 2, out += 2 * out_stride, sums += 2 * sums_stride) {
    const F32 first = load(sums), second = load(sums + sums_stride);
    store_halves(out, out + out_stride, gated(f, low_halves(first, second), high_halves(first, second)));
  }
#endif
  return r;
}

template <typename T>
void finish_rows(const Product& p, int64_t row, int rows, int64_t group, float* sums, int64_t sums_stride) {
  const int64_t column = group * (p.gated ? kGroup / 2 : kGroup), columns = p.out_columns() - column;
  T* out = static_cast<T*>(p.out) + row * p.out_stride + column;
  with_activation(p.activation, [&](auto f) {
    if (!p.gated) {
      for (int r = 0; r < rows; ++r) store_row(out + r * p.out_stride, sums + r * sums_stride, columns, f);
      return;
    }
    int r = columns >= kGroup / 2 ? store_gated_pairs(out, p.out_stride, sums, sums_stride, rows, f) : 0;
    for (; r < rows; ++r) store_gated_row(out + r * p.out_stride, sums + r * sums_stride, columns, f);
  });
}

// Adds 8 columns of the gate's and 8 of up's to the sums of a gated group. By whole vectors: they are read as such next.
OCTAVO_INLINE void add_gated_row(float* sums, const float* gate, const float* up) {
#if defined(OCTAVO_AVX512)
  store(sums, load(sums) + load_halves(gate, up));
#else
#pragma GCC unroll 4
  for (int c = 0; c < kGroup / 2; c += kLanes) {
    store(sums + c, load(sums + c) + load(gate + c));
    store(sums + kGroup / 2 + c, load(sums + kGroup / 2 + c) + load(up + c));
  }
#endif
}

// Adds the rows of `add` to the sums of a group.
void add_rows(const Product& p, int64_t row, int rows, int64_t group, float* sums, int64_t sums_stride) {
  if (p.gated && p.out_columns() - group * (kGroup / 2) >= kGroup / 2) {
    const float* gate = p.add + row * p.add_stride + group * (kGroup / 2);
    for (int r = 0; r < rows; ++r, gate += p.add_stride, sums += sums_stride)
      add_gated_row(sums, gate, gate + p.out_columns());
    return;
  }
  const int parts = p.gated ? 2 : 1, width = kGroup / parts;  // so many columns lie side by side
  const int64_t columns = p.out_columns() - group * width;
  for (int part = 0; part < parts; ++part) {
    const float* add = p.add + row * p.add_stride + part * p.out_columns() + group * width;
    float* to = sums + part * width;
    for (int r = 0; r < rows; ++r, add += p.add_stride, to += sums_stride) {
      if (columns >= kGroup && parts == 1) {
#pragma GCC unroll 4
        for (int c = 0; c < kGroup; c += kLanes) store(to + c, load(to + c) + load(add + c));
      } else {
        for (int c = 0; c < width && c < columns; ++c) to[c] += add[c];
      }
    }
  }
}

// Sums [rows][columns] of whole groups of a product without a gate, in one pass.
template <typename T>
void finish_whole(const Product& p, int64_t row, int rows, int64_t column, int64_t columns, const float* sums) {
  const float* bias = p.weights.bias == nullptr ? nullptr : p.weights.bias + column;
  with_activation(p.activation, [&](auto f) {
    for (int r = 0; r < rows; ++r, sums += columns) {
      T* out = static_cast<T*>(p.out) + (row + r) * p.out_stride + column;
      const float* add = p.add == nullptr ? nullptr : p.add + (row + r) * p.add_stride + column;
      for (int64_t c = 0; c < columns; c += kLanes) {
        F32 sum = load(sums + c);
        if (bias != nullptr) sum += load(bias + c);
        if (add != nullptr) sum += load(add + c);
        store_result(out + c, f(sum));
      }
    }
  });
}

// What finish_whole reads and writes of a tile, into the cache.
void fetch_results(const Product& p, int64_t row, int rows, int64_t column, int64_t columns) {
  const int64_t size = p.out_dtype == Dtype::bf16 ? 2 : 4;
  for (int64_t r = row; r < row + rows; ++r) {
    fetch_to_write(static_cast<const char*>(p.out) + (r * p.out_stride + column) * size, columns * size);
    if (p.add != nullptr && p.add != p.out) fetch_to_write(p.add + r * p.add_stride + column, columns * 4);
  }
}

// Sums [rows][groups * 16] of the columns from `group` on, to which bias and `add` come first.
void finish(const Product& p, int64_t row, int rows, int64_t group, int groups, float* sums) {
  const int64_t stride = groups * kGroup;
  if (!p.gated && group * kGroup + stride <= p.weights.n) {
    if (p.out_dtype == Dtype::bf16)
      finish_whole<uint16_t>(p, row, rows, group * kGroup, stride, sums);
    else
      finish_whole<float>(p, row, rows, group * kGroup, stride, sums);
    return;
  }
  if (p.weights.bias != nullptr) {
    const float* bias = p.weights.bias + group * kGroup;
    for (int r = 0; r < rows; ++r)
      for (int64_t c = 0; c < stride; c += kLanes)
        store(sums + r * stride + c, load(sums + r * stride + c) + load(bias + c));
  }
  for (int g = 0; g < groups; ++g) {
    if (p.add != nullptr) add_rows(p, row, rows, group + g, sums + g * kGroup, stride);
    if (p.out_dtype == Dtype::bf16)
      finish_rows<uint16_t>(p, row, rows, group + g, sums + g * kGroup, stride);
    else
      finish_rows<float>(p, row, rows, group + g, sums + g * kGroup, stride);
  }
}

}  // namespace

// ---- entry points -----------------------------------------------------------------------------------------------

// Rows in tiles of nearly equal size; the first ones may have a row more.
struct Tiling {
  explicit Tiling(int64_t rows)
      : tiles((rows + kMaxRows - 1) / kMaxRows), larger(rows % tiles), least(static_cast<int>(rows / tiles)) {}
  int rows(int64_t tile) const { return least + (tile < larger); }
  int64_t tiles, larger;
  int least;
};

static int64_t bytes_of_group(const WeightView& weights) {
  return weights.k * kGroup * (weights.dtype == Dtype::bf16 ? 2 : 4);
}

// All tiles of these rows are equally wide. The groups of a strip, and those fetched meanwhile, should find room in the
// second cache; more than two only if they do.
static int64_t groups_at_once(const WeightView& weights, int64_t rows) {
#if defined(OCTAVO_AMX)
  if (weights.dtype == Dtype::bf16) {
    if (rows > kRowsOfTile) return kSquareGroups;
    return rows > kVectorRows ? kWideGroups : kVectorGroups / std::max(rows, int64_t{1});
  }
#endif
  constexpr int64_t kStripBytes = 512 * 1024;
  const int64_t fitting = kStripBytes / bytes_of_group(weights);
  const int64_t most = most_groups(Tiling(rows).rows(0));
  return most <= 2 || fitting >= most ? most : fitting > 2 ? fitting : 2;
}

// Sums [pieces][rows][groups * 16]: each piece to its own place.
static void store_pieces(const Product& p, int64_t row, int rows, int64_t group, int groups, float* sums) {
  Product piece = p;
  for (int i = 0; i < p.weights.pieces; ++i, sums += rows * groups * kGroup) {
    piece.out = static_cast<float*>(p.out) + i * p.piece_stride;
    finish(piece, row, rows, group, groups, sums);
  }
}

// All rows over a strip of groups; each tile fetches an equal part of `next`, by default of the groups that follow.
static void multiply_strip(const Product& p, int64_t group, int groups, int64_t row, const Tiling& tiling,
                           const void* next) {
  const int64_t group_bytes = bytes_of_group(p.weights);
  const int64_t ahead_part = group_bytes / tiling.tiles, ahead_step = 64 / tiling.tiles;
  const char* weights = static_cast<const char*>(p.weights.data) + group * group_bytes;
  const char* ahead = next == nullptr ? weights + groups * group_bytes : static_cast<const char*>(next);
  const int64_t piece_k = p.weights.k / p.weights.pieces;
  const bool many = tiling.tiles >= kManyTiles;
  const RunTile larger = tile_kernel(p.weights.dtype, tiling.rows(0), groups, many);
  const RunTile smaller = tile_kernel(p.weights.dtype, tiling.least, groups, many);
  const bool apart = p.piece_stride != 0;
  float sums[most_sums() << kMostLevels];
  for (int64_t t = 0; t < tiling.tiles; ++t, ahead += ahead_part) {
    const Tile tile{weights, group_bytes, piece_k, p.weights.pieces, p.x + row * p.x_stride, p.x_stride, ahead,
                    ahead_step, apart};
    if (many && !p.gated) fetch_results(p, row, tiling.rows(t), group * kGroup, groups * kGroup);
    (t < tiling.larger ? larger : smaller)(tile, sums);
    (apart ? store_pieces : finish)(p, row, tiling.rows(t), group, groups, sums);
    row += tiling.rows(t);
  }
}

#if defined(OCTAVO_AMX)
// Memory of this thread for the sums of a strip; what was in it is lost.
static float* memory_for_sums(int64_t floats) {
  thread_local std::vector<float> memory;
  const size_t needed = static_cast<size_t>(floats) + 16;
  if (memory.size() < needed) memory.resize(needed);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

// A piece of k, for a strip of groups and all rows: sums [tiles][rows of a tile][groups * 16]. `next`: the weights of as many
// groups that follow, which several blocks of rows fetch meanwhile.
static void sum_piece_by_tiles(const char* weights, int64_t group_bytes, int64_t k, int groups, const char* x, int64_t x_bytes,
                               const RowTiles& tiles, const char* next, float* sums) {
  const int64_t part = k > 2 * kPartOfK ? kPartOfK : k;
  const bool wide = tiles.count == 1;
  const int64_t blocks = (tiles.count + 1) / 2;
  for (int64_t begin = 0; begin < k; begin += part) {
    const int64_t left = k - begin < part ? k - begin : part, last = left % kStep;
    for (int64_t b = 0; b < blocks; ++b) {
      const int row_tiles = 2 * b + 1 < tiles.count ? 2 : 1;
      const RunTiles run = wide ? wide_kernel(groups) : square_kernel(row_tiles, groups);
      TileBlock block{};
      block.weights = weights + begin * kGroup * 2;
      block.group_bytes = group_bytes;
      block.steps = left / kStep;
      block.x_bytes = x_bytes;
      block.from_zero = begin == 0;
      for (int r = 0; r < row_tiles; ++r) {
        block.x[r] = x + tiles.begin(2 * b + r) * x_bytes + 2 * begin;
        block.sums[r] = sums + (2 * b + r) * tiles.rows * groups * kGroup;
      }
      if (wide) {
        block.ahead = block.weights + 2 * kStepBytes;
        block.lines_ahead = 16;
      } else {
        const int64_t lines = (16 + blocks - 1) / blocks;  // the blocks share the lines of a step
        block.ahead = next + (begin * 2 * kGroup) + b * lines * 64 * block.steps;
        block.lines_ahead = b * lines < 16 ? static_cast<int>(lines) : 0;
      }
      run(block);
      if (last != 0) {
        block.from_zero = false;
        block.weights += block.steps * kStepBytes;
        for (int r = 0; r < row_tiles; ++r) block.x[r] += 2 * kStep * block.steps;
        const int64_t rows[] = {tiles.rows, tiles.rows};
        add_last_step(block, run, row_tiles, groups, rows, last);
      }
    }
  }
}

static void multiply_strip_of_bf16(const Product& p, int64_t group, int groups, int64_t row, int64_t rows, const void* next) {
  const int64_t group_bytes = bytes_of_group(p.weights), piece_k = p.weights.k / p.weights.pieces, x_bytes = 4 * p.x_stride;
  const char* weights = static_cast<const char*>(p.weights.data) + group * group_bytes;
  const char* x = reinterpret_cast<const char*>(p.x + row * p.x_stride);
  const char* ahead = next == nullptr ? weights + groups * group_bytes : static_cast<const char*>(next);
  const bool by_vectors = rows <= kVectorRows;
  const RowTiles tiles(rows);
  const int64_t width = groups * kGroup, size = tiles.count * tiles.rows * width;
  // What waits to be joined, as the bits of `piece` say, lies behind the sums of a piece: as in run_tile.
  float* sums = memory_for_sums(size * (1 + kMostLevels));
  Product out = p;
  const auto store_sums = [&] {
    for (int64_t t = 0; t < tiles.count; ++t) {
      const int64_t begin = tiles.begin(t), again = t * tiles.rows - begin;  // rows that the tile before has
      finish(out, row + begin + again, static_cast<int>(tiles.rows - again), group, groups,
             sums + (t * tiles.rows + again) * width);
    }
  };
  for (int piece = 0; piece < p.weights.pieces; ++piece) {
    const char* from = weights + piece * piece_k * kGroup * 2;
    if (by_vectors)
      vectors_kernel(rows, groups)(from, group_bytes, piece_k, x + 2 * piece * piece_k, x_bytes, sums);
    else
      sum_piece_by_tiles(from, group_bytes, piece_k, groups, x + 2 * piece * piece_k, x_bytes, tiles,
                         ahead + piece * piece_k * kGroup * 2, sums);
    if (p.piece_stride != 0) {
      store_sums();
      out.out = static_cast<float*>(out.out) + p.piece_stride;
      continue;
    }
    int level = 0;
    for (; piece >> level & 1; ++level)
      for (int64_t i = 0; i < size; i += kLanes) store(sums + i, load(sums + (1 + level) * size + i) + load(sums + i));
    if (piece + 1 < p.weights.pieces) std::memcpy(sums + (1 + level) * size, sums, static_cast<size_t>(size) * sizeof(float));
  }
  if (p.piece_stride == 0) store_sums();
}
#endif

// The groups in strips of nearly equal width: f(first group, groups, the weights that come next).
template <typename F>
static void for_strips(const Product& p, int64_t group_begin, int64_t group_end, int64_t rows, const F& f) {
  const int64_t groups = group_end - group_begin, at_once = groups_at_once(p.weights, rows);
  const int64_t strips = (groups + at_once - 1) / at_once;
  for (int64_t s = 0; s < strips; ++s) {
    const int64_t begin = groups * s / strips, end = groups * (s + 1) / strips;
    f(group_begin + begin, static_cast<int>(end - begin), s + 1 == strips ? p.next : nullptr);
  }
}

static void multiply(const Product& p, int64_t group_begin, int64_t group_end, int64_t row_begin, int64_t row_end) {
  const int64_t rows = row_end - row_begin;
  if (rows <= 0) return;
#if defined(OCTAVO_AMX)
  if (p.weights.dtype == Dtype::bf16) {
    if (rows > kRowsOfTile)
      configure_tiles<false>(RowTiles(rows).rows, RowTiles(rows).rows);
    else if (rows > kVectorRows)
      configure_tiles<true>(rows, 0);
    for_strips(p, group_begin, group_end, rows, [&](int64_t group, int groups, const void* next) {
      multiply_strip_of_bf16(p, group, groups, row_begin, rows, next);
    });
    if (rows > kVectorRows) amx::release();
    return;
  }
#endif
  const Tiling tiling(rows);
  for_strips(p, group_begin, group_end, rows, [&](int64_t group, int groups, const void* next) {
    multiply_strip(p, group, groups, row_begin, tiling, next);
  });
}

template <typename T>
static void widen_rows(const T* x, int64_t x_stride, int64_t k, bool round, float* out, int64_t padded_k,
                       int64_t out_stride, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = x + r * x_stride;
    float* to = out + r * out_stride;
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) {
      const F32 v = load(from + i);
      store(to + i, round ? (F32)(round_bf16(v) << 16) : v);
    }
    for (; i < k; ++i) to[i] = round ? from_bf16(to_bf16(load_one(from + i))) : load_one(from + i);
    for (; i < padded_k; ++i) to[i] = 0.0f;
  }
}

// Rows of bfloat16, two to a word of out.
template <typename T>
static void narrow_rows(const T* x, int64_t x_stride, int64_t k, float* out, int64_t padded_k, int64_t out_stride,
                        int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = x + r * x_stride;
    uint16_t* to = reinterpret_cast<uint16_t*>(out + r * out_stride);
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) store(to + i, load(from + i));
    for (; i < k; ++i) to[i] = to_bf16(load_one(from + i));
    for (; i < padded_k; ++i) to[i] = 0;
  }
}

static void prepare(const void* x, Dtype dtype, int64_t x_stride, int64_t k, Dtype weights, float* out,
                    int64_t padded_k, int64_t out_stride, int64_t rows) {
  const auto* halves = static_cast<const uint16_t*>(x);
  const auto* floats = static_cast<const float*>(x);
  if (kMultipliesPairs && weights == Dtype::bf16) {
    if (dtype == Dtype::bf16)
      narrow_rows(halves, x_stride, k, out, padded_k, out_stride, rows);
    else
      narrow_rows(floats, x_stride, k, out, padded_k, out_stride, rows);
  } else {
    if (dtype == Dtype::bf16)
      widen_rows(halves, x_stride, k, false, out, padded_k, out_stride, rows);
    else
      widen_rows(floats, x_stride, k, weights == Dtype::bf16, out, padded_k, out_stride, rows);
  }
}

const GemmTable* gemm_table() {
  static const GemmTable table{kMultipliesPairs, prepare,   groups_at_once,      multiply,
                               read_once,        multiply_add_rounds, bf16_dot_rounds};
  return &table;
}

}  // namespace octavo::OCTAVO_ISA
