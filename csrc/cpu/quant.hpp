// Weight-only quantised matrix products: packed weights, quantised activations, and the kernels' entry points.
//
// The product of a row x and a column w is, over groups of 32 values of K in order,
//     sum_g  scale_x[g] * (scale_w[g] * dot(q_x[g], q_w[g])  -  min_w[g] * sum(q_x[g]))
// with the dot products exact in integers and the sum over groups in float32, a product and a sum at a time, never
// fused: every instruction set of integers gives the same bits, and so does every number of rows. So do bias and
// residual; activations, which are polynomials, are those of the instruction set of floats (QuantResults).
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "isa.hpp"
#include "ops.hpp"

namespace octavo {

constexpr int kPanel = 16;       // output columns that are packed together
constexpr int kQuantGroup = 32;  // values of K that share an activation scale
constexpr int kQuantTile = 4;    // rows that are computed together
constexpr int kMostPanels = 3;   // that are computed side by side

// How a matrix is quantised. `q8` codes are signed bytes; `q4` codes are 0 to 15 and stand for code - 8, or for code in
// the two formats with minima. The number is that of the values of K that share a float16 scale; q8_channel has one
// float32 scale for a whole column; q4_1 adds a float16 minimum; q4_k has, for every 256 values, a float16 scale for 8
// scales of 6 bits and one for 8 minima of 6 bits; mxfp4 (Open Compute Project, Microscaling Formats 1.0) has codes of
// type e2m1 and, for every 32 values, a power of two, of type e8m0.
enum class QuantFormat : int { q8_channel, q8_32, q8_128, q4_32, q4_128, q4_1, q4_k, mxfp4 };

// A panel is 16 columns: a run of blocks along K, each a header and its groups' codes.
struct QuantLayout {
  const char* name;
  int bits;
  int groups;  // of 32 values in a block; 0: all of K is one block, padded with zeros to whole groups
  int header;  // bytes: scales[16]; q4_1: and minima[16]; q4_k: d[16], dmin[16], scales[8][16], minima[8][16]
               // (mxfp4: bytes, of zero where a column is padding)
  constexpr int group_bytes() const { return kPanel * kQuantGroup * bits / 8; }
};

constexpr QuantLayout kQuantLayouts[] = {{"q8_channel", 8, 0, 64}, {"q8_32", 8, 1, 32}, {"q8_128", 8, 4, 32},
                                         {"q4_32", 4, 1, 32},      {"q4_128", 4, 4, 32}, {"q4_1", 4, 1, 64},
                                         {"q4_k", 4, 8, 320},      {"mxfp4", 4, 1, 16}};
constexpr QuantLayout layout_of(QuantFormat format) { return kQuantLayouts[static_cast<int>(format)]; }

// What codes of 4 bits stand for.
enum class FourBits { unsigned_, offset_8, e2m1 };
constexpr FourBits four_bits_of(QuantFormat format) {
  if (format == QuantFormat::mxfp4) return FourBits::e2m1;
  return format == QuantFormat::q4_1 || format == QuantFormat::q4_k ? FourBits::unsigned_ : FourBits::offset_8;
}
// Twice the values of e2m1, which are integers.
constexpr int8_t kTwiceE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
// Half the values of e8m0, by which they are multiplied: 2^(byte - 128). Two of them are less than the least normal
// number: 0 stands for both.
inline float half_of_e8m0(uint8_t byte) {
  const uint32_t bits = (byte == 0 ? 0u : byte - 1u) << 23;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// The format of that name. Throws std::invalid_argument, naming all formats.
QuantFormat quant_format(const std::string& name);

// What a matrix is packed from, row-major; what a format does not have is null.
struct QuantSource {
  const uint8_t* codes;          // [n, k]; q8: signed bytes
  const void* scales;            // float16 [n, k / values of a block]; q8_channel: float32 [n]; mxfp4: uint8
  const uint16_t* minima;        // float16, as scales
  const uint8_t* group_scales;   // q4_k: [n, k / 32], 6 bits
  const uint8_t* group_minima;   // as group_scales
};

// A matrix [n, k] in panels, the last one padded with columns of zero scale.
//
// Codes of a group: 8 bits: [8 quads][16 columns][4 of K], as code + 128. 4 bits: [4][16 columns][4 bytes], byte i
// holding value i of an even quad in its low half and value i of the odd quad after it in its high half.
class PackedQuant {
 public:
  // Throws std::invalid_argument if k is no multiple of the format's block.
  PackedQuant(QuantFormat format, int64_t n, int64_t k, const QuantSource& source);
  PackedQuant(const PackedQuant&) = delete;
  PackedQuant& operator=(const PackedQuant&) = delete;

  const QuantFormat format;
  const int64_t n, k;
  const int64_t groups;  // of 32 values, the last one padded
  const int64_t panels;
  const int64_t panel_bytes;
  const uint8_t* panel(int64_t i) const { return data_ + i * panel_bytes; }
  int64_t bytes() const { return panels * panel_bytes; }

 private:
  void pack_panel(int64_t panel, const QuantSource& source);
  std::shared_ptr<void> memory_;
  uint8_t* data_;
};

// Of a group of 32 values of an activation row.
struct QuantGroup {
  float scale;       // greatest magnitude / 127; not a number if a value is infinite or not a number
  float scaled_sum;  // scale * sum of the codes
  // What the dot products start from, as the weights' codes have an offset. With 8 bits, 128: -128 times the sum of the
  // codes. With 4 bits, 8 (twice that for e2m1): -8 times it; or, where products of 4 bits are summed in 16, two int16:
  // -8 times the sum of codes 0 and 1 of each quad, and that of codes 2 and 3.
  int32_t start_8bit;
  int32_t start_4bit;
};

// Quantised rows. Four rows make a tile, the last ones perhaps a smaller one, and lie together, so that a tile is read
// through one pointer. Codes are there in 8 bits, in 16, or both, as the weights that they are multiplied with want them.
// For the tile registers of AMX a tile has more rows, the last one too, and a row's codes of a group lie together.
struct QuantRows {
  int8_t* narrow;      // [tiles][groups * 8 quads][rows of the tile][4 of K], aligned to 16 bytes; or null.
                       // For tile registers: [tiles][groups][rows of the tile][32 of K]
  int16_t* wide;       // as the first, each quad's values in the order 0, 2, 1, 3; or null
  QuantGroup* groups;  // [tiles][groups][rows of the tile]
  int64_t num_groups;
  int64_t count;
  int tile;  // rows of a tile
  // The rows that there must be room for.
  static int64_t room(int64_t rows, int tile) { return (rows + tile - 1) / tile * tile; }
  bool in_registers() const { return tile > kQuantTile; }
  int64_t first_of_tile(int64_t row) const { return row / tile * tile; }
  int rows_of_tile(int64_t row) const {
    const int64_t rest = count - first_of_tile(row);
    return static_cast<int>(rest < tile && !in_registers() ? rest : tile);
  }
  // From a row's quad to its next one, in values.
  int quad_step(int64_t row) const { return in_registers() ? 4 : 4 * rows_of_tile(row); }
  template <typename Code>
  Code* codes_of(int64_t row) const {
    const int64_t at = first_of_tile(row) * num_groups * kQuantGroup + row % tile * (in_registers() ? kQuantGroup : 4);
    if constexpr (sizeof(Code) == 1) {
      return narrow + at;
    } else {
      return wide + at;
    }
  }
  QuantGroup* groups_of(int64_t row) const {
    return groups + first_of_tile(row) * num_groups + row % tile;
  }
};

// Where results go: column 0 of row 0 of the matrix's own columns.
struct QuantOutput {
  void* data;
  int64_t stride;  // elements
  Dtype dtype;
  const float* bias;  // of the matrix's own columns, or null
  const float* add;   // to each row, or null; may be the memory of data
  int64_t add_stride;
  Activation activation = Activation::none;
};

// Of the instruction set of floats.
struct QuantResults {
  // Stores rows [row, row + rows), a tile, of neighbouring panels from `panel` on, at most kMostPanels, of a matrix of n
  // columns: the activation of sums with bias and `add`.
  void (*store_activated)(const QuantOutput& out, int64_t n, int64_t panel, int panels, int64_t row, int rows,
                          const float (*sums)[kQuantTile][kPanel]);
};

// Of the instruction set of integers.
struct QuantTable {
  // Quantises a row of weights w[k], float32 or bfloat16, to 8 or 4 bits in groups of `group` values, a divisor of k,
  // with a float16 scale each; or, if `group` is 0, with one float32 scale. It is not a number if a weight is infinite or
  // not a number.
  void (*encode)(const void* w, Dtype dtype, int64_t k, int64_t group, int bits, uint8_t* codes, void* scales);
  // Whether weights of so many bits are multiplied with rows of wide codes, or else with narrow ones.
  bool (*wants_wide)(int bits);
  // QuantRows::tile of so many rows.
  int (*rows_of_tile)(int64_t rows);
  // Quantises a row x[k], float32 or bfloat16, into row `row`.
  void (*quantize)(const void* x, Dtype dtype, int64_t k, const QuantRows& rows, int64_t row);
  // How many panels are computed side by side for so many rows, at most kMostPanels. Of fewer rows than a tile they are
  // where equal parts of the range of `panels` begin, so a large range is read in long streams.
  int64_t (*panels_at_once)(int64_t rows);
  // Computes the columns of panels [begin, end) for all rows.
  void (*panels)(const PackedQuant& weight, int64_t begin, int64_t end, const QuantRows& rows, const QuantOutput& out,
                 const QuantResults& results);
  // For the limits of this machine: as GemmTable::multiply_add, of dot products of 8-bit quads; 0 where no instruction
  // does them.
  int64_t (*int8_dot)(int64_t rounds, float* sink);
};

}  // namespace octavo
