// Weights in the form that the matrix products read.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "gemm.hpp"

namespace octavo {

// Owns a packed copy of a matrix [n, k] and of its bias; the layout is that of WeightView.
class PackedLinear {
 public:
  // How the matrix's rows become columns of the product.
  enum class Order {
    plain,    // in order
    gate_up,  // rows 0 .. n / 2 are the gate's and the others up's: each group takes 8 of both
  };

  // rows: where each of the n rows of k numbers of the given type (float32 or bfloat16) is; bias [n] float32 or null.
  // Both are copied. Products sum k in so many pieces, 1, 2 or 4. Throws std::invalid_argument.
  PackedLinear(const std::vector<const void*>& rows, int64_t k, Dtype dtype, const float* bias, Order order, int pieces);

  const WeightView& view() const { return view_; }
  Order order() const { return order_; }
  int64_t k() const { return k_; }  // of the matrix; view().k is padded
  int64_t nbytes() const { return nbytes_; }

 private:
  std::shared_ptr<void> data_;
  WeightView view_;
  Order order_;
  int64_t k_, nbytes_;
};

}  // namespace octavo
