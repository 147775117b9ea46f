// One matrix of an expert, in any format of packed weights.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gemm_pack.hpp"
#include "ops.hpp"
#include "quant.hpp"

namespace octavo {

// Rows of an expert that are multiplied together, at most.
constexpr int64_t kExpertRows = 64;

// Where a product goes: float32 or bfloat16; element [r, c] of it is at r * stride + c. Of a matrix with pieces apart,
// those of piece i are i * piece_stride further. Of an expert's first matrix, with this activation.
struct ExpertOutput {
  void* data;
  int64_t stride;
  Dtype dtype;
  int64_t piece_stride;
  Activation activation = Activation::none;
};

// Results of a row do not depend on the other rows. Columns are computed in units that any thread may take.
class ExpertMatrix {
 public:
  virtual ~ExpertMatrix() = default;
  int64_t inputs() const { return inputs_; }
  int64_t outputs() const { return outputs_; }  // of a row; of gate and up, their product's
  bool gated() const { return gated_; }
  int pieces() const { return pieces_; }
  int64_t units() const { return units_; }
  int64_t unit_columns() const { return unit_columns_; }
  // Units that are best computed in one go, for so many rows.
  virtual int64_t units_at_once(int64_t rows) const = 0;

  // Bytes that so many rows of the input take in the form in which `multiply` wants them, a multiple of 64.
  virtual size_t bytes_of_rows(int64_t rows) const = 0;
  // Makes row `row` of `rows`, aligned to 64 bytes, of x[inputs].
  virtual void prepare(const void* x, Dtype dtype, void* memory, int64_t rows, int64_t row) const = 0;
  // Columns of units [begin, end) for all rows: of gate and up, activation(gate) * up, of another first matrix
  // activation(product), else the product, which is float32 with its pieces apart. out.data is where the first of these columns goes. `next`, perhaps null, is multiplied afterwards.
  virtual void multiply(const void* memory, int64_t rows, int64_t begin, int64_t end, const ExpertOutput& out,
                        const void* next) const = 0;
  // The weights of a unit.
  virtual const void* unit(int64_t i) const = 0;

 protected:
  ExpertMatrix(int64_t inputs, int64_t outputs, bool gated, int pieces, int64_t units, int64_t unit_columns)
      : inputs_(inputs), outputs_(outputs), units_(units), unit_columns_(unit_columns), pieces_(pieces),
        gated_(gated) {}

 private:
  int64_t inputs_, outputs_, units_, unit_columns_;
  int pieces_;
  bool gated_;
};

using ExpertMatrixPtr = std::shared_ptr<const ExpertMatrix>;

// Throws std::invalid_argument if a matrix other than gate and up has a bias.
ExpertMatrixPtr dense_expert(std::shared_ptr<const PackedLinear> weights);

// Of gate and up, or of one part. The bias, of the parts' outputs one after the other, may be null; the caller keeps it.
// Throws std::invalid_argument if the two differ in shape, or one part has a bias.
ExpertMatrixPtr quantized_expert(std::vector<std::shared_ptr<PackedQuant>> parts, const float* bias);

}  // namespace octavo
