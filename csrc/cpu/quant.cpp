// Products of quantised rows and packed quantised weights, of an instruction set of integers.
#include "quant.hpp"

#include <type_traits>

#include "dot_rounds.hpp"
#include "quant_columns.hpp"
#include "quant_dot.hpp"
#include "quant_encode.hpp"
#include "quant_rows.hpp"
#include "quant_store.hpp"
#if defined(OCTAVO_AMX_INT8)
#include "quant_tiles.hpp"
#endif
#include "vec.hpp"

namespace octavo::OCTAVO_ISA {

namespace {

// Of rows that are multiplied with codes of so many bits.
template <int Bits>
using RowCode = std::conditional_t<Bits == 8, CodeFor8bit, int8_t>;

#if !defined(OCTAVO_AMX_INT8)
int rows_of_tile(int64_t) { return kQuantTile; }
#endif

bool wants_wide(int bits) { return (bits == 8 ? sizeof(RowCode<8>) : sizeof(RowCode<4>)) == 2; }

void quantize(const void* x, Dtype dtype, int64_t k, const QuantRows& rows, int64_t row) {
  if (dtype == Dtype::f32) {
    quantize_row(static_cast<const float*>(x), k, rows, row);
  } else {
    quantize_row(static_cast<const uint16_t*>(x), k, rows, row);
  }
}

// Adds a group to the sums of each row and panel; the first panel's header and codes are at `header` and `w`.
template <QuantFormat Format, int Rows, int Panels>
OCTAVO_INLINE void add_group(const uint8_t* header, int i, const uint8_t* w, int64_t panel_bytes,
                             const RowCode<layout_of(Format).bits>* x, const QuantGroup* groups,
                             Columns (&sums)[Panels][Rows]) {
  constexpr FourBits kind = four_bits_of(Format);
  constexpr bool has_minima = layout_of(Format).bits == 4 && kind == FourBits::unsigned_;
  Dots<Rows> dots[Panels];
  if constexpr (layout_of(Format).bits == 8) {
    dots_8bit<Rows, Panels>(w, panel_bytes, x, groups, dots);
  } else {
    dots_4bit<Rows, Panels, kind>(w, panel_bytes, x, groups, dots);
  }
#pragma GCC unroll 3
  for (int p = 0; p < Panels; ++p, header += panel_bytes) {
    Columns scales, minima;
    if constexpr (Format != QuantFormat::q8_channel) scales = scales_of<Format>(header, i);
    if constexpr (has_minima) minima = minima_of<Format>(header, i);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      Columns scale = spread(groups[r].scale);
      if constexpr (Format != QuantFormat::q8_channel) scale = multiply(scales, scale);
      sums[p][r] = add(sums[p][r], multiply(as_float(dots[p], r), scale));
      if constexpr (has_minima) {
        const Columns share = multiply(minima, spread(groups[r].scaled_sum));
        sums[p][r] = Format == QuantFormat::q4_k ? subtract(sums[p][r], share) : add(sums[p][r], share);
      }
    }
  }
}

// What is fetched into the first-level cache meanwhile: so many bytes more from there on with each group.
struct Ahead {
  const uint8_t* from;
  int64_t step;
  OCTAVO_INLINE void fetch() {
    for (int64_t at = 0; at < step; at += 64) __builtin_prefetch(from + at);
    from += step;
  }
};

// Products of panels, so many bytes apart, and a tile's first rows.
template <QuantFormat Format, int Panels, int Rows>
void multiply_tile(const uint8_t* panel, int64_t panel_bytes, const QuantRows& rows, int64_t row, Ahead ahead,
                   float (*out)[kQuantTile][kPanel]) {
  constexpr QuantLayout layout = layout_of(Format);
  const int64_t num_groups = rows.num_groups, groups_a_block = layout.groups == 0 ? num_groups : layout.groups;
  const auto* x = rows.codes_of<RowCode<layout.bits>>(row);
  const QuantGroup* groups = rows.groups_of(row);
  Columns sums[Panels][Rows];
  for (auto& of_panel : sums)
    for (Columns& sum : of_panel) sum = spread(0);
  const uint8_t* w = panel;
  for (int64_t g = 0; g < num_groups; g += groups_a_block) {
    const uint8_t* header = w;
    w += layout.header;
    for (int64_t i = 0; i < groups_a_block; ++i) {
      ahead.fetch();
      add_group<Format, Rows, Panels>(header, static_cast<int>(i), w, panel_bytes, x, groups, sums);
      w += layout.group_bytes();
      x += kQuantGroup * Rows;
      groups += Rows;
    }
  }
#pragma GCC unroll 3
  for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      if constexpr (Format == QuantFormat::q8_channel)
        sums[p][r] = multiply(sums[p][r], load_f32(panel + p * panel_bytes));
      to_floats(sums[p][r], out[p][r]);
    }
  }
}

template <QuantFormat Format, int Panels>
void multiply_rows(const uint8_t* panel, int64_t panel_bytes, const QuantRows& rows, int64_t row, Ahead ahead,
                   float (*out)[kQuantTile][kPanel]) {
  switch (rows.rows_of_tile(row)) {
    case 1: return multiply_tile<Format, Panels, 1>(panel, panel_bytes, rows, row, ahead, out);
    case 2: return multiply_tile<Format, Panels, 2>(panel, panel_bytes, rows, row, ahead, out);
    case 3: return multiply_tile<Format, Panels, 3>(panel, panel_bytes, rows, row, ahead, out);
    default: return multiply_tile<Format, Panels, 4>(panel, panel_bytes, rows, row, ahead, out);
  }
}

template <QuantFormat Format, int Panels>
void run_panels(const PackedQuant& weight, int64_t panel, const QuantRows& rows, const QuantOutput& out,
                const QuantResults& results) {
  // Each tile fetches an equal part of the next panels, but a single one leaves it to the processor: it reads steadily.
  const int64_t tiles = (rows.count + kQuantTile - 1) / kQuantTile;
  Ahead ahead{weight.panel(panel + Panels), tiles == 1 ? 0 : Panels * layout_of(Format).group_bytes() / tiles};
  for (int64_t row = 0; row < rows.count; row += kQuantTile, ahead.from += rows.num_groups * ahead.step) {
    float sums[Panels][kQuantTile][kPanel];
    const int count = rows.rows_of_tile(row);
    if (Panels > 1) fetch_results(panel * kPanel, Panels * kPanel, count, row, out);
    multiply_rows<Format, Panels>(weight.panel(panel), weight.panel_bytes, rows, row, ahead, sums);
    store_results<Panels>(weight, panel, row, count, out, sums, results);
  }
}

// Fewer rows than a tile wait for memory only, which is left to the processor's own prefetching. Their panels, side by
// side, are where equal parts of the range begin, and each is a stream that goes on with the next panel: one of a short
// panel alone would end before it is fetched far ahead. Returns the first panel that is left.
template <QuantFormat Format, int Rows>
int64_t run_streams(const PackedQuant& weight, int64_t panel, int64_t end, const QuantRows& rows, const QuantOutput& out,
                    const QuantResults& results) {
  constexpr int streams = streams_of(Rows);
  const int64_t apart = (end - panel) / streams, first = panel;
  for (; panel < first + apart; ++panel) {
    float sums[streams][kQuantTile][kPanel];
    multiply_tile<Format, streams, Rows>(weight.panel(panel), apart * weight.panel_bytes, rows, 0, Ahead{nullptr, 0}, sums);
    for (int i = 0; i < streams; ++i) store_results<1>(weight, panel + i * apart, 0, Rows, out, sums + i, results);
  }
  return first + apart * streams;
}

// Fewer rows are multiplied with one panel after the other, which is read the fastest.
constexpr int64_t kRowsOfManyPanels = 32;

int64_t panels_at_once(int64_t rows) {
  return rows < kQuantTile ? streams_of(static_cast<int>(rows)) : rows < kRowsOfManyPanels ? 1 : kPanelsAtOnce;
}

template <QuantFormat Format>
void run_range(const PackedQuant& weight, int64_t panel, int64_t end, const QuantRows& rows, const QuantOutput& out,
               const QuantResults& results) {
#if defined(OCTAVO_AMX_INT8)
  if (rows.in_registers()) return multiply_by_tiles<Format>(weight, panel, end, rows, out, results);
#endif
  if (rows.count == 1) panel = run_streams<Format, 1>(weight, panel, end, rows, out, results);
  if (rows.count == 2) panel = run_streams<Format, 2>(weight, panel, end, rows, out, results);
  if (rows.count == 3) panel = run_streams<Format, 3>(weight, panel, end, rows, out, results);
  for (; rows.count >= kRowsOfManyPanels && panel + kPanelsAtOnce <= end; panel += kPanelsAtOnce)
    run_panels<Format, kPanelsAtOnce>(weight, panel, rows, out, results);
  for (; panel < end; ++panel) run_panels<Format, 1>(weight, panel, rows, out, results);
}

void panels(const PackedQuant& weight, int64_t begin, int64_t end, const QuantRows& rows, const QuantOutput& out,
            const QuantResults& results) {
  switch (weight.format) {
    case QuantFormat::q8_channel: return run_range<QuantFormat::q8_channel>(weight, begin, end, rows, out, results);
    case QuantFormat::q8_32: return run_range<QuantFormat::q8_32>(weight, begin, end, rows, out, results);
    case QuantFormat::q8_128: return run_range<QuantFormat::q8_128>(weight, begin, end, rows, out, results);
    case QuantFormat::q4_32: return run_range<QuantFormat::q4_32>(weight, begin, end, rows, out, results);
    case QuantFormat::q4_128: return run_range<QuantFormat::q4_128>(weight, begin, end, rows, out, results);
    case QuantFormat::q4_1: return run_range<QuantFormat::q4_1>(weight, begin, end, rows, out, results);
    case QuantFormat::q4_k: return run_range<QuantFormat::q4_k>(weight, begin, end, rows, out, results);
    case QuantFormat::mxfp4: return run_range<QuantFormat::mxfp4>(weight, begin, end, rows, out, results);
  }
}

}  // namespace

static int64_t int8_dot_rounds([[maybe_unused]] int64_t rounds, [[maybe_unused]] float* sink) {
#if defined(OCTAVO_VNNI)
  run_dots<I32>(rounds, sink, [](I32& sum, U32 x) { add_quads(sum, x, (I32)x); });
  return int64_t{8} * kDotChains * kLanes;
#else
  return 0;
#endif
}

const QuantTable* quant_table() {
  static const QuantTable table{encode_weights, wants_wide, rows_of_tile, quantize, panels_at_once, panels, int8_dot_rounds};
  return &table;
}

}  // namespace octavo::OCTAVO_ISA
