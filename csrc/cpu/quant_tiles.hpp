// Quantised products by the tile registers of AMX, with the bits of the vectors' products (quant.hpp).
//
// A group of 32 of a tile's rows is the operand A, and that of a panel's codes, made signed bytes, is B. Their product, exact
// integers of 16 columns for each row, goes through the first-level cache to vectors, which do with it what the vectors'
// kernel does with its own. Three steps of different groups overlap, as each waits long for the one before: products of a
// group, the store of the one before it, and the floats of the one three before. The floats limit, four operations for a
// row and group, and what widens codes and stores results: against vectors 1.3 to 1.5 times at 64 rows with 4 bits, 1.1 to
// 1.25 with 8 (octavo bench kernels --quantization int4).
#pragma once
#include "amx.hpp"
#include "quant_columns.hpp"
#include "quant_store.hpp"

namespace octavo::OCTAVO_ISA {
namespace {

static_assert(kVectors == 1, "a vector holds the columns of a panel");

// Rows of a tile; and the rows from which on tiles are faster than vectors.
constexpr int64_t kMostTileRows = 16, kFewestRows = 32;
// Groups whose widened codes, with their scales, stay in the first-level cache while all rows pass.
constexpr int64_t kGroupsOfPart = 32;
// Rows that pass for one widening of codes.
constexpr int64_t kRowsOfPass = 128;

// Tiles of nearly equal size: of 12 or 16 rows.
int rows_of_tile(int64_t rows) {
  if (rows < kFewestRows) return kQuantTile;
  const int64_t tiles = (rows + kMostTileRows - 1) / kMostTileRows;
  return static_cast<int>(QuantRows::room((rows + tiles - 1) / tiles, kQuantTile));
}

// Floats of a format's groups, after the scale of the row: multiplied by nothing but that; also by the columns' scales; and
// with minima added or subtracted.
enum class GroupFloats { row_scale, scales, scales_plus_minima, scales_minus_minima };

template <QuantFormat Format>
constexpr GroupFloats kFloatsOf = Format == QuantFormat::q8_channel ? GroupFloats::row_scale
                                  : Format == QuantFormat::q4_1     ? GroupFloats::scales_plus_minima
                                  : Format == QuantFormat::q4_k     ? GroupFloats::scales_minus_minima
                                                                    : GroupFloats::scales;

// Some groups of a panel: codes as signed bytes, in the order of packed codes of 8 bits, and floats.
struct WidePart {
  alignas(64) int8_t codes[kGroupsOfPart][kPanel * kQuantGroup];
  alignas(64) F32 scales[kGroupsOfPart], minima[kGroupsOfPart];
};

// Codes of a group to signed bytes: what they stand for, or the codes themselves where the format has minima.
template <QuantFormat Format>
OCTAVO_INLINE void widen_codes(const uint8_t* w, int8_t* out) {
  constexpr FourBits kind = four_bits_of(Format);
  constexpr uint8_t offset = kind == FourBits::unsigned_ ? 0 : kind == FourBits::e2m1 ? 16 : 8;
  if constexpr (layout_of(Format).bits == 8) {
    for (int i = 0; i < 8; ++i, w += 64, out += 64) {
      const U32 codes = load_as<U32>(w) ^ 0x80808080u;
      std::memcpy(out, &codes, 64);
    }
  } else {
    typedef uint8_t U8 __attribute__((vector_size(64), may_alias));
    for (int i = 0; i < 4; ++i, w += 64, out += 128) {
      const U32 both = load_as<U32>(w);
      const U8 even = (U8)factors_of<kind>(both & 0x0f0f0f0fu) - offset;
      const U8 odd = (U8)factors_of<kind>(both >> 4 & 0x0f0f0f0fu) - offset;
      std::memcpy(out, &even, 64);
      std::memcpy(out + 64, &odd, 64);
    }
  }
}

// Group `g` of a panel becomes number `i` of the part.
template <QuantFormat Format>
OCTAVO_INLINE void widen_group(const uint8_t* panel, int64_t g, int64_t i, WidePart& out) {
  constexpr QuantLayout layout = layout_of(Format);
  constexpr bool one_block = layout.groups == 0;
  const int64_t in_block = one_block ? g : g % layout.groups;
  const uint8_t* header = panel;
  if constexpr (!one_block) header += g / layout.groups * (layout.header + layout.groups * layout.group_bytes());
  widen_codes<Format>(header + layout.header + in_block * layout.group_bytes(), out.codes[i]);
  constexpr GroupFloats floats = kFloatsOf<Format>;
  if constexpr (floats != GroupFloats::row_scale) out.scales[i] = scales_of<Format>(header, static_cast<int>(in_block)).value[0];
  if constexpr (floats == GroupFloats::scales_plus_minima || floats == GroupFloats::scales_minus_minima)
    out.minima[i] = minima_of<Format>(header, static_cast<int>(in_block)).value[0];
}

// Adds a group of a tile of rows to their sums; `dots` are its products.
template <int Rows, GroupFloats Floats>
OCTAVO_INLINE void add_floats(const int32_t (*dots)[kPanel], const QuantGroup* groups, F32 scales, F32 minima,
                              F32 (&sums)[Rows]) {
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    const F32 scale = Floats == GroupFloats::row_scale ? splat(groups[r].scale) : scales * splat(groups[r].scale);
    sums[r] += __builtin_convertvector(load_as<I32>(dots[r]), F32) * scale;
    if constexpr (Floats == GroupFloats::scales_plus_minima) sums[r] += minima * splat(groups[r].scaled_sum);
    if constexpr (Floats == GroupFloats::scales_minus_minima) sums[r] -= minima * splat(groups[r].scaled_sum);
  }
}

// Tile registers: sums of even and odd steps, rows, codes.
constexpr int kEvenSums = 0, kOddSums = 1, kRowTile = 2, kCodeTile = 3;

void configure_tiles(int rows) {
  amx::Config config;
  config.set(kEvenSums, rows, 64);
  config.set(kOddSums, rows, 64);
  config.set(kRowTile, rows, kQuantGroup);
  config.set(kCodeTile, kQuantGroup / 4, 64);
  amx::configure(config);
}

// Adds a part, groups [first, first + count) of a panel, to the sums [rows][kPanel] of tiles of rows, the first of which
// begins with row `row`; or starts the sums with it. Fetches so many lines from `next` on meanwhile, an equal share at each
// step.
template <int Rows, GroupFloats Floats>
__attribute__((noinline)) void multiply_part(const WidePart& part, int64_t first, int64_t count, const QuantRows& rows,
                                             int64_t row, int64_t tiles, float* sums, const uint8_t* next, int64_t lines) {
  constexpr int kLag = 3, kRing = 4;  // steps from products to floats
  constexpr int64_t kCodesOfGroup = Rows * kQuantGroup;
  alignas(64) int32_t dots[kRing][Rows][kPanel];
  const int64_t steps = tiles * count, left_out = rows.num_groups - count, lines_of_step = (lines + steps - 1) / steps;
  const int8_t* x = rows.codes_of<int8_t>(row) + first * kCodesOfGroup;
  const QuantGroup* groups = rows.groups_of(row) + first * Rows;
  F32 of_rows[Rows] = {};
  int64_t g = 0, float_g = 0;
  const auto step = [&](auto parity, int64_t i) __attribute__((always_inline)) {
    constexpr int own = decltype(parity)::value, other = own == kEvenSums ? kOddSums : kEvenSums;
    if (i < steps) {
      amx::zero<own>();
      amx::load<kRowTile>(x, kQuantGroup);
      amx::load<kCodeTile>(part.codes[g], 64);
      x += kCodesOfGroup;
      if (++g == count) g = 0, x += left_out * kCodesOfGroup;
      for (int64_t line = 0; line < lines_of_step; ++line, next += 64) __builtin_prefetch(next, 0, 2);
    }
    if (i > 0 && i <= steps) amx::store<other>(dots[(i - 1) % kRing], 64);
    if (i < steps) amx::dot_int8<own, kRowTile, kCodeTile>();
    if (i < kLag) return;
    if (float_g == 0 && first > 0) {
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) of_rows[r] = load(sums + r * kPanel);
    }
    add_floats<Rows, Floats>(dots[(i - kLag) % kRing], groups, part.scales[float_g], part.minima[float_g], of_rows);
    groups += Rows;
    if (++float_g < count) return;
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      store(sums + r * kPanel, of_rows[r]);
      of_rows[r] = F32{};
    }
    sums += Rows * kPanel;
    groups += left_out * Rows;
    float_g = 0;
  };
  for (int64_t i = 0; i < steps + kLag; i += 2) {
    step(std::integral_constant<int, kEvenSums>{}, i);
    if (i + 1 < steps + kLag) step(std::integral_constant<int, kOddSums>{}, i + 1);
  }
}

// Computes the columns of panels [begin, end) for all rows.
template <QuantFormat Format>
void multiply_by_tiles(const PackedQuant& weight, int64_t begin, int64_t end, const QuantRows& rows, const QuantOutput& out,
                       const QuantResults& results) {
  constexpr GroupFloats floats = kFloatsOf<Format>;
  const auto multiply = rows.tile == 12 ? multiply_part<12, floats> : multiply_part<16, floats>;
  WidePart part;
  alignas(64) float sums[kRowsOfPass / kQuantTile][kQuantTile][kPanel];
  const int64_t parts = (rows.num_groups + kGroupsOfPart - 1) / kGroupsOfPart;
  const int64_t rows_of_pass = kRowsOfPass / rows.tile * rows.tile;
  configure_tiles(rows.tile);
  for (int64_t panel = begin; panel < end; ++panel)
    for (int64_t row = 0; row < rows.count; row += rows_of_pass) {
      const int64_t count = rows.count - row < rows_of_pass ? rows.count - row : rows_of_pass;
      const int64_t tiles = QuantRows::room(count, rows.tile) / rows.tile;
      const int64_t fetched = panel + 1 < end && row == 0 ? weight.panel_bytes / 64 / parts : 0;
      fetch_results(panel * kPanel, kPanel, static_cast<int>(count), row, out);
      for (int64_t p = 0; p < parts; ++p) {
        const int64_t first = p * rows.num_groups / parts, last = (p + 1) * rows.num_groups / parts;
        for (int64_t g = first; g < last; ++g) widen_group<Format>(weight.panel(panel), g, g - first, part);
        multiply(part, first, last - first, rows, row, tiles, sums[0][0],
                 weight.panel(panel + 1) + 64 * p * fetched, fetched);
      }
      for (int64_t r = 0; r < count; r += kQuantTile) {
        float (*tile)[kPanel] = sums[r / kQuantTile];
        const int rows_here = static_cast<int>(count - r < kQuantTile ? count - r : kQuantTile);
        if constexpr (Format == QuantFormat::q8_channel)
          for (int i = 0; i < rows_here; ++i)
            store(tile[i], load(tile[i]) * load(reinterpret_cast<const float*>(weight.panel(panel))));
        store_results<1>(weight, panel, row + r, rows_here, out, sums + r / kQuantTile, results);
      }
    }
  amx::release();
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
