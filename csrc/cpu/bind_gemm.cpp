#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bind.hpp"
#include "gemm.hpp"
#include "gemm_pack.hpp"
#include "limits.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace octavo {
namespace {

using Weights = std::shared_ptr<const PackedLinear>;

// Memory for rows of x as the kernels take them; what was in it is lost.
class Rows {
 public:
  float* take(size_t floats) {
    if (memory_.size() < floats + 16) memory_.resize(floats + 16);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory_.data()) + 63) / 64 * 64);
  }

 private:
  std::vector<float> memory_;
};

// A product over all rows of the step. Rows that the kernels take as they lie go by in large blocks; others are copied, in
// blocks that stay in the second-level cache while the groups of columns pass over them. The tasks of a block are its
// groups, a few at a time, times parts of its rows.
class Linear : public Op {
 public:
  Linear(Weights weights, const void* x, int64_t x_stride, Dtype x_dtype, Product product)
      : weights_(std::move(weights)), x_(x), x_stride_(x_stride), x_dtype_(x_dtype), product_(product) {}

  void run(const Step& step) override { run_rows(step, 0, step.tokens); }

  bool run_rows(const Step&, int64_t begin, int64_t end) override {
    const bool pairs = pairs_in_place();
    const int64_t fitting = kBlockFloats / product_.weights.k / kRowsOfTask;
    const int64_t block = (pairs ? kPartsInPlace : std::clamp(fitting, int64_t{1}, int64_t{4})) * kRowsOfTask;
    for (int64_t row = begin; row < end; row += block) run_block(row, std::min(block, end - row), pairs);
    return true;
  }

  Bytes first_weights(const Step& step, int thread, int threads) const override {
    const WeightView& weights = product_.weights;
    if (weights.groups == 0) return {};
    const int64_t chunks = chunks_of(weights, std::min(step.tokens, kRowsOfTask));
    const int64_t bytes = weights.k * kGroup * (weights.dtype == Dtype::bf16 ? 2 : 4);  // of a group
    const int64_t begin = weights.groups * (chunks * thread / threads) / chunks;
    const int64_t end = weights.groups * (chunks * (thread + 1) / threads) / chunks;
    return {static_cast<const char*>(weights.data) + begin * bytes, (end - begin) * bytes};
  }

 private:
  static constexpr int64_t kBlockFloats = 64 * 1024;
  static constexpr int64_t kRowsOfTask = 72;
  static constexpr int64_t kPartsInPlace = 16;     // of so many rows at most, in one loop
  static constexpr int64_t kFloatsOfTask = 16384;  // of x, made ready

  // Whether rows of bfloat16 are multiplied as they lie.
  bool pairs_in_place() const {
    return isa().gemm->multiplies_pairs && x_dtype_ == Dtype::bf16 && product_.weights.dtype == Dtype::bf16 &&
           weights_->k() == product_.weights.k && x_stride_ % 2 == 0 && reinterpret_cast<uintptr_t>(x_) % 4 == 0;
  }

  void run_block(int64_t row, int64_t rows, bool pairs) {
    Product block = product_;
    const int64_t bytes = block.out_dtype == Dtype::bf16 ? 2 : 4;
    block.out = static_cast<char*>(block.out) + row * block.out_stride * bytes;
    if (block.add != nullptr) block.add += row * block.add_stride;
    const bool in_place = pairs || (x_dtype_ == Dtype::f32 && block.weights.dtype == Dtype::f32);
    const bool each_its_own = !in_place && rows * block.weights.k <= kFloatsOfTask;
    if (in_place) {
      block.x_stride = pairs ? x_stride_ / 2 : x_stride_;
      block.x = static_cast<const float*>(x_) + row * block.x_stride;
    } else {
      block.x_stride = (block.weights.k + 15) / 16 * 16 + 16;  // rows of a tile must not share lines of the cache
      if (!each_its_own) block.x = prepare_together(row, rows, block.x_stride);
    }
    static uint64_t loops = 0;  // of all products: they run one after the other
    const uint64_t loop = ++loops;
    const int64_t groups = block.weights.groups, parts = (rows + kRowsOfTask - 1) / kRowsOfTask;
    const int64_t chunks = chunks_of(block.weights, (rows + parts - 1) / parts);
    const auto multiply = isa().gemm->multiply;
    parallel_for(chunks * parts, [&](int64_t task) {
      const int64_t chunk = task / parts, part = task % parts;
      Product share = block;
      if (each_its_own) share.x = own_rows(loop, row, rows, block.x_stride);
      multiply(share, groups * chunk / chunks, groups * (chunk + 1) / chunks, rows * part / parts,
               rows * (part + 1) / parts);
    });
  }

  // Few rows each thread makes for itself, once in a loop: it would wait longer for them to come from the cache of
  // another.
  const float* own_rows(uint64_t loop, int64_t row, int64_t rows, int64_t stride) const {
    thread_local Rows memory;
    thread_local uint64_t made_for = 0;
    float* out = memory.take(static_cast<size_t>(rows * stride));
    if (made_for != loop) prepare(row, rows, out, stride);
    made_for = loop;
    return out;
  }

  const float* prepare_together(int64_t row, int64_t rows, int64_t stride) const {
    static Rows memory;
    float* out = memory.take(static_cast<size_t>(rows * stride));
    const int64_t rows_of_task = std::max(int64_t{1}, kFloatsOfTask / product_.weights.k);
    parallel_for((rows + rows_of_task - 1) / rows_of_task, [&](int64_t task) {
      const int64_t r = task * rows_of_task;
      prepare(row + r, std::min(rows_of_task, rows - r), out + r * stride, stride);
    });
    return out;
  }

  void prepare(int64_t row, int64_t rows, float* out, int64_t stride) const {
    const char* x = static_cast<const char*>(x_) + row * x_stride_ * (x_dtype_ == Dtype::bf16 ? 2 : 4);
    isa().gemm->prepare(x, x_dtype_, x_stride_, weights_->k(), product_.weights.dtype, out, product_.weights.k, stride,
                        rows);
  }

  // Into how many tasks the groups are divided: as many for each thread, of as many groups as go by at once, or twice
  // that; small, so that no thread waits long for the last one.
  static int64_t chunks_of(const WeightView& weights, int64_t rows) {
    const int64_t threads = ThreadPool::instance().size(), groups = weights.groups;
    const int64_t at_once = std::max(int64_t{2}, isa().gemm->groups_at_once(weights, rows));
    const int64_t chunk = groups >= 16 * at_once * threads ? 2 * at_once : at_once;
    const int64_t chunks = (groups + chunk - 1) / chunk;
    return std::min(groups, (chunks + threads - 1) / threads * threads);
  }

  Weights weights_;
  const void* x_;
  int64_t x_stride_;
  Dtype x_dtype_;
  Product product_;
};

// Products of heads: row r of head h is x[r * x_stride + h * x_head_stride], and likewise in out. A task has one head.
class HeadProducts : public Op {
 public:
  HeadProducts(std::vector<Weights> weights, const char* x, int64_t x_stride, int64_t x_head_stride, Dtype x_dtype,
               Product product, int64_t out_head_stride)
      : weights_(std::move(weights)), x_(x), x_stride_(x_stride), x_head_stride_(x_head_stride), x_dtype_(x_dtype),
        product_(product), out_head_stride_(out_head_stride) {}

  void run(const Step& step) override {
    const int64_t parts = (step.tokens + kRowsOfTask - 1) / kRowsOfTask;
    parallel_for(static_cast<int64_t>(weights_.size()) * parts, [&](int64_t task) {
      run_rows(task / parts, step.tokens * (task % parts) / parts, step.tokens * (task % parts + 1) / parts);
    });
  }

 private:
  static constexpr int64_t kRowsOfTask = 72;

  void run_rows(int64_t head, int64_t begin, int64_t end) const {
    thread_local Rows memory;
    Product share = product_;
    share.weights = weights_[head]->view();
    share.out = static_cast<char*>(share.out) + (begin * share.out_stride + head * out_head_stride_) * size_of(share.out_dtype);
    share.x_stride = (share.weights.k + 15) / 16 * 16 + 16;  // rows of a tile must not share lines of the cache
    float* rows = memory.take(static_cast<size_t>((end - begin) * share.x_stride));
    isa().gemm->prepare(x_ + (begin * x_stride_ + head * x_head_stride_) * size_of(x_dtype_), x_dtype_, x_stride_,
                        weights_[head]->k(), share.weights.dtype, rows, share.weights.k, share.x_stride, end - begin);
    share.x = rows;
    isa().gemm->multiply(share, 0, share.weights.groups, 0, end - begin);
  }

  static int64_t size_of(Dtype dtype) { return dtype == Dtype::bf16 ? 2 : 4; }

  std::vector<Weights> weights_;
  const char* x_;
  int64_t x_stride_, x_head_stride_;
  Dtype x_dtype_;
  Product product_;
  int64_t out_head_stride_;
};

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

OpPtr linear(Weights weights, uintptr_t x, int64_t x_stride, Dtype x_dtype, uintptr_t out, int64_t out_stride,
             Dtype out_dtype, uintptr_t add, int64_t add_stride, Activation activation) {
  const int64_t n = weights->view().n;
  Product product;
  product.weights = weights->view();
  product.out = reinterpret_cast<void*>(out);
  product.out_stride = out_stride;
  product.out_dtype = out_dtype;
  product.add = reinterpret_cast<const float*>(add);
  product.add_stride = add_stride;
  product.activation = activation;
  product.gated = weights->order() == PackedLinear::Order::gate_up;
  require(x_dtype != Dtype::i8 && out_dtype != Dtype::i8, "x and out must be float32 or bfloat16");
  require(x_stride >= weights->k(), "x_stride " + std::to_string(x_stride) + " is less than k " +
                                        std::to_string(weights->k()));
  require(out_stride >= product.out_columns(), "out_stride " + std::to_string(out_stride) + " is less than the " +
                                                   std::to_string(product.out_columns()) + " columns of out");
  require(add == 0 || add_stride >= n, "add_stride " + std::to_string(add_stride) + " is less than the " +
                                           std::to_string(n) + " columns of the product");
  require(!product.gated || activation != Activation::none, "weights packed as gate and up need an activation");
  return std::make_shared<Linear>(std::move(weights), reinterpret_cast<const void*>(x), x_stride, x_dtype, product);
}

OpPtr head_products(std::vector<Weights> weights, uintptr_t x, int64_t x_stride, int64_t x_head_stride, Dtype x_dtype,
                    uintptr_t out, int64_t out_stride, int64_t out_head_stride, Dtype out_dtype) {
  require(x_dtype != Dtype::i8 && out_dtype != Dtype::i8, "x and out must be float32 or bfloat16");
  for (const Weights& weight : weights) {
    require(weight->k() <= x_head_stride && weight->view().n <= out_head_stride,
            "a head's strides are less than its inputs or outputs");
    require(weight->order() == PackedLinear::Order::plain, "weights of heads have no gate");
  }
  Product product;
  product.out = reinterpret_cast<void*>(out);
  product.out_stride = out_stride;
  product.out_dtype = out_dtype;
  return std::make_shared<HeadProducts>(std::move(weights), reinterpret_cast<const char*>(x), x_stride, x_head_stride,
                                        x_dtype, product, out_head_stride);
}

// A matrix: address, rows, and elements from row to row.
using Part = std::tuple<uintptr_t, int64_t, int64_t>;

std::shared_ptr<PackedLinear> pack_linear(const std::vector<Part>& parts, int64_t k, Dtype dtype, uintptr_t bias,
                                          bool gate_up, int pieces) {
  nb::gil_scoped_release release;
  std::vector<const void*> rows;
  for (const auto& [address, count, stride] : parts) {
    if (stride < k)
      throw std::invalid_argument("row stride " + std::to_string(stride) + " is less than k " + std::to_string(k));
    const int64_t bytes = stride * (dtype == Dtype::bf16 ? 2 : 4);
    for (int64_t row = 0; row < count; ++row)
      rows.push_back(reinterpret_cast<const char*>(address) + row * bytes);
  }
  const auto order = gate_up ? PackedLinear::Order::gate_up : PackedLinear::Order::plain;
  return std::make_shared<PackedLinear>(rows, k, dtype, reinterpret_cast<const float*>(bias), order, pieces);
}

}  // namespace

void bind_gemm(nb::module_& m) {
  using Order = PackedLinear::Order;
  nb::class_<PackedLinear>(m, "PackedLinear")
      .def_prop_ro("n", [](const PackedLinear& p) { return p.view().n; })
      .def_prop_ro("k", &PackedLinear::k)
      .def_prop_ro("dtype", [](const PackedLinear& p) { return p.view().dtype; })
      .def_prop_ro("gate_up", [](const PackedLinear& p) { return p.order() == Order::gate_up; })
      .def_prop_ro("nbytes", &PackedLinear::nbytes);
  m.def("pack_linear", &pack_linear, nb::arg("parts"), nb::arg("k"), nb::arg("dtype"), nb::arg("bias") = 0,
        nb::arg("gate_up") = false, nb::arg("pieces") = 1,
        "A packed copy of the rows of all parts (address, rows, elements from row to row) and of bias (float32, by "
        "address); with gate_up the first half of the rows is the gate's, the second half up's. Products sum k in so "
        "many equal pieces, joined as a binary tree.");
  m.def("linear", &linear, nb::arg("weights"), nb::arg("x"), nb::arg("x_stride"), nb::arg("x_dtype"), nb::arg("out"),
        nb::arg("out_stride"), nb::arg("out_dtype"), nb::arg("add") = 0, nb::arg("add_stride") = 0,
        nb::arg("activation") = Activation::none,
        "out[r] = activation(x[r] W^T + bias + add[r]), for each token r of the step; of weights packed with gate_up, "
        "activation(gate) * up.");
  m.def("head_products", &head_products, nb::arg("weights"), nb::arg("x"), nb::arg("x_stride"),
        nb::arg("x_head_stride"), nb::arg("x_dtype"), nb::arg("out"), nb::arg("out_stride"), nb::arg("out_head_stride"),
        nb::arg("out_dtype"), "out[r, h] = x[r, h] W[h]^T, for each token r of the step and each head h.");
  m.def("measure_read_bandwidth", &measure_read_bandwidth, nb::arg("threads"),
        nb::call_guard<nb::gil_scoped_release>(), "Bytes a second that so many threads read from memory.");
  m.def("measure_fma_peak", &measure_fma_peak, nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>(),
        "Operations a second, two for each float32 multiply-add, that so many threads do in registers.");
  m.def("measure_chunk_bandwidth", &measure_chunk_bandwidth, nb::arg("threads"),
        nb::call_guard<nb::gil_scoped_release>(), "As measure_read_bandwidth, in pieces of 2 KiB in random order.");
  m.def("measure_bf16_dot_peak", &measure_bf16_dot_peak, nb::arg("threads"),
        nb::call_guard<nb::gil_scoped_release>(), "As measure_fma_peak, of dots of bfloat16 pairs; 0 without them.");
  m.def("measure_int8_dot_peak", &measure_int8_dot_peak, nb::arg("threads"),
        nb::call_guard<nb::gil_scoped_release>(), "As measure_fma_peak, of dots of 8-bit quads; 0 without them.");
}

}  // namespace octavo
