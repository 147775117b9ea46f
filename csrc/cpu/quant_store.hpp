// Sums of quantised products to results.
#pragma once
#include "quant.hpp"
#include "vec.hpp"

namespace octavo::OCTAVO_ISA {

// A row of a panel that has fewer columns: lanes past the matrix are computed as the others, from zeros.
template <typename T, typename F>
void store_part(const float* sums, const float* bias, const float* add, int columns, T* out, const F& f) {
  for (int c = 0; c < columns; c += kLanes) {
    const int lanes = columns - c < kLanes ? columns - c : kLanes;
    F32 sum = load(sums + c);
    if (bias != nullptr) sum += load(bias + c, lanes);
    if (add != nullptr) sum += load(add + c, lanes);
    store(out + c, f(sum), lanes);
  }
}

// Those of a tile: f(sum + bias + add). Without f all instruction sets give the same bits.
template <typename T, typename F>
OCTAVO_INLINE void store_tile(const QuantOutput& out, int64_t n, int64_t panel, int panels, int64_t row, int rows,
                              const float (*sums)[kQuantTile][kPanel], const F& f) {
  const int64_t first = panel * kPanel;
  const float* bias = out.bias == nullptr ? nullptr : out.bias + first;
  const int whole = n - first >= panels * kPanel ? panels : panels - 1;  // a matrix' last panel may have less
  for (int r = 0; r < rows; ++r) {
    T* to = static_cast<T*>(out.data) + (row + r) * out.stride + first;
    const float* add = out.add == nullptr ? nullptr : out.add + (row + r) * out.add_stride + first;
    for (int c = 0; c < whole * kPanel; c += kLanes) {
      F32 sum = load(sums[c / kPanel][r] + c % kPanel);
      if (bias != nullptr) sum += load(bias + c);
      if (add != nullptr) sum += load(add + c);
      store_result(to + c, f(sum));
    }
    if (whole == panels) continue;
    const int64_t at = whole * kPanel;
    store_part(sums[whole][r], bias == nullptr ? nullptr : bias + at, add == nullptr ? nullptr : add + at,
               static_cast<int>(n - first - at), to + at, f);
  }
}

// What is read and written to store results, into the cache.
inline void fetch_results(int64_t column, int64_t columns, int rows, int64_t row, const QuantOutput& out) {
  const int64_t size = out.dtype == Dtype::f32 ? 4 : 2;
  for (int64_t r = row; r < row + rows; ++r) {
    fetch_to_write(static_cast<const char*>(out.data) + (r * out.stride + column) * size, columns * size);
    if (out.add != nullptr && out.add != out.data) fetch_to_write(out.add + r * out.add_stride + column, columns * 4);
  }
}

// The activation, which alone depends on the instruction set, is left to that of floats.
template <int Panels>
void store_results(const PackedQuant& weight, int64_t panel, int64_t row, int rows, const QuantOutput& out,
                   const float (*sums)[kQuantTile][kPanel], const QuantResults& results) {
  const auto as_it_is = [](F32 x) { return x; };
  if (out.activation != Activation::none)
    results.store_activated(out, weight.n, panel, Panels, row, rows, sums);
  else if (out.dtype == Dtype::f32)
    store_tile<float>(out, weight.n, panel, Panels, row, rows, sums, as_it_is);
  else
    store_tile<uint16_t>(out, weight.n, panel, Panels, row, rows, sums, as_it_is);
}

}  // namespace octavo::OCTAVO_ISA
