// Root mean square norm (Zhang & Sennrich 2019) and layer norm (Ba et al. 2016).
#include "pointwise_norm.hpp"

#include <type_traits>

#include "rows.hpp"

namespace octavo::OCTAVO_ISA {

namespace {

template <typename X, typename W, typename O>
void rms_norm_row(const X* x, const W* weight, const float* add, O* out, int64_t width, float eps) {
  const float squares = sum_of_vectors(width, [&](int64_t i, auto lanes) {
    const F32 v = load(x + i, lanes);
    return v * v;
  });
  const F32 scale = splat(1.0f / std::sqrt(squares / static_cast<float>(width) + eps));
  for_vectors(width, [&](int64_t i, auto lanes) {
    const F32 normed = load(x + i, lanes) * scale * load(weight + i, lanes);
    store(out + i, add == nullptr ? normed : load(add + i, lanes) + normed, lanes);
  });
}

template <typename X, typename W, typename O>
void layer_norm_row(const X* x, const W* weight, const W* bias, O* out, int64_t width, float eps) {
  const float size = static_cast<float>(width);
  const float total = sum_of_vectors(width, [&](int64_t i, auto lanes) { return load(x + i, lanes); });
  const F32 mean = splat(total / size);
  const float squares = sum_of_vectors(width, [&](int64_t i, auto lanes) {
    const F32 v = keep(load(x + i, lanes) - mean, lanes);
    return v * v;
  });
  const F32 scale = splat(1.0f / std::sqrt(squares / size + eps));
  for_vectors(width, [&](int64_t i, auto lanes) {
    const F32 shift = bias ? load(bias + i, lanes) : F32{};
    store(out + i, fma((load(x + i, lanes) - mean) * scale, load(weight + i, lanes), shift), lanes);
  });
}

template <typename T>
T* row_of(void* p, int64_t row, int64_t heads, int64_t stride, int64_t head_stride) {
  return static_cast<T*>(p) + row / heads * stride + row % heads * head_stride;
}

// One row of a norm; `layer` chooses which.
template <bool layer>
void norm_row(const Norm& a, int64_t row) {
  with_type(a.x_dtype, [&](auto x_type) {
    with_type(a.weight_dtype, [&](auto w_type) {
      with_type(a.out_dtype, [&](auto out_type) {
        using X = std::remove_pointer_t<decltype(x_type)>;
        using W = std::remove_pointer_t<decltype(w_type)>;
        using O = std::remove_pointer_t<decltype(out_type)>;
        const X* x = row_of<X>(const_cast<void*>(a.x), row, a.heads, a.x_stride, a.x_head_stride);
        const int64_t shift = row % a.heads * a.weight_head_stride;
        const W* weight = static_cast<const W*>(a.weight) + shift;
        const W* bias = a.bias == nullptr ? nullptr : static_cast<const W*>(a.bias) + shift;
        O* out = row_of<O>(a.out, row, a.heads, a.out_stride, a.out_head_stride);
        const float* add = nullptr;
        if (a.add != nullptr)
          add = row_of<float>(const_cast<float*>(a.add), row, a.heads, a.out_stride, a.out_head_stride);
        if constexpr (layer)
          layer_norm_row(x, weight, bias, out, a.width, a.eps);
        else
          rms_norm_row(x, weight, add, out, a.width, a.eps);
      });
    });
  });
}

}  // namespace

void rms_norm(const Norm& a, const Step&, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) norm_row<false>(a, row);
}

void layer_norm(const Norm& a, const Step&, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) norm_row<true>(a, row);
}

}  // namespace octavo::OCTAVO_ISA
