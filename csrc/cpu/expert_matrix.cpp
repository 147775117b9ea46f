#include "expert_matrix.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "gemm.hpp"
#include "pointwise.hpp"

namespace octavo {
namespace {

size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }
int64_t bytes_of(Dtype dtype) { return dtype == Dtype::bf16 ? 2 : 4; }

// Where column 0 would go, if column `first` goes to `data`.
void* before(void* data, int64_t first, int64_t bytes) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(data) - static_cast<uintptr_t>(first * bytes));
}

class DenseExpert : public ExpertMatrix {
 public:
  explicit DenseExpert(std::shared_ptr<const PackedLinear> weights)
      : ExpertMatrix(weights->k(), weights->view().n / (is_gated(*weights) ? 2 : 1), is_gated(*weights),
                     weights->view().pieces, weights->view().groups, is_gated(*weights) ? kGroup / 2 : kGroup),
        weights_(std::move(weights)), view_(weights_->view()),
        group_bytes_(view_.k * kGroup * bytes_of(view_.dtype)), stride_((view_.k + 15) / 16 * 16 + 16) {
    if (view_.bias != nullptr && !gated()) throw std::invalid_argument("experts add no bias to down's sums");
  }

  int64_t units_at_once(int64_t rows) const override {
    const int64_t least = isa().gemm->groups_at_once(view_, rows);
    return (8 + least - 1) / least * least;
  }
  size_t bytes_of_rows(int64_t rows) const override { return round_up(static_cast<size_t>(rows * stride_ * 4)); }
  void prepare(const void* x, Dtype dtype, void* memory, int64_t, int64_t row) const override {
    isa().gemm->prepare(x, dtype, 0, inputs(), view_.dtype, static_cast<float*>(memory) + row * stride_, view_.k,
                        stride_, 1);
  }
  void multiply(const void* memory, int64_t rows, int64_t begin, int64_t end, const ExpertOutput& out,
                const void* next) const override {
    Product product;
    product.weights = view_;
    product.x = static_cast<const float*>(memory);
    product.x_stride = stride_;
    product.out = before(out.data, begin * unit_columns(), bytes_of(out.dtype));
    product.out_stride = out.stride;
    product.out_dtype = out.dtype;
    product.gated = gated();
    product.next = next;
    product.activation = out.activation;
    if (!gated()) product.piece_stride = pieces() > 1 ? out.piece_stride : 0;
    isa().gemm->multiply(product, begin, end, 0, rows);
  }
  const void* unit(int64_t i) const override { return static_cast<const char*>(view_.data) + i * group_bytes_; }

 private:
  static bool is_gated(const PackedLinear& weights) { return weights.order() == PackedLinear::Order::gate_up; }
  std::shared_ptr<const PackedLinear> weights_;
  WeightView view_;
  int64_t group_bytes_, stride_;
};

class QuantizedExpert : public ExpertMatrix {
 public:
  QuantizedExpert(std::vector<std::shared_ptr<PackedQuant>> parts, const float* bias)
      : ExpertMatrix(parts[0]->k, parts[0]->n, parts.size() == 2, 1, parts[0]->panels, kPanel),
        parts_(std::move(parts)), bias_(bias) {}

  int64_t units_at_once(int64_t rows) const override {
    const int64_t least = integer_isa().quant->panels_at_once(rows);
    return ((gated() ? 4 : 8) + least - 1) / least * least;
  }
  size_t bytes_of_rows(int64_t rows) const override {
    const size_t groups = groups_of(rows);
    return round_up(groups * kQuantGroup) * wants(false) + round_up(groups * kQuantGroup * 2) * wants(true) +
           round_up(groups * sizeof(QuantGroup));
  }
  void prepare(const void* x, Dtype dtype, void* memory, int64_t rows, int64_t row) const override {
    integer_isa().quant->quantize(x, dtype, inputs(), rows_in(memory, rows), row);
  }
  void multiply(const void* memory, int64_t rows, int64_t begin, int64_t end, const ExpertOutput& out,
                const void*) const override {
    const QuantRows quantized = rows_in(const_cast<void*>(memory), rows);
    if (!gated() && out.activation == Activation::none)
      return multiply_part(0, begin, end, quantized, out.data, out.stride, out.dtype);
    const int64_t at_once = integer_isa().quant->panels_at_once(rows);
    for (int64_t panel = begin; panel < end; panel += at_once) {
      const int64_t last = std::min(end, panel + at_once);
      constexpr int64_t stride = 2 * kMostPanels * kPanel;
      alignas(64) float sums[kExpertRows * stride];
      const int64_t width = std::min<int64_t>((last - panel) * kPanel, outputs() - panel * kPanel);
      for (size_t part = 0; part < parts_.size(); ++part)
        multiply_part(part, panel, last, quantized, sums + part * width, stride, Dtype::f32);
      void* to = static_cast<char*>(out.data) + (panel - begin) * kPanel * bytes_of(out.dtype);
      isa().pointwise->activate({sums, stride, Dtype::f32, to, out.stride, out.dtype, width, out.activation, gated()},
                                Step{}, 0, rows);
    }
  }
  const void* unit(int64_t i) const override { return parts_[0]->panel(i); }

 private:
  void multiply_part(size_t part, int64_t begin, int64_t end, const QuantRows& rows, void* to, int64_t stride,
                     Dtype dtype) const {
    const float* bias = bias_ == nullptr ? nullptr : bias_ + static_cast<int64_t>(part) * outputs();
    const QuantOutput output{before(to, begin * kPanel, bytes_of(dtype)), stride, dtype, bias, nullptr, 0};
    integer_isa().quant->panels(*parts_[part], begin, end, rows, output, *isa().quant_results);
  }
  bool wants(bool wide) const {
    return std::any_of(parts_.begin(), parts_.end(), [&](const auto& part) {
      return integer_isa().quant->wants_wide(layout_of(part->format).bits) == wide;
    });
  }
  QuantRows rows_in(void* memory, int64_t rows) const {
    const size_t groups = groups_of(rows);
    char* narrow = static_cast<char*>(memory);
    char* wide = narrow + round_up(groups * kQuantGroup) * wants(false);
    char* scales = wide + round_up(groups * kQuantGroup * 2) * wants(true);
    return {wants(false) ? reinterpret_cast<int8_t*>(narrow) : nullptr,
            wants(true) ? reinterpret_cast<int16_t*>(wide) : nullptr, reinterpret_cast<QuantGroup*>(scales),
            parts_[0]->groups, rows, integer_isa().quant->rows_of_tile(rows)};
  }
  size_t groups_of(int64_t rows) const {
    return static_cast<size_t>(QuantRows::room(rows, integer_isa().quant->rows_of_tile(rows)) * parts_[0]->groups);
  }

  std::vector<std::shared_ptr<PackedQuant>> parts_;
  const float* bias_;
};

}  // namespace

ExpertMatrixPtr dense_expert(std::shared_ptr<const PackedLinear> weights) {
  return std::make_shared<DenseExpert>(std::move(weights));
}

ExpertMatrixPtr quantized_expert(std::vector<std::shared_ptr<PackedQuant>> parts, const float* bias) {
  if (parts.empty() || parts.size() > 2 || parts[0]->k != parts.back()->k || parts[0]->n != parts.back()->n)
    throw std::invalid_argument("an expert's quantised matrix is one, or gate and up of the same shape");
  if (bias != nullptr && parts.size() != 2) throw std::invalid_argument("experts add no bias to down's sums");
  return std::make_shared<QuantizedExpert>(std::move(parts), bias);
}

}  // namespace octavo
