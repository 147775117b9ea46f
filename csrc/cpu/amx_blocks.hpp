// Blocks of products of bfloat16 by the tiles of AMX, and by vectors that give the same bits.
//
// Sixteen lines of packed weights or of a panel of keys, one after the other, are the operand B for a step of 32 k, and rows
// of bfloat16 as they lie are A. An element of the result is, for each step of 32 k in order: c += even + odd, where even and odd are chains of
// fused multiply-adds from zero over the even and the odd k of the step. It depends on its row, its column and k alone. So
// it has the same bits for any number of rows, any grouping of rows and columns, and any cut of k at a step where the sums
// so far are stored and loaded; and vectors give them too, which read the weights of one or two rows faster.
#pragma once
#include <type_traits>

#include "amx.hpp"
#include "vec.hpp"

namespace octavo::OCTAVO_ISA {
namespace {

// Columns of a group, or tokens of a panel.
constexpr int kColumns = 16;
constexpr int64_t kStep = 32, kStepBytes = kStep * kColumns * 2;
// Rows of a tile.
constexpr int kRowsOfTile = 16;
// Rows that are multiplied by vectors.
constexpr int64_t kVectorRows = 2;
// Groups of a block: of vectors, of one tile of rows, of two.
constexpr int kVectorGroups = 8, kWideGroups = 6, kSquareGroups = 2;
// k of more than twice that is cut into such parts: a strip of weights and the rows stay in the second cache meanwhile.
constexpr int64_t kPartOfK = 1024;

template <int From, int To, typename F>
OCTAVO_INLINE void unrolled(const F& f) {
  if constexpr (From < To) {
    f(std::integral_constant<int, From>{});
    unrolled<From + 1, To>(f);
  }
}

// Tiles of rows of equal size, so that one configuration does. The last one begins early enough to be whole, and computes
// some rows again.
struct RowTiles {
  explicit RowTiles(int64_t all) : count((all + kRowsOfTile - 1) / kRowsOfTile), rows((all + count - 1) / count), all(all) {}
  int64_t begin(int64_t tile) const { return tile * rows + rows <= all ? tile * rows : all - rows; }
  int64_t count, rows, all;
};

// Which registers are what, the same for all blocks of a call of `multiply`, which configures them once: of one tile of rows
// and up to 6 groups, or of two and up to 2.
template <bool Wide>
struct TileRegisters {
  static constexpr int kSums = Wide ? kWideGroups : 2 * kSquareGroups, kA = Wide ? 1 : 2, kB = 8 - kSums - kA;
  static constexpr int sum(int r, int g) { return r * kSquareGroups + g; }
  static constexpr int a(int r) { return kSums + r; }
  static constexpr int b(int g) { return kSums + kA + g % kB; }
};

// What a block of tiles reads and writes.
struct TileBlock {
  const char* weights;  // of the first group and step
  int64_t group_bytes;
  int64_t steps;
  const char* x[2];  // of each tile of rows
  int64_t x_bytes;   // from row to row
  float* sums[2];    // of each tile, [rows][groups * 16]
  bool from_zero;    // else `sums` are added to
  // Lines that each step fetches of each group, from `ahead` on.
  const char* ahead;
  int lines_ahead;
};

template <int R, int G, bool Wide>
__attribute__((noinline)) void run_tiles(const TileBlock& block) {
  using Registers = TileRegisters<Wide>;
  constexpr int64_t sums_bytes = G * kColumns * 4;
  unrolled<0, R>([&](auto r) __attribute__((always_inline)) {
    unrolled<0, G>([&](auto g) __attribute__((always_inline)) {
      if (block.from_zero)
        amx::zero<Registers::sum(r, g)>();
      else
        amx::load<Registers::sum(r, g)>(block.sums[r] + g * kColumns, sums_bytes);
    });
  });
  const char* weights = block.weights;
  const char* x[R];
  for (int r = 0; r < R; ++r) x[r] = block.x[r];
  const char* ahead = block.ahead;
  for (int64_t step = 0; step < block.steps; ++step) {
    unrolled<0, G>([&](auto g) __attribute__((always_inline)) {
      const char* line = ahead + g * block.group_bytes;
      if (block.lines_ahead == 16) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) __builtin_prefetch(line + 64 * i, 0, R == 1 ? 3 : 2);
      } else {
        for (int i = 0; i < block.lines_ahead; ++i) __builtin_prefetch(line + 64 * i, 0, 2);
      }
    });
    ahead += 64 * block.lines_ahead;
    unrolled<0, R>([&](auto r) __attribute__((always_inline)) {
      amx::load<Registers::a(r)>(x[r], block.x_bytes);
      x[r] += 2 * kStep;
    });
    unrolled<0, G>([&](auto g) __attribute__((always_inline)) {
      amx::load<Registers::b(g)>(weights + g * block.group_bytes, 64);
      unrolled<0, R>([&](auto r) __attribute__((always_inline)) {
        amx::dot_bf16<Registers::sum(r, g), Registers::a(r), Registers::b(g)>();
      });
    });
    weights += kStepBytes;
  }
  unrolled<0, R>([&](auto r) __attribute__((always_inline)) {
    unrolled<0, G>([&](auto g) __attribute__((always_inline)) {
      amx::store<Registers::sum(r, g)>(block.sums[r] + g * kColumns, sums_bytes);
    });
  });
}

using RunTiles = void (*)(const TileBlock&);

template <int G = kWideGroups>
RunTiles wide_kernel(int groups) {
  if constexpr (G > 1) {
    if (groups < G) return wide_kernel<G - 1>(groups);
  }
  return run_tiles<1, G, true>;
}

RunTiles square_kernel(int row_tiles, int groups) {
  if (row_tiles == 1) return groups == 1 ? run_tiles<1, 1, false> : run_tiles<1, 2, false>;
  return groups == 1 ? run_tiles<2, 1, false> : run_tiles<2, 2, false>;
}

// Sums and A have the rows of a tile, B those of a step: as many as it has pairs of k.
template <bool Wide>
void configure_tiles(int64_t rows, int64_t rows_of_second, int pairs = kStep / 2) {
  using Registers = TileRegisters<Wide>;
  amx::Config config;
  for (int t = 0; t < 8; ++t) {
    const bool is_sum = t < Registers::kSums, is_a = !is_sum && t < Registers::kSums + Registers::kA;
    const bool second = !Wide && (is_sum ? t >= kSquareGroups : t > Registers::kSums);
    const int of_tile = static_cast<int>(second ? rows_of_second : rows);
    if (!is_sum && !is_a)
      config.set(t, pairs, 64);
    else if (of_tile > 0)
      config.set(t, of_tile, is_a ? 4 * pairs : 64);
  }
  amx::configure(config);
}

// Sums over the last k, fewer than a step, of a block of tiles: with zeros behind them, which change no bit.
void add_last_step(TileBlock block, RunTiles run, int row_tiles, int groups, const int64_t* rows, int64_t k) {
  alignas(64) char weights[kWideGroups][kStepBytes] = {};
  alignas(64) char x[2][kRowsOfTile][2 * kStep] = {};
  for (int g = 0; g < groups; ++g)
    std::memcpy(weights[g], block.weights + g * block.group_bytes, static_cast<size_t>(k) * kColumns * 2);
  for (int r = 0; r < row_tiles; ++r) {
    for (int64_t i = 0; i < rows[r]; ++i)
      std::memcpy(x[r][i], block.x[r] + i * block.x_bytes, static_cast<size_t>(2 * k));
    block.x[r] = x[r][0];
  }
  block.weights = block.ahead = weights[0];
  block.group_bytes = kStepBytes;
  block.x_bytes = 2 * kStep;
  block.steps = 1;
  block.lines_ahead = 0;
  run(block);
}

// ---- one or two rows, by vectors ----------------------------------------------------------------------------------

// A step of so many pairs of k, with the bits of run_tiles: subnormal numbers are zero in the threads of the pool, too. The
// pairs of a group's columns lie `line_bytes` from one k to the next.
template <int R, int G>
OCTAVO_INLINE void add_step(F32 (&sums)[R][G], const char* weights, int64_t line_bytes, int64_t group_bytes, const char* x,
                            int64_t x_bytes, int pairs) {
  F32 even[R][G], odd[R][G];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) even[r][g] = odd[r][g] = F32{};
  for (int pair = 0; pair < pairs; ++pair, weights += line_bytes, x += 4) {
    F32 x_even[R], x_odd[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const U32 word = (U32)splat_anew(reinterpret_cast<const float*>(x + r * x_bytes));
      x_even[r] = even_bf16(word);
      x_odd[r] = odd_bf16(word);
    }
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      const F32 w_even = even_bf16(load_as<U32>(weights + g * group_bytes)), w_odd = load_odd_bf16(weights + g * group_bytes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        add_product(even[r][g], x_even[r], w_even);
        add_product(odd[r][g], x_odd[r], w_odd);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) sums[r][g] = sums[r][g] + (even[r][g] + odd[r][g]);
}

// Sums [R][G * 16] over k of one piece.
template <int R, int G>
__attribute__((noinline)) void run_vectors(const char* weights, int64_t group_bytes, int64_t k, const char* x, int64_t x_bytes,
                                           float* out) {
  static_assert(kLanes == kColumns, "");
  F32 sums[R][G];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) sums[r][g] = F32{};
  for (; k >= kStep; k -= kStep, weights += kStepBytes, x += 2 * kStep)
    add_step<R, G>(sums, weights, 64, group_bytes, x, x_bytes, kStep / 2);
  if (k > 0) add_step<R, G>(sums, weights, 64, group_bytes, x, x_bytes, static_cast<int>(k / 2));
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) store(out + (r * G + g) * kColumns, sums[r][g]);
}

using RunVectors = void (*)(const char*, int64_t, int64_t, const char*, int64_t, float*);

template <int R, int G>
RunVectors vectors_of_rows(int groups) {
  if constexpr (G > 1) {
    if (groups < G) return vectors_of_rows<R, G - 1>(groups);
  }
  return run_vectors<R, G>;
}

RunVectors vectors_kernel(int64_t rows, int groups) {
  return rows == 1 ? vectors_of_rows<1, kVectorGroups>(groups) : vectors_of_rows<2, kVectorGroups / 2>(groups);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
