// Rows of packed matrices by token id: a head that is tied to the embedding needs no second copy of its matrix.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <cstring>
#include <stdexcept>

#include "bind.hpp"
#include "gemm_pack.hpp"
#include "half.hpp"
#include "quant.hpp"
#include "ranges.hpp"

namespace nb = nanobind;

namespace octavo {

namespace {

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// To the nearest, ties to even; weights are finite.
float rounded_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return from_bits((bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u);
}

void read_row(const PackedLinear& matrix, int64_t row, float* out) {
  const WeightView& view = matrix.view();
  const int64_t words = view.dtype == Dtype::bf16 ? view.k / 2 : view.k;  // of a column
  const uint32_t* word = static_cast<const uint32_t*>(view.data) + row / kGroup * words * kGroup + row % kGroup;
  if (view.dtype == Dtype::f32) {
    for (int64_t i = 0; i < matrix.k(); ++i) out[i] = from_bits(word[i * kGroup]);
    return;
  }
  for (int64_t i = 0; i + 1 < matrix.k(); i += 2) {
    out[i] = from_bits(word[i / 2 * kGroup] << 16);
    out[i + 1] = from_bits(word[i / 2 * kGroup] & 0xffff0000u);
  }
  if (matrix.k() % 2 != 0) out[matrix.k() - 1] = from_bits(word[matrix.k() / 2 * kGroup] << 16);
}

float half_at(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, 2);
  return from_f16(half);
}

void read_row(const PackedQuant& matrix, int64_t row, float* out) {
  const QuantLayout layout = layout_of(matrix.format);
  const int64_t groups_of_block = layout.groups == 0 ? matrix.groups : layout.groups;
  const int64_t block_bytes = layout.header + groups_of_block * layout.group_bytes();
  const int64_t column = row % kPanel;
  for (int64_t g = 0; g < matrix.groups; ++g) {
    const uint8_t* header = matrix.panel(row / kPanel) + g / groups_of_block * block_bytes;
    const int64_t in_block = g % groups_of_block;
    float scale, minimum = 0;
    if (matrix.format == QuantFormat::q8_channel) {
      std::memcpy(&scale, header + column * 4, 4);
    } else if (matrix.format == QuantFormat::mxfp4) {
      scale = half_of_e8m0(header[column]);
    } else {
      scale = half_at(header + column * 2);
    }
    if (matrix.format == QuantFormat::q4_1) minimum = half_at(header + 32 + column * 2);
    if (matrix.format == QuantFormat::q4_k) {
      scale *= header[64 + in_block * kPanel + column];
      minimum = -(half_at(header + 32 + column * 2) * header[192 + in_block * kPanel + column]);
    }
    const uint8_t* codes = header + layout.header + in_block * layout.group_bytes() + column * 4;
    const int64_t values = matrix.k - g * kQuantGroup < kQuantGroup ? matrix.k - g * kQuantGroup : kQuantGroup;
    for (int64_t i = 0; i < values; ++i) {
      int code;
      if (layout.bits == 8) {
        code = codes[i / 4 * (4 * kPanel) + i % 4] - 128;
      } else {
        code = codes[i / 8 * (4 * kPanel) + i % 4] >> (i % 8 < 4 ? 0 : 4) & 15;
        if (four_bits_of(matrix.format) == FourBits::offset_8) code -= 8;
        if (four_bits_of(matrix.format) == FourBits::e2m1) code = kTwiceE2m1[code];
      }
      const float product = static_cast<float>(code) * scale;
      out[g * kQuantGroup + i] = product + minimum;
    }
  }
}

// out[row] = scale * matrix[id - first], rounded to bfloat16 before if wanted; zero where the matrix has no such row.
template <typename Matrix>
class PackedLookup : public TokenOp {
 public:
  PackedLookup(std::shared_ptr<Matrix> matrix, int64_t rows, int64_t width, float* out, int64_t first, bool round,
               float scale)
      : TokenOp(4 * width), matrix_(std::move(matrix)), rows_(rows), width_(width), out_(out), first_(first),
        round_(round), scale_(scale) {}

  void run_tokens(const Step& step, int64_t begin, int64_t end) const override {
    for (int64_t token = begin; token < end; ++token) {
      float* out = out_ + token * width_;
      const int64_t row = step.token_ids[token] - first_;
      if (row < 0 || row >= rows_) {
        std::memset(out, 0, static_cast<size_t>(width_) * sizeof(float));
        continue;
      }
      read_row(*matrix_, row, out);
      for (int64_t i = 0; i < width_; ++i) out[i] = scale_ * (round_ ? rounded_to_bf16(out[i]) : out[i]);
    }
  }

 private:
  std::shared_ptr<Matrix> matrix_;
  int64_t rows_, width_;
  float* out_;
  int64_t first_;
  bool round_;
  float scale_;
};

OpPtr lookup_dense(std::shared_ptr<PackedLinear> matrix, uintptr_t out, int64_t first, bool round, double scale) {
  if (matrix->order() != PackedLinear::Order::plain) throw std::invalid_argument("gate and up have no rows to look up");
  const int64_t rows = matrix->view().n, width = matrix->k();
  return std::make_shared<PackedLookup<PackedLinear>>(std::move(matrix), rows, width, reinterpret_cast<float*>(out),
                                                      first, round, static_cast<float>(scale));
}

OpPtr lookup_quant(std::shared_ptr<PackedQuant> matrix, uintptr_t out, int64_t first, bool round, double scale) {
  const int64_t rows = matrix->n, width = matrix->k;
  return std::make_shared<PackedLookup<PackedQuant>>(std::move(matrix), rows, width, reinterpret_cast<float*>(out),
                                                     first, round, static_cast<float>(scale));
}

}  // namespace

void bind_lookup(nb::module_& m) {
  constexpr const char* doc =
      "out[t] = scale * matrix[id - first], float32, for the id of each token t of the step, rounded to bfloat16 before "
      "if `round`; zero where the matrix has no such row.";
  m.def("lookup", &lookup_dense, nb::arg("matrix"), nb::arg("out"), nb::arg("first"), nb::arg("round"),
        nb::arg("scale"), doc);
  m.def("lookup", &lookup_quant, nb::arg("matrix"), nb::arg("out"), nb::arg("first"), nb::arg("round"),
        nb::arg("scale"), doc);
}

}  // namespace octavo
