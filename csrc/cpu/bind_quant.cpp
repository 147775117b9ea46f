// Quantised products as operations, and their Python names.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "bind.hpp"
#include "half.hpp"
#include "pointwise.hpp"
#include "quant.hpp"
#include "ranges.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace octavo {

namespace {

// Rows that are quantised and multiplied at a time: as many as have so many codes, which stay in the second-level cache
// while the panels pass, but no fewer than this.
constexpr int64_t kRowsAtOnce = 64, kMostRowsAtOnce = 512;
constexpr int64_t kCodesAtOnce = 192 * 1024;
// Work of quantising one value, in the units of for_row_ranges.
constexpr int64_t kWorkOfValue = 2;

// Room for quantised rows; one a thread that runs operations, as they come one after the other.
class RowBuffer {
 public:
  QuantRows take(int64_t rows, int64_t num_groups, bool narrow, bool wide) {
    const int tile = integer_isa().quant->rows_of_tile(rows);
    const auto all_groups = static_cast<size_t>(QuantRows::room(rows, tile) * num_groups);
    return {narrow ? static_cast<int8_t*>(narrow_.take(all_groups * kQuantGroup)) : nullptr,
            wide ? static_cast<int16_t*>(wide_.take(all_groups * kQuantGroup * 2)) : nullptr,
            static_cast<QuantGroup*>(groups_.take(all_groups * sizeof(QuantGroup))), num_groups, rows, tile};
  }

 private:
  // Memory that grows to what was asked for; what was in it is lost.
  class Memory {
   public:
    void* take(size_t bytes) {
      if (bytes > capacity_) {
        ::operator delete(data_, kAlignment);
        data_ = nullptr;  // in case that the next line throws
        data_ = ::operator new(bytes, kAlignment);
        capacity_ = bytes;
      }
      return data_;
    }
    ~Memory() { ::operator delete(data_, kAlignment); }

   private:
    static constexpr std::align_val_t kAlignment{64};
    size_t capacity_ = 0;
    void* data_ = nullptr;
  };
  Memory narrow_, wide_, groups_;
};

// One input times the matrices of one or more parts, whose outputs stand one after the other; or, gated, those of two
// equal parts, of which the activation of the first is multiplied by the second.
class LinearQuant : public Op {
 public:
  LinearQuant(std::vector<std::shared_ptr<PackedQuant>> parts, const void* x, int64_t x_stride, Dtype x_dtype,
              const QuantOutput& out, Activation activation, bool gated)
      : parts_(std::move(parts)), x_(static_cast<const char*>(x)), x_dtype_(x_dtype), activation_(activation),
        gated_(gated) {
    if (parts_.empty()) throw std::invalid_argument("a quantised product needs a matrix");
    if (gated && (parts_.size() != 2 || parts_[0]->n != parts_[1]->n || activation == Activation::none))
      throw std::invalid_argument("a gated product needs two matrices with as many outputs, and an activation");
    check_dtype(x_dtype);
    check_dtype(out.dtype);
    x_stride_ = x_stride * size_of(x_dtype);
    int64_t column = 0, panels = 0;
    for (const auto& part : parts_) {
      if (part->k != parts_[0]->k) throw std::invalid_argument("the parts of a quantised product differ in inputs");
      QuantOutput own = out;
      own.data = static_cast<char*>(out.data) + column * size_of(out.dtype);
      if (out.bias != nullptr) own.bias += column;
      if (out.add != nullptr) own.add += column;
      outputs_.push_back(own);
      first_panel_.push_back(panels);
      panels += part->panels;
      column += part->n;
    }
    tasks_ = gated ? panels / 2 : panels;
  }

  Bytes first_weights(const Step& step, int thread, int threads) const override {
    const int64_t chunk = panels_of_task(std::min(step.tokens, kRowsAtOnce)), chunks = (tasks_ + chunk - 1) / chunk;
    const int64_t first = std::min(tasks_, chunks * thread / threads * chunk);
    const int64_t end = std::min(tasks_, chunks * (thread + 1) / threads * chunk);
    if (first == end) return {};
    const size_t part = part_of(first);
    const int64_t own = first - first_panel_[part], most = parts_[part]->panels - own;
    return {parts_[part]->panel(own), std::min(end - first, most) * parts_[part]->panel_bytes};
  }

  void run(const Step& step) override {
    thread_local RowBuffer buffer;
    const int64_t fitting = kCodesAtOnce / parts_[0]->k / kRowsAtOnce * kRowsAtOnce;
    const int64_t at_once = gated_ ? kRowsAtOnce : std::clamp(fitting, kRowsAtOnce, kMostRowsAtOnce);
    for (int64_t first = 0; first < step.tokens; first += at_once) {
      const int64_t rows = std::min(step.tokens - first, at_once);
      run_rows(first, buffer.take(rows, parts_[0]->groups, any_part_wants(false), any_part_wants(true)));
    }
  }

 private:
  static constexpr int64_t kMostOfTask = 16, kMostInStreams = 48;  // panels of a task
  // Gates and ups of as many panels as go side by side, for all rows, or of a task in streams.
  static constexpr int64_t kSums = 2 * kMostPanels * kPanel * kRowsAtOnce;
  static_assert(2 * kMostInStreams * kPanel * (kQuantTile - 1) <= kSums && kMostInStreams % kMostPanels == 0);

  static int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }
  static void check_dtype(Dtype dtype) {
    if (dtype == Dtype::i8) throw std::invalid_argument("rows of a quantised product are float32 or bfloat16");
  }

  bool any_part_wants(bool wide) const {
    return std::any_of(parts_.begin(), parts_.end(), [&](const auto& part) {
      return integer_isa().quant->wants_wide(layout_of(part->format).bits) == wide;
    });
  }

  size_t part_of(int64_t panel) const {
    size_t part = parts_.size() - 1;
    while (panel < first_panel_[part]) --part;
    return part;
  }

  void run_rows(int64_t first, const QuantRows& quantized) const {
    const QuantTable& table = *integer_isa().quant;
    const int64_t k = parts_[0]->k;
    for_row_ranges(quantized.count, kWorkOfValue * k, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        table.quantize(x_ + (first + row) * x_stride_, x_dtype_, k, quantized, row);
      }
    });
    const int64_t chunk = panels_of_task(quantized.count);
    const int64_t at_once = has_streams(quantized.count) ? chunk : table.panels_at_once(quantized.count);
    parallel_for((tasks_ + chunk - 1) / chunk, [&](int64_t chunk_index) {
      const int64_t end = std::min(tasks_, (chunk_index + 1) * chunk);
      for (int64_t i = chunk_index * chunk; i < end;) i = run_task(i, std::min(end, i + at_once), first, quantized);
    });
  }

  // Whether the panels of a task are read in streams side by side; these are the longer, the larger it is.
  static bool has_streams(int64_t rows) { return rows < kQuantTile && integer_isa().quant->panels_at_once(rows) > 1; }

  int64_t panels_of_task(int64_t rows) const {
    const int64_t at_once = integer_isa().quant->panels_at_once(rows), threads = ThreadPool::instance().size();
    const bool streams = has_streams(rows);
    const int64_t wanted =
        std::clamp(tasks_ / ((streams ? 2 : 8) * threads), int64_t{1}, streams ? kMostInStreams : kMostOfTask);
    return (wanted + at_once - 1) / at_once * at_once;
  }

  // Those of panels [panel, end) that are of the first one's part; returns where they end.
  int64_t run_task(int64_t panel, int64_t end, int64_t first, const QuantRows& quantized) const {
    const size_t part = part_of(panel);
    QuantOutput out = at_row(outputs_[part], first);
    const int64_t own = panel - first_panel_[part], own_end = std::min(end - first_panel_[part], parts_[part]->panels);
    if (gated_) {
      run_gated(own, own_end, first, quantized, out);
    } else {
      out.activation = activation_;
      integer_isa().quant->panels(*parts_[part], own, own_end, quantized, out, *isa().quant_results);
    }
    return first_panel_[part] + own_end;
  }

  void run_gated(int64_t begin, int64_t end, int64_t first, const QuantRows& quantized, const QuantOutput& out) const {
    alignas(64) float sums[kSums];
    const int64_t width = std::min<int64_t>((end - begin) * kPanel, parts_[0]->n - begin * kPanel);
    const int64_t stride = 2 * (end - begin) * kPanel;
    multiply(0, begin, end, first, quantized, sums, stride);
    multiply(1, begin, end, first, quantized, sums + width, stride);
    isa().pointwise->activate({sums, stride, Dtype::f32,
                               static_cast<char*>(out.data) + begin * kPanel * size_of(out.dtype), out.stride, out.dtype,
                               width, activation_, true},
                              Step{}, 0, quantized.count);
  }

  // Panels of a part for all rows, into memory of its own [rows][stride].
  void multiply(size_t part, int64_t begin, int64_t end, int64_t first, const QuantRows& quantized, float* sums,
                int64_t stride) const {
    QuantOutput out = at_row(outputs_[part], first);
    out.data = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(sums) - begin * kPanel * sizeof(float));
    out.stride = stride;
    out.dtype = Dtype::f32;
    integer_isa().quant->panels(*parts_[part], begin, end, quantized, out, *isa().quant_results);
  }

  static QuantOutput at_row(QuantOutput out, int64_t row) {
    out.data = static_cast<char*>(out.data) + row * out.stride * size_of(out.dtype);
    if (out.add != nullptr) out.add += row * out.add_stride;
    return out;
  }

  std::vector<std::shared_ptr<PackedQuant>> parts_;
  std::vector<QuantOutput> outputs_;
  std::vector<int64_t> first_panel_;
  int64_t tasks_;  // what run_task is called for: panels, or pairs of them
  const char* x_;
  int64_t x_stride_;  // bytes
  Dtype x_dtype_;
  Activation activation_;
  bool gated_;
};

OpPtr linear_quant(std::vector<std::shared_ptr<PackedQuant>> parts, uintptr_t x, int64_t x_stride, Dtype x_dtype,
                   uintptr_t out, int64_t out_stride, Dtype out_dtype, uintptr_t add, int64_t add_stride,
                   Activation activation, uintptr_t bias, bool gated) {
  const QuantOutput output{reinterpret_cast<void*>(out),         out_stride, out_dtype,
                           reinterpret_cast<const float*>(bias), reinterpret_cast<const float*>(add), add_stride};
  return std::make_shared<LinearQuant>(std::move(parts), reinterpret_cast<const void*>(x), x_stride, x_dtype, output,
                                       activation, gated);
}

void quantize_rows(uintptr_t weight, int64_t n, int64_t k, int64_t row_stride, Dtype dtype, int bits, int64_t group,
                   uintptr_t codes, uintptr_t scales) {
  if (dtype == Dtype::i8) throw std::invalid_argument("weights are float32 or bfloat16");
  if (group < 0 || (group != 0 && k % group != 0)) throw std::invalid_argument("k is no multiple of the group");
  if (bits != 8 && !(bits == 4 && (group == 32 || group == 128))) {
    throw std::invalid_argument("weights are quantised to 8 bits, or to 4 bits in groups of 32 or 128");
  }
  const int64_t row_bytes = row_stride * (dtype == Dtype::f32 ? 4 : 2);
  const int64_t scale_bytes = group == 0 ? 4 : k / group * 2;
  parallel_for(n, [&](int64_t row) {
    integer_isa().quant->encode(reinterpret_cast<const char*>(weight) + row * row_bytes, dtype, k, group, bits,
                        reinterpret_cast<uint8_t*>(codes) + row * k,
                        reinterpret_cast<char*>(scales) + row * scale_bytes);
  });
}

// Blocks of 32 values of a GGUF file: a float16 scale, Q4_1's minimum, and codes, of 4 bits first the low halves.
struct GGUFBlock {
  explicit GGUFBlock(const std::string& kind)
      : has_minimum(kind == "Q4_1"), is_wide(kind == "Q8_0"), shift(kind == "Q4_0" ? -8 : 0),
        code_bytes(is_wide ? 32 : 16), bytes(2 + (has_minimum ? 2 : 0) + code_bytes) {
    if (!has_minimum && !is_wide && shift == 0) throw std::invalid_argument("GGUF types are Q4_0, Q4_1 and Q8_0");
  }

  // Scale * code is exact in float32: however it is compiled, the sum with the minimum is rounded once.
  void read(const uint8_t* block, float* values) const {
    const float scale = half_at(block), minimum = has_minimum ? half_at(block + 2) : 0.0f;
    const uint8_t* codes = block + bytes - code_bytes;
    if (is_wide) {
      for (int i = 0; i < 32; ++i) values[i] = scale * static_cast<float>(static_cast<int8_t>(codes[i]));
      return;
    }
    for (int i = 0; i < 16; ++i) {
      values[i] = static_cast<float>((codes[i] & 15) + shift);
      values[16 + i] = static_cast<float>((codes[i] >> 4) + shift);
    }
    for (int i = 0; i < 32; ++i) values[i] *= scale;
    if (!has_minimum) return;
    for (int i = 0; i < 32; ++i) values[i] += minimum;
  }

  static float half_at(const uint8_t* at) {
    uint16_t half;
    std::memcpy(&half, at, 2);
    return from_f16(half);
  }

  bool has_minimum, is_wide;
  int shift, code_bytes, bytes;
};

uint16_t nearest_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void dequantize_gguf(const std::string& kind, uintptr_t blocks, int64_t count, uintptr_t out, Dtype dtype) {
  if (dtype == Dtype::i8) throw std::invalid_argument("values are float32 or bfloat16");
  constexpr int64_t kAtOnce = 1024;
  const GGUFBlock layout(kind);
  parallel_for((count + kAtOnce - 1) / kAtOnce, [&](int64_t chunk) {
    for (int64_t i = chunk * kAtOnce; i < std::min(count, (chunk + 1) * kAtOnce); ++i) {
      float values[32];
      layout.read(reinterpret_cast<const uint8_t*>(blocks) + i * layout.bytes, values);
      if (dtype == Dtype::f32) {
        std::memcpy(reinterpret_cast<float*>(out) + i * 32, values, sizeof values);
      } else {
        for (int j = 0; j < 32; ++j) reinterpret_cast<uint16_t*>(out)[i * 32 + j] = nearest_bf16(values[j]);
      }
    }
  });
}

}  // namespace

void bind_quant(nb::module_& m) {
  nb::class_<PackedQuant>(m, "PackedQuant")
      .def("__init__",
           [](PackedQuant* self, const std::string& format, int64_t n, int64_t k, uintptr_t codes, uintptr_t scales,
              uintptr_t minima, uintptr_t group_scales, uintptr_t group_minima) {
             const QuantSource source{reinterpret_cast<const uint8_t*>(codes), reinterpret_cast<const void*>(scales),
                                      reinterpret_cast<const uint16_t*>(minima),
                                      reinterpret_cast<const uint8_t*>(group_scales),
                                      reinterpret_cast<const uint8_t*>(group_minima)};
             new (self) PackedQuant(quant_format(format), n, k, source);
           },
           nb::arg("format"), nb::arg("n"), nb::arg("k"), nb::arg("codes"), nb::arg("scales"), nb::arg("minima") = 0,
           nb::arg("group_scales") = 0, nb::arg("group_minima") = 0)
      .def_prop_ro("format", [](const PackedQuant& self) { return std::string(layout_of(self.format).name); })
      .def_ro("n", &PackedQuant::n)
      .def_ro("k", &PackedQuant::k)
      .def_prop_ro("nbytes", &PackedQuant::bytes);

  m.def("quantize_rows", &quantize_rows, nb::arg("weight"), nb::arg("n"), nb::arg("k"), nb::arg("row_stride"),
        nb::arg("dtype"), nb::arg("bits"), nb::arg("group"), nb::arg("codes"), nb::arg("scales"),
        nb::call_guard<nb::gil_scoped_release>(),
        "Codes and scales of weight [n, k]: float16, of groups of `group` values of a row, or float32, of rows, if it is 0.");
  m.def("dequantize_gguf", &dequantize_gguf, nb::arg("kind"), nb::arg("blocks"), nb::arg("count"), nb::arg("out"),
        nb::arg("dtype"), nb::call_guard<nb::gil_scoped_release>(),
        "The values of `count` blocks of a GGUF type, float32 or bfloat16, of which a block has 32.");
  m.def("linear_quant", &linear_quant, nb::arg("parts"), nb::arg("x"), nb::arg("x_stride"), nb::arg("x_dtype"),
        nb::arg("out"), nb::arg("out_stride"), nb::arg("out_dtype"), nb::arg("add") = 0, nb::arg("add_stride") = 0,
        nb::arg("activation") = Activation::none, nb::arg("bias") = 0, nb::arg("gated") = false,
        "As linear, of quantised matrices with the same input, one matrix's outputs after the other's.");
}

}  // namespace octavo
