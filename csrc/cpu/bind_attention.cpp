// Attention and the KV cache for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "attention.hpp"
#include "attention_plan.hpp"
#include "bind.hpp"
#include "block_moves.hpp"
#include "ranges.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

namespace {

class WriteOp : public TokenOp {
 public:
  WriteOp(const CacheWrite& write, int64_t group)
      : TokenOp(write.shape.kv_heads * write.shape.head_dim * 8), write_(write), group_(group) {}
  void run_tokens(const Step& step, int64_t begin, int64_t end) const override {
    isa().attention->write(write_, step.of_group(group_), begin, end);
  }

 private:
  CacheWrite write_;
  int64_t group_;
};

class AttentionOp : public Op {
 public:
  AttentionOp(const Attention& attention, int64_t group, bool cross)
      : attention_(attention), group_(group), cross_(cross) {}
  void run(const Step& step) override { run_rows(step, 0, kAll); }
  bool run_rows(const Step& step, int64_t begin, int64_t end) override {
    run_attention(attention_, cross_ ? step.cross() : step.of_group(group_), begin, end);
    return true;
  }

 private:
  Attention attention_;
  int64_t group_;
  bool cross_;
};

CacheShape shape_of(Dtype cache_dtype, int64_t kv_heads, int64_t head_dim, int64_t block_size, int64_t latent = 0) {
  if (head_dim < 2 || head_dim % 2 != 0)
    throw std::invalid_argument("head_dim must be even and at least 2, not " + std::to_string(head_dim));
  if (kv_heads < 1) throw std::invalid_argument("kv_heads must be at least 1, not " + std::to_string(kv_heads));
  if (block_size < 1) throw std::invalid_argument("block_size must be at least 1, not " + std::to_string(block_size));
  if (cache_dtype == Dtype::i8 && block_size * ((head_dim + 15) / 16 * 16) % 4 != 0)
    throw std::invalid_argument("scales would not be aligned");
  if (latent < 0 || latent > head_dim || (latent > 0 && kv_heads != 1))
    throw std::invalid_argument("a latent cache has one KV head, and values of at most head_dim (" +
                                std::to_string(head_dim) + ") numbers, not " + std::to_string(latent));
  return {cache_dtype, kv_heads, head_dim, block_size, latent};
}

void require_float_rows(Dtype dtype) {
  if (dtype != Dtype::f32 && dtype != Dtype::bf16)
    throw std::invalid_argument("queries, keys and values must be f32 or bf16, not i8");
}

OpPtr reshape_and_cache(uintptr_t k, int64_t k_stride, uintptr_t v, int64_t v_stride, uintptr_t key_cache,
                        uintptr_t value_cache, int64_t kv_heads, int64_t head_dim, int64_t block_size, Dtype dtype,
                        Dtype cache_dtype, int64_t group, int64_t latent) {
  require_float_rows(dtype);
  return std::make_shared<WriteOp>(CacheWrite{pointer<void>(k), k_stride, pointer<void>(v), v_stride, dtype,
                                              pointer<char>(key_cache), pointer<char>(value_cache),
                                              shape_of(cache_dtype, kv_heads, head_dim, block_size, latent)},
                                   group);
}

OpPtr paged_attention(uintptr_t q, int64_t q_stride, uintptr_t out, uintptr_t key_cache, uintptr_t value_cache,
                      int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_size, Dtype dtype,
                      Dtype cache_dtype, double scale, int64_t window, double soft_cap, uintptr_t alibi_slopes,
                      bool causal, int64_t group, int64_t latent, uintptr_t bias, int64_t bias_stride,
                      int64_t bias_reach, bool cross, bool sees_spans, uintptr_t sinks, bool chunked) {
  require_float_rows(dtype);
  const CacheShape shape = shape_of(cache_dtype, kv_heads, head_dim, block_size, latent);
  if (heads < 1 || heads % kv_heads != 0)
    throw std::invalid_argument("heads must be a multiple of kv_heads (" + std::to_string(kv_heads) + "), not " +
                                std::to_string(heads));
  if (cross && causal) throw std::invalid_argument("cross attention sees all of its context: it is not causal");
  if (sees_spans && !causal) throw std::invalid_argument("attention that is not causal sees spans as it is");
  if (chunked && (window < 1 || !causal)) throw std::invalid_argument("chunks have a size, and are causal");
  if (window < 0 || !(soft_cap >= 0)) throw std::invalid_argument("window and soft_cap must not be negative");
  return std::make_shared<AttentionOp>(
      Attention{pointer<void>(q), q_stride, pointer<void>(out), dtype, heads, pointer<char>(key_cache),
                pointer<char>(value_cache), shape, static_cast<float>(scale), window, static_cast<float>(soft_cap),
                pointer<float>(alibi_slopes), causal, pointer<float>(bias), bias_stride, bias_reach,
                pointer<float>(sinks), sees_spans, chunked},
      group, cross);
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def(
      "block_bytes",
      [](int64_t kv_heads, int64_t head_dim, int64_t block_size, Dtype cache_dtype) {
        return kv_heads * shape_of(cache_dtype, kv_heads, head_dim, block_size).tile_bytes();
      },
      "kv_heads"_a, "head_dim"_a, "block_size"_a, "cache_dtype"_a,
      "Bytes of a block of keys, or of values, of one layer.");
  m.def("reshape_and_cache", &reshape_and_cache, "k"_a, "k_stride"_a, "v"_a, "v_stride"_a, "key_cache"_a,
        "value_cache"_a, "kv_heads"_a, "head_dim"_a, "block_size"_a, "dtype"_a, "cache_dtype"_a,
        "group"_a = 0, "latent"_a = 0);
  m.def("paged_attention", &paged_attention, "q"_a, "q_stride"_a, "out"_a, "key_cache"_a, "value_cache"_a, "heads"_a,
        "kv_heads"_a, "head_dim"_a, "block_size"_a, "dtype"_a, "cache_dtype"_a, "scale"_a, "window"_a = 0,
        "soft_cap"_a = 0.0, "alibi_slopes"_a = 0, "causal"_a = true, "group"_a = 0, "latent"_a = 0,
        "bias"_a = 0, "bias_stride"_a = 0, "bias_reach"_a = 0, "cross"_a = false,
        "sees_spans"_a = false, "sinks"_a = 0, "chunked"_a = false);
  m.def("copy_blocks", &copy_blocks, "arrays"_a, "pairs"_a, "bytes"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("swap_blocks", &swap_blocks, "sources"_a, "targets"_a, "pairs"_a, "bytes"_a,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("read_blocks", &read_blocks, "arrays"_a, "sizes"_a, "blocks"_a, "rows"_a,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("write_blocks", &write_blocks, "arrays"_a, "sizes"_a, "blocks"_a, "rows"_a,
        nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace octavo
