#include "gemm_pack.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "arena.hpp"
#include "threads.hpp"

namespace octavo {
namespace {

int64_t groups_of(int64_t n, PackedLinear::Order order) {
  const int64_t columns = order == PackedLinear::Order::gate_up ? n / 2 : n;
  const int64_t width = order == PackedLinear::Order::gate_up ? kGroup / 2 : kGroup;
  return (columns + width - 1) / width;
}

// The matrix's row that is column c of a group, or -1 for padding.
int64_t row_of(int64_t group, int c, int64_t n, PackedLinear::Order order) {
  if (order == PackedLinear::Order::plain) {
    const int64_t row = group * kGroup + c;
    return row < n ? row : -1;
  }
  constexpr int half = kGroup / 2;
  const int64_t row = group * half + c % half;
  if (row >= n / 2) return -1;
  return c < half ? row : n / 2 + row;
}

// rows [16], null for padding; packed [ceil(k / 2)][16] words of two bfloat16.
void pack_pairs(const uint16_t* const* rows, int64_t k, uint32_t* packed) {
  for (int64_t pair = 0; pair < k / 2; ++pair, packed += kGroup)
    for (int c = 0; c < kGroup; ++c)
      if (rows[c] != nullptr) std::memcpy(packed + c, rows[c] + 2 * pair, 4);
  if (k % 2 == 0) return;
  for (int c = 0; c < kGroup; ++c)
    if (rows[c] != nullptr) std::memcpy(packed + c, rows[c] + k - 1, 2);  // the other half stays zero
}

void pack_floats(const float* const* rows, int64_t k, float* packed) {
  for (int64_t i = 0; i < k; ++i, packed += kGroup)
    for (int c = 0; c < kGroup; ++c)
      if (rows[c] != nullptr) packed[c] = rows[c][i];
}

template <typename T, typename Word, typename PackRows>
void pack_groups(const std::vector<const void*>& matrix, int64_t k, PackedLinear::Order order, Word* packed,
                 int64_t group_words, PackRows pack_rows) {
  const auto n = static_cast<int64_t>(matrix.size());
  parallel_for(groups_of(n, order), [&](int64_t group) {
    const T* rows[kGroup];
    for (int c = 0; c < kGroup; ++c) {
      const int64_t row = row_of(group, c, n, order);
      rows[c] = row < 0 ? nullptr : static_cast<const T*>(matrix[row]);
    }
    pack_rows(rows, k, packed + group * group_words);
  });
}

}  // namespace

PackedLinear::PackedLinear(const std::vector<const void*>& rows, int64_t k, Dtype dtype, const float* bias, Order order,
                           int pieces)
    : order_(order), k_(k) {
  const auto n = static_cast<int64_t>(rows.size());
  if (n < 1 || k < 1)
    throw std::invalid_argument("a matrix of " + std::to_string(n) + " x " + std::to_string(k) + " cannot be packed");
  if (dtype != Dtype::f32 && dtype != Dtype::bf16)
    throw std::invalid_argument("weights must be float32 or bfloat16");
  if (order == Order::gate_up && n % 2 != 0)
    throw std::invalid_argument("gate and up must have equally many rows, and " + std::to_string(n) + " is odd");
  const bool bf16 = dtype == Dtype::bf16;
  if (pieces != 1 && pieces != 2 && pieces != 4)
    throw std::invalid_argument("k is summed in 1, 2 or 4 pieces, not " + std::to_string(pieces));
  if (pieces > 1 && k % (bf16 ? 2 * pieces : pieces) != 0)
    throw std::invalid_argument("k " + std::to_string(k) + " cannot be summed in " + std::to_string(pieces) +
                                " equal pieces" + (bf16 ? " of pairs" : ""));
  view_.pieces = pieces;
  view_.dtype = dtype;
  view_.n = n;
  view_.k = bf16 ? (k + 1) / 2 * 2 : k;
  view_.groups = groups_of(n, order);
  const int64_t group_words = (bf16 ? view_.k / 2 : k) * kGroup;
  const int64_t bias_floats = bias == nullptr ? 0 : view_.groups * kGroup;
  nbytes_ = 4 * (view_.groups * group_words + bias_floats);
  data_ = allocate_weights(static_cast<size_t>(nbytes_));
  view_.data = data_.get();
  if (bf16)
    pack_groups<uint16_t>(rows, k, order, static_cast<uint32_t*>(data_.get()), group_words, pack_pairs);
  else
    pack_groups<float>(rows, k, order, static_cast<float*>(data_.get()), group_words, pack_floats);
  if (bias == nullptr) return;
  float* packed_bias = static_cast<float*>(data_.get()) + view_.groups * group_words;
  for (int64_t i = 0; i < bias_floats; ++i) {
    const int64_t row = row_of(i / kGroup, static_cast<int>(i % kGroup), n, order);
    packed_bias[i] = row < 0 ? 0.0f : bias[row];
  }
  view_.bias = packed_bias;
}

}  // namespace octavo
