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

LowRankAdapter::LowRankAdapter(const std::vector<Source>& parts, int64_t inputs, Dtype dtype) {
  if (dtype == Dtype::i8) throw std::invalid_argument("low-rank matrices must be float32 or bfloat16");
  const auto offset = [](int64_t bytes) { return reinterpret_cast<const char*>(bytes); };
  for (const Source& part : parts) {
    LowRankView view;
    view.dtype = dtype;
    view.outputs = part.outputs;
    view.groups = round_up(part.outputs, kGroup) / kGroup;
    if (part.rank < 0 || inputs < 0 || part.outputs < 1)
      throw std::invalid_argument("low-rank matrices of rank " + std::to_string(part.rank) + ", " +
                                  std::to_string(inputs) + " inputs and " + std::to_string(part.outputs) +
                                  " outputs cannot be packed");
    if (part.rank > 0) {
      const int64_t bytes = view.bytes_of_value();
      view.rank = part.rank;
      view.padded_rank = dtype == Dtype::bf16 ? round_up(part.rank, 2) : part.rank;
      view.lines = round_up(inputs * bytes, kLowRankLine) / kLowRankLine;
      view.down = offset(nbytes_);
      view.up = view.down + part.rank * view.lines * kLowRankLine;
      nbytes_ += part.rank * view.lines * kLowRankLine + view.groups * kGroup * view.padded_rank * bytes;
    }
    parts_.push_back(view);
  }
  data_ = allocate_weights(static_cast<size_t>(std::max<int64_t>(1, nbytes_)));
  auto* data = static_cast<char*>(data_.get());
  for (size_t i = 0; i < parts.size(); ++i) {
    LowRankView& view = parts_[i];
    if (view.rank == 0) continue;
    char* down = data + reinterpret_cast<intptr_t>(view.down);
    char* up = data + reinterpret_cast<intptr_t>(view.up);
    view.down = down;
    view.up = up;
    if (inputs > 0) pack_down(static_cast<const char*>(parts[i].down), inputs * view.bytes_of_value(), view, down);
    pack_up(static_cast<const char*>(parts[i].up), view, up);
  }
}

}  // namespace octavo
