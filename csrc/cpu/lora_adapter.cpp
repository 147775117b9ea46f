#include "lora_adapter.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "arena.hpp"
#include "gemm.hpp"

namespace octavo {
namespace {

int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// Rows of a block of `down`, of which so many are left.
int64_t rows_of_block(int64_t left) { return left >= kLowRankRows ? kLowRankRows : left >= 4 ? 4 : left >= 2 ? 2 : 1; }

void pack_down(const char* down, int64_t row_bytes, const LowRankView& view, char* out) {
  for (int64_t first = 0; first < view.rank;) {
    const int64_t rows = rows_of_block(view.rank - first);
    for (int64_t line = 0; line < view.lines; ++line)
      for (int64_t r = 0; r < rows; ++r, out += kLowRankLine)
        std::memcpy(out, down + (first + r) * row_bytes + line * kLowRankLine,
                    static_cast<size_t>(std::min(kLowRankLine, row_bytes - line * kLowRankLine)));
    first += rows;
  }
}

// Words of one float, or of two bfloat16: [groups][padded rank in words][16].
void pack_up(const char* up, const LowRankView& view, char* out) {
  const int64_t bytes = view.bytes_of_value(), row_bytes = view.rank * bytes, words = view.padded_rank * bytes / 4;
  for (int64_t row = 0; row < view.outputs; ++row) {
    char* column = out + (row / kGroup * words * kGroup + row % kGroup) * 4;
    for (int64_t word = 0; word < words; ++word)
      std::memcpy(column + word * kGroup * 4, up + row * row_bytes + word * 4,
                  static_cast<size_t>(std::min<int64_t>(4, row_bytes - word * 4)));
  }
}

}  // namespace

LowRankPart::LowRankPart(const void* down, const void* up, int64_t rank, int64_t inputs, int64_t outputs, Dtype dtype)
    : inputs_(inputs) {
  if (rank < 1 || inputs < 1 || outputs < 1)
    throw std::invalid_argument("low-rank matrices of rank " + std::to_string(rank) + ", " + std::to_string(inputs) +
                                " inputs and " + std::to_string(outputs) + " outputs cannot be packed");
  if (dtype == Dtype::i8) throw std::invalid_argument("low-rank matrices must be float32 or bfloat16");
  view_.dtype = dtype;
  view_.rank = rank;
  const int64_t bytes = view_.bytes_of_value();
  view_.padded_rank = dtype == Dtype::bf16 ? round_up(rank, 2) : rank;
  view_.lines = down == nullptr ? 0 : round_up(inputs * bytes, kLowRankLine) / kLowRankLine;
  view_.outputs = outputs;
  view_.groups = round_up(outputs, kGroup) / kGroup;
  const int64_t down_bytes = rank * view_.lines * kLowRankLine;
  nbytes_ = down_bytes + view_.groups * kGroup * view_.padded_rank * bytes;
  data_ = allocate_weights(static_cast<size_t>(nbytes_));
  char* data = static_cast<char*>(data_.get());
  view_.down = data;
  view_.up = data + down_bytes;
  if (down != nullptr) pack_down(static_cast<const char*>(down), inputs * bytes, view_, data);
  pack_up(static_cast<const char*>(up), view_, data + down_bytes);
}

}  // namespace octavo
