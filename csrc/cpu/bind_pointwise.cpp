// Pointwise operations for Python: factories of tape operations, and functions on logits that run at once.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind.hpp"
#include "pointwise.hpp"
#include "ranges.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

namespace {

template <typename Arguments>
class RowOp : public TokenOp {
 public:
  using Kernel = void (*)(const Arguments&, const Step&, int64_t, int64_t);

  // A step has `rows_of_token` rows for each token, each `work` units of work (see ranges.hpp).
  RowOp(Kernel PointwiseTable::*kernel, const Arguments& arguments, int64_t rows_of_token, int64_t work)
      : TokenOp(rows_of_token * work), kernel_(kernel), arguments_(arguments), rows_of_token_(rows_of_token) {}

  void run_tokens(const Step& step, int64_t begin, int64_t end) const override {
    (isa().pointwise->*kernel_)(arguments_, step, begin * rows_of_token_, end * rows_of_token_);
  }

 private:
  Kernel PointwiseTable::*kernel_;
  Arguments arguments_;
  int64_t rows_of_token_;
};

template <typename Arguments>
OpPtr row_op(typename RowOp<Arguments>::Kernel PointwiseTable::*kernel, const Arguments& arguments, int64_t work,
             int64_t rows_of_token = 1) {
  return std::make_shared<RowOp<Arguments>>(kernel, arguments, rows_of_token, work);
}

void require_float(Dtype dtype) {
  if (dtype != Dtype::f32 && dtype != Dtype::bf16)
    throw std::invalid_argument("the type of an activation or weight must be f32 or bf16, not i8");
}

OpPtr embedding(uintptr_t table, int64_t rows, int64_t width, uintptr_t out, Dtype dtype,
                std::optional<Dtype> out_dtype, int64_t first, Ids ids, double scale, uintptr_t add,
                int64_t otherwise) {
  const Dtype result = out_dtype.value_or(dtype);
  require_float(dtype);
  require_float(result);
  if (otherwise >= rows) throw std::invalid_argument("the table has no row " + std::to_string(otherwise));
  return row_op(&PointwiseTable::embedding,
                Embedding{pointer<void>(table), dtype, width, first, rows, ids, pointer<void>(out), result,
                          static_cast<float>(scale), pointer<float>(add), otherwise},
                width);
}

// Strides that are 0 (x_stride excepted) are those of a contiguous tensor.
Norm norm_of(uintptr_t x, Dtype x_dtype, int64_t x_stride, uintptr_t weight, uintptr_t bias, Dtype w_dtype,
             uintptr_t out, Dtype out_dtype, int64_t width, double eps, int64_t rows_per_token, int64_t head_stride,
             int64_t out_stride, int64_t out_head_stride, int64_t weight_head_stride) {
  for (const Dtype dtype : {x_dtype, w_dtype, out_dtype}) require_float(dtype);
  if (rows_per_token > 1 && head_stride == 0) head_stride = width;
  if (out_head_stride == 0) out_head_stride = width;
  if (out_stride == 0) out_stride = rows_per_token * width;
  Norm norm;
  norm.x = pointer<void>(x);
  norm.x_dtype = x_dtype;
  norm.x_stride = x_stride;
  norm.x_head_stride = head_stride;
  norm.weight = pointer<void>(weight);
  norm.bias = pointer<void>(bias);
  norm.weight_dtype = w_dtype;
  norm.out = pointer<void>(out);
  norm.out_dtype = out_dtype;
  norm.out_stride = out_stride;
  norm.out_head_stride = out_head_stride;
  norm.heads = rows_per_token;
  norm.width = width;
  norm.eps = static_cast<float>(eps);
  norm.add = nullptr;
  norm.weight_head_stride = weight_head_stride;
  return norm;
}

OpPtr rms_norm(uintptr_t x, Dtype x_dtype, int64_t x_stride, uintptr_t weight, Dtype w_dtype, uintptr_t out,
               Dtype out_dtype, int64_t width, double eps, int64_t rows_per_token, int64_t head_stride,
               int64_t out_stride, int64_t out_head_stride, uintptr_t add, int64_t weight_head_stride) {
  Norm norm = norm_of(x, x_dtype, x_stride, weight, 0, w_dtype, out, out_dtype, width, eps, rows_per_token,
                      head_stride, out_stride, out_head_stride, weight_head_stride);
  norm.add = pointer<float>(add);
  return row_op(&PointwiseTable::rms_norm, norm, width, rows_per_token);
}

OpPtr layer_norm(uintptr_t x, Dtype x_dtype, int64_t x_stride, uintptr_t weight, uintptr_t bias, Dtype w_dtype,
                 uintptr_t out, Dtype out_dtype, int64_t width, double eps, int64_t rows_per_token,
                 int64_t head_stride, int64_t out_stride, int64_t out_head_stride, int64_t weight_head_stride) {
  const Norm norm = norm_of(x, x_dtype, x_stride, weight, bias, w_dtype, out, out_dtype, width, eps, rows_per_token,
                            head_stride, out_stride, out_head_stride, weight_head_stride);
  return row_op(&PointwiseTable::layer_norm, norm, 2 * width, rows_per_token);
}

OpPtr activate(uintptr_t x, int64_t x_stride, uintptr_t out, int64_t width, Dtype dtype, Activation activation,
               bool gated) {
  require_float(dtype);
  const Activate arguments{pointer<void>(x), x_stride, dtype, pointer<void>(out), width, dtype,
                           width,            activation, gated};
  return row_op(&PointwiseTable::activate, arguments, 4 * width);
}

OpPtr soft_cap(uintptr_t x, int64_t x_stride, int64_t width, double cap) {
  if (!(cap > 0)) throw std::invalid_argument("a soft cap must be above 0");
  return row_op(&PointwiseTable::soft_cap, SoftCap{pointer<float>(x), x_stride, width, static_cast<float>(cap)},
                4 * width);
}

OpPtr clamp(uintptr_t x, int64_t x_stride, int64_t width, Dtype dtype, double limit, double least) {
  require_float(dtype);
  if (!(least <= limit)) throw std::invalid_argument("the lower limit must not be above the upper one");
  return row_op(&PointwiseTable::clamp,
                Clamp{pointer<void>(x), x_stride, width, dtype, static_cast<float>(limit), static_cast<float>(least)},
                width);
}

OpPtr multiply(uintptr_t x, int64_t x_stride, int64_t width, Dtype dtype, uintptr_t factors, int64_t factors_stride,
               uintptr_t bias) {
  require_float(dtype);
  return row_op(&PointwiseTable::multiply,
                Multiply{pointer<void>(x), x_stride, width, dtype, pointer<float>(factors), factors_stride,
                         pointer<float>(bias)},
                width);
}

OpPtr scale(uintptr_t x, int64_t x_stride, int64_t width, double factor) {
  return row_op(&PointwiseTable::scale, Scale{pointer<float>(x), x_stride, width, static_cast<float>(factor)}, width);
}

OpPtr xielu(uintptr_t x, int64_t x_stride, int64_t width, double positive, double negative, double beta, double eps) {
  return row_op(&PointwiseTable::xielu,
                Xielu{pointer<float>(x), x_stride, width, static_cast<float>(positive), static_cast<float>(negative),
                      static_cast<float>(beta), static_cast<float>(eps)},
                4 * width);
}

OpPtr query_scale(uintptr_t q, int64_t q_stride, int64_t q_head_stride, int64_t heads, int64_t width, Dtype dtype,
                  double beta, int64_t period, int64_t offset) {
  require_float(dtype);
  if (period < 1 || offset < 0) throw std::invalid_argument("period must be positive, offset not negative");
  return row_op(&PointwiseTable::query_scale,
                QueryScale{pointer<void>(q), q_stride, q_head_stride, heads, width, dtype, beta, period, offset},
                heads * width);
}

// Sections follow the axes in turn; 0 axes: as many as sections.
void set_sections(Rotary& rotary, const std::vector<int64_t>& sections, int64_t axes) {
  if (sections.empty()) return;
  rotary.axes = axes == 0 ? static_cast<int64_t>(sections.size()) : axes;
  if (rotary.axes < 1 || rotary.axes > Rotary::kMaxAxes)
    throw std::invalid_argument("there can be up to " + std::to_string(Rotary::kMaxAxes) +
                                " axes of rotary sections, not " + std::to_string(rotary.axes));
  int64_t end = 0;
  for (const int64_t pairs : sections) end += pairs;
  if (*std::min_element(sections.begin(), sections.end()) < 0 || 2 * end != rotary.rotary_dim ||
      rotary.rotary_dim > Rotary::kMaxSectionedDim)
    throw std::invalid_argument("rotary sections, of no negative size, must have together half of rotary_dim (" +
                                std::to_string(rotary.rotary_dim) + "), which can be up to " +
                                std::to_string(Rotary::kMaxSectionedDim) + ", not " + std::to_string(end));
  uint8_t* pair = rotary.axis_of_pair;
  for (size_t section = 0; section < sections.size(); ++section)
    pair = std::fill_n(pair, sections[section], static_cast<uint8_t>(section % static_cast<size_t>(rotary.axes)));
}

OpPtr rotary(uintptr_t q, int64_t q_stride, uintptr_t k, int64_t k_stride, int64_t heads, int64_t kv_heads,
             int64_t head_dim, int64_t rotary_dim, uintptr_t cos_sin, Dtype dtype, int64_t q_head_stride, uintptr_t out,
             int64_t out_stride, int64_t out_head_stride, const std::vector<int64_t>& sections, int64_t axes) {
  require_float(dtype);
  if (q_head_stride == 0) q_head_stride = head_dim;
  if (out == 0) {
    out = q;
    out_stride = q_stride;
    out_head_stride = q_head_stride;
  }
  if (rotary_dim % 2 != 0 || rotary_dim < 0 || rotary_dim > head_dim)
    throw std::invalid_argument("rotary_dim must be even, from 0 to head_dim (" + std::to_string(head_dim) + "), not " +
                                std::to_string(rotary_dim));
  Rotary arguments{pointer<void>(q), q_stride, q_head_stride, pointer<void>(out), out_stride, out_head_stride,
                   pointer<void>(k), k_stride, head_dim, heads, kv_heads, rotary_dim,
                   pointer<float>(cos_sin), dtype};
  set_sections(arguments, sections, axes);
  return row_op(&PointwiseTable::rotary, arguments, 2 * (heads + kv_heads) * rotary_dim);
}

template <typename T>
void reduce_rows(uintptr_t logits, int64_t rows, int64_t vocab, uintptr_t out,
                 T (*PointwiseTable::*kernel)(const float*, int64_t)) {
  if (vocab < 1) throw std::invalid_argument("a row must have at least one element");
  nb::gil_scoped_release release;
  const auto reduce = isa().pointwise->*kernel;
  for_row_ranges(rows, vocab, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      pointer<T>(out)[row] = reduce(pointer<float>(logits) + row * vocab, vocab);
  });
}

void argmax(uintptr_t logits, int64_t rows, int64_t vocab, uintptr_t out) {
  reduce_rows<int64_t>(logits, rows, vocab, out, &PointwiseTable::argmax);
}

void logsumexp(uintptr_t logits, int64_t rows, int64_t vocab, uintptr_t out) {
  reduce_rows<double>(logits, rows, vocab, out, &PointwiseTable::logsumexp);
}

}  // namespace

void bind_pointwise(nb::module_& m) {
  nb::enum_<Ids>(m, "Ids")
      .value("token_ids", Ids::token_ids)
      .value("positions", Ids::positions)
      .value("token_types", Ids::token_types);
  m.def("embedding", &embedding, "table"_a, "rows"_a, "width"_a, "out"_a, "dtype"_a, "out_dtype"_a = nb::none(),
        "first"_a = 0, "ids"_a = Ids::token_ids, "scale"_a = 1.0, "add"_a = 0, "otherwise"_a = -1);
  m.def("rms_norm", &rms_norm, "x"_a, "x_dtype"_a, "x_stride"_a, "weight"_a, "w_dtype"_a, "out"_a, "out_dtype"_a,
        "width"_a, "eps"_a, "rows_per_token"_a = 1, "head_stride"_a = 0, "out_stride"_a = 0, "out_head_stride"_a = 0,
        "add"_a = 0, "weight_head_stride"_a = 0);
  m.def("soft_cap", &soft_cap, "x"_a, "x_stride"_a, "width"_a, "cap"_a);
  m.def("clamp", &clamp, "x"_a, "x_stride"_a, "width"_a, "dtype"_a, "limit"_a, "least"_a);
  m.def("multiply", &multiply, "x"_a, "x_stride"_a, "width"_a, "dtype"_a, "factors"_a, "factors_stride"_a, "bias"_a = 0);
  m.def("scale", &scale, "x"_a, "x_stride"_a, "width"_a, "factor"_a);
  m.def("xielu", &xielu, "x"_a, "x_stride"_a, "width"_a, "positive"_a, "negative"_a, "beta"_a, "eps"_a);
  m.def("query_scale", &query_scale, "q"_a, "q_stride"_a, "q_head_stride"_a, "heads"_a, "width"_a, "dtype"_a, "beta"_a,
        "period"_a, "offset"_a);
  m.def("layer_norm", &layer_norm, "x"_a, "x_dtype"_a, "x_stride"_a, "weight"_a, "bias"_a, "w_dtype"_a, "out"_a,
        "out_dtype"_a, "width"_a, "eps"_a, "rows_per_token"_a = 1, "head_stride"_a = 0, "out_stride"_a = 0,
        "out_head_stride"_a = 0, "weight_head_stride"_a = 0);

  m.def("activate", &activate, "x"_a, "x_stride"_a, "out"_a, "width"_a, "dtype"_a, "activation"_a, "gated"_a = false);
  m.def("rotary", &rotary, "q"_a, "q_stride"_a, "k"_a, "k_stride"_a, "heads"_a, "kv_heads"_a, "head_dim"_a,
        "rotary_dim"_a, "cos_sin"_a, "dtype"_a, "q_head_stride"_a = 0, "out"_a = 0, "out_stride"_a = 0,
        "out_head_stride"_a = 0, "sections"_a = std::vector<int64_t>{}, "axes"_a = 0,
        "Rotates q, in place or to out, and k in place.");
  m.def("argmax", &argmax, "logits"_a, "rows"_a, "vocab"_a, "out"_a);
  m.def("logsumexp", &logsumexp, "logits"_a, "rows"_a, "vocab"_a, "out"_a);
}

}  // namespace octavo
