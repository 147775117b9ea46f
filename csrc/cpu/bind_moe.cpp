// Mixtures of experts as operations, and their Python names.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "expert_matrix.hpp"
#include "moe.hpp"
#include "ranges.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

class Route : public TokenOp {
 public:
  explicit Route(const Routing& routing)
      : TokenOp(routing.experts * (8 + routing.top_k / 4)), routing_(routing) {}
  void run_tokens(const Step&, int64_t begin, int64_t end) const override { isa().moe->route(routing_, begin, end); }

 private:
  Routing routing_;
};

// The experts of a layer.
class ExpertGroup {
 public:
  ExpertGroup(std::vector<ExpertMatrixPtr> gate_up, std::vector<ExpertMatrixPtr> down, Activation activation)
      : gate_up(std::move(gate_up)), down(std::move(down)), activation(activation) {
    if (this->gate_up.empty() || this->gate_up.size() != this->down.size())
      throw std::invalid_argument("each expert has a matrix of gate and up, or of up alone, and one of down");
    for (size_t e = 0; e < this->gate_up.size(); ++e) {
      const ExpertMatrix &first = *this->gate_up[e], &second = *this->down[e];
      if (first.gated() != this->gate_up[0]->gated() || second.gated() || first.outputs() != second.inputs() || first.inputs() != inputs() ||
          second.outputs() != outputs())
        throw std::invalid_argument("the matrices of expert " + std::to_string(e) + " do not fit those of the others");
    }
  }
  int64_t inputs() const { return gate_up[0]->inputs(); }
  int64_t outputs() const { return down[0]->outputs(); }
  // Of sums that are joined at the end: the most that a matrix of down has.
  int pieces() const {
    int most = 1;
    for (const auto& matrix : down) most = std::max(most, matrix->pieces());
    return most;
  }

  const std::vector<ExpertMatrixPtr> gate_up, down;
  const Activation activation;
};

// Memory that grows to what was asked for; what was in it is lost. Aligned to 64 bytes.
class Memory {
 public:
  char* take(size_t bytes) {
    if (memory_.size() < bytes + 64) memory_ = std::vector<char>(bytes + 64);
    return memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64) % 64;
  }

 private:
  std::vector<char> memory_;
};

// out[t] = add[t] + the sum over the token's experts, in ascending order, of
// weight * down(activation(gate(x[t])) * up(x[t])), or, with weighs_input, of that of weight * x[t] without the weight.
// Experts without a gate are down(activation(up(x[t]))).
//
// Pairs of a token and an expert are sorted by expert, so that the rows of an expert are multiplied together and its
// weights are read once. The first loop computes gate and up of all pairs; the second owns columns of the results: a
// task walks the experts in ascending order and adds what they give to sums of its own. So a row's sums have an order
// that depends on its experts alone, and there is no result of a pair in memory. The pieces of k of down are summed
// over the experts apart, and joined at the end: so ranks that hold a piece or two of every expert compute parts of the
// same tree.
class Experts : public Op {
 public:
  struct Rows {
    const char* x;
    int64_t x_stride;  // bytes
    Dtype dtype;
    const int32_t* chosen;  // [T, slots]
    const float* weights;
    int64_t slots;
    bool weighs_input;  // the weights are factors of the experts' inputs, not of their results
    float* out;
    int64_t out_stride;
    const float* add;
    int64_t add_stride;
  };

  Experts(std::shared_ptr<const ExpertGroup> group, const Rows& rows)
      : group_(std::move(group)), rows_(rows), pieces_(group_->pieces()) {
    const auto experts = static_cast<int64_t>(group_->gate_up.size());
    at_once_ = std::clamp(kRowsOfExpert * experts / rows.slots, kExpertRows, kMostTokens);
  }

  void run(const Step& step) override {
    for (int64_t first = 0; first < step.tokens; first += at_once_)
      run_tokens(first, std::min(at_once_, step.tokens - first));
  }

 private:
  static constexpr int64_t kRowsOfExpert = 48;  // of a step of many tokens, on average
  static constexpr int64_t kMostTokens = 512;

  // Rows of an expert that are computed together: pairs [first, first + rows).
  struct Block {
    int32_t expert;
    int64_t first, rows;
    char *input, *hidden, *prepared;
  };
  // Units [begin, end) of a block's hidden columns.
  struct Task {
    int64_t block, begin, end;
  };
  struct Scratch {
    std::vector<int32_t> tokens;  // of the pairs, counted from the first token
    std::vector<float> weights, ones;
    std::vector<int64_t> ends;  // of each expert's pairs
    std::vector<Block> blocks;
    std::vector<Task> tasks;
    Memory rows;
  };

  void run_tokens(int64_t first, int64_t tokens) const {
    thread_local Scratch scratch;
    Scratch& s = scratch;  // the caller's, in all threads
    sort(first, tokens, s);
    make_blocks(s);
    const auto blocks = static_cast<int64_t>(s.blocks.size());
    const int64_t rows_of_block = (static_cast<int64_t>(s.tokens.size()) + blocks - 1) / blocks;
    for_row_ranges(blocks, 2 * rows_of_block * group_->inputs(), [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) prepare_input(s, s.blocks[b], first);
    });
    parallel_for(static_cast<int64_t>(s.tasks.size()), [&](int64_t i) { run_hidden(s, i); });
    for_row_ranges(blocks, 2 * rows_of_block * group_->down[0]->inputs(), [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) prepare_hidden(s.blocks[b]);
    });
    const ExpertMatrix& down = *group_->down[0];
    const int64_t strip = down.units_at_once(s.blocks[0].rows);
    parallel_for((down.units() + strip - 1) / strip, [&](int64_t i) {
      run_strip(s, first, tokens, i * strip, std::min(down.units(), (i + 1) * strip));
    });
  }

  // The pairs by expert, and within an expert by token.
  void sort(int64_t first, int64_t tokens, Scratch& s) const {
    const auto experts = static_cast<int32_t>(group_->gate_up.size());
    const int64_t pairs = tokens * rows_.slots;
    const int32_t* chosen = rows_.chosen + first * rows_.slots;
    std::vector<int64_t>& places = s.ends;  // first where an expert's pairs begin
    places.assign(static_cast<size_t>(experts) + 1, 0);
    for (int64_t i = 0; i < pairs; ++i) {
      if (chosen[i] < 0 || chosen[i] >= experts)
        throw std::invalid_argument("there is no expert " + std::to_string(chosen[i]));
      ++places[chosen[i] + 1];
    }
    for (int32_t e = 0; e < experts; ++e) places[e + 1] += places[e];
    s.tokens.resize(static_cast<size_t>(pairs));
    s.weights.resize(static_cast<size_t>(pairs));
    if (rows_.weighs_input) s.ones.assign(static_cast<size_t>(pairs), 1.0f);
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t place = places[chosen[i]]++;
      s.tokens[place] = static_cast<int32_t>(i / rows_.slots);
      s.weights[place] = rows_.weights[first * rows_.slots + i];
    }
  }

  // The expert's rows in blocks of nearly equal size, the tasks of their hidden columns, and memory for their rows.
  void make_blocks(Scratch& s) const {
    s.blocks.clear();
    s.tasks.clear();
    size_t bytes = 0;
    const auto take = [&bytes](size_t size) {
      const size_t at = bytes;
      bytes += (size + 63) / 64 * 64;
      return reinterpret_cast<char*>(at);
    };
    int64_t begin = 0;
    for (size_t e = 0; e < group_->gate_up.size(); begin = s.ends[e++]) {
      const ExpertMatrix &gate_up = *group_->gate_up[e], &down = *group_->down[e];
      const int64_t rows = s.ends[e] - begin, parts = (rows + kExpertRows - 1) / kExpertRows;
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t from = rows * part / parts, count = rows * (part + 1) / parts - from;
        const int64_t at_once = gate_up.units_at_once(count);
        for (int64_t unit = 0; unit < gate_up.units(); unit += at_once)
          s.tasks.push_back({static_cast<int64_t>(s.blocks.size()), unit, std::min(gate_up.units(), unit + at_once)});
        s.blocks.push_back({static_cast<int32_t>(e), begin + from, count, take(gate_up.bytes_of_rows(count)),
                            take(static_cast<size_t>(count * hidden_stride(down))), take(down.bytes_of_rows(count))});
      }
    }
    char* memory = s.rows.take(bytes);
    for (Block& block : s.blocks)
      for (char** part : {&block.input, &block.hidden, &block.prepared})
        *part = memory + reinterpret_cast<uintptr_t>(*part);
  }

  int64_t bytes_of_value() const { return rows_.dtype == Dtype::bf16 ? 2 : 4; }
  int64_t hidden_stride(const ExpertMatrix& down) const { return down.inputs() * bytes_of_value(); }

  void prepare_input(const Scratch& s, const Block& block, int64_t first) const {
    thread_local Memory scaled_row;
    const ExpertMatrix& gate_up = *group_->gate_up[block.expert];
    char* scaled = rows_.weighs_input ? scaled_row.take(gate_up.inputs() * bytes_of_value()) : nullptr;
    for (int64_t r = 0; r < block.rows; ++r) {
      const char* x = rows_.x + (first + s.tokens[block.first + r]) * rows_.x_stride;
      if (scaled) {
        isa().moe->scale_row(x, rows_.dtype, s.weights[block.first + r], gate_up.inputs(), scaled);
        x = scaled;
      }
      gate_up.prepare(x, rows_.dtype, block.input, block.rows, r);
    }
  }

  void run_hidden(const Scratch& s, int64_t i) const {
    const Task& task = s.tasks[i];
    const Block& block = s.blocks[task.block];
    const ExpertMatrix& gate_up = *group_->gate_up[block.expert];
    const void* next = nullptr;
    if (static_cast<size_t>(i + 1) < s.tasks.size()) {
      const Task& after = s.tasks[i + 1];
      next = group_->gate_up[s.blocks[after.block].expert]->unit(after.begin);
    }
    const ExpertOutput out{block.hidden + task.begin * gate_up.unit_columns() * bytes_of_value(), gate_up.outputs(),
                           rows_.dtype, 0, group_->activation};
    gate_up.multiply(block.input, block.rows, task.begin, task.end, out, next);
  }

  void prepare_hidden(const Block& block) const {
    const ExpertMatrix& down = *group_->down[block.expert];
    for (int64_t r = 0; r < block.rows; ++r)
      down.prepare(block.hidden + r * hidden_stride(down), rows_.dtype, block.prepared, block.rows, r);
  }

  // The results' columns of units [begin, end), for all tokens.
  void run_strip(const Scratch& s, int64_t first, int64_t tokens, int64_t begin, int64_t end) const {
    thread_local Memory memory_of_sums, memory_of_products;
    const int64_t first_column = begin * group_->down[0]->unit_columns();
    const int64_t width = (end - begin) * group_->down[0]->unit_columns();
    const int64_t columns = std::min(width, group_->outputs() - first_column);
    const int pieces = pieces_;
    const auto floats = static_cast<size_t>(pieces * width);
    auto* sums = reinterpret_cast<float*>(memory_of_sums.take(4 * floats * tokens));
    auto* products = reinterpret_cast<float*>(memory_of_products.take(4 * floats * kExpertRows));
    std::fill_n(sums, floats * tokens, 0.0f);
    const float* factors = rows_.weighs_input ? s.ones.data() : s.weights.data();
    for (size_t b = 0; b < s.blocks.size(); ++b) {
      const Block& block = s.blocks[b];
      const void* next = b + 1 < s.blocks.size() ? group_->down[s.blocks[b + 1].expert]->unit(begin) : nullptr;
      const int64_t apart = block.rows * width;
      const ExpertMatrix& down = *group_->down[block.expert];
      down.multiply(block.prepared, block.rows, begin, end, {products, width, Dtype::f32, apart}, next);
      for (int piece = 0; piece < down.pieces(); ++piece)
        isa().moe->add_scaled(products + piece * apart, width, factors + block.first,
                              s.tokens.data() + block.first, block.rows, columns, sums + piece * tokens * width, width);
    }
    const float* add = rows_.add == nullptr ? nullptr : rows_.add + first * rows_.add_stride + first_column;
    isa().moe->join(sums, width, pieces, tokens * width, add, rows_.add_stride,
                    rows_.out + first * rows_.out_stride + first_column, rows_.out_stride, tokens, columns);
  }

  std::shared_ptr<const ExpertGroup> group_;
  Rows rows_;
  int pieces_;
  int64_t at_once_;
};

OpPtr route(uintptr_t logits, int64_t logits_stride, uintptr_t bias, uintptr_t chosen, uintptr_t weights,
            int64_t experts, int64_t shared, int64_t top_k, int64_t groups, int64_t top_groups, int64_t best_of_group,
            Scoring scoring, bool renormalize, double least_sum, double scale, double jitter, uintptr_t factors) {
  const bool fits = groups >= 1 && top_groups >= 1 && top_groups <= groups && experts % groups == 0 &&
                    best_of_group >= 1 && best_of_group <= experts / groups && top_k >= 1 &&
                    top_k <= experts / groups * top_groups;
  if (!fits) throw std::invalid_argument("so many experts cannot be chosen of these groups");
  return std::make_shared<Route>(Routing{pointer<const float>(logits), logits_stride, pointer<const float>(bias),
                                         pointer<const float>(factors), pointer<int32_t>(chosen), pointer<float>(weights), experts, shared, top_k,
                                         groups, top_groups, best_of_group, scoring, renormalize,
                                         static_cast<float>(least_sum), static_cast<float>(scale),
                                         static_cast<float>(jitter)});
}

// x[t] += the sum over the token's experts of weight * their row of the table, in the order of the slots.
class AddExpertBias : public TokenOp {
 public:
  AddExpertBias(const ExpertBias& bias) : TokenOp(bias.columns * bias.slots), bias_(bias) {}
  void run_tokens(const Step&, int64_t begin, int64_t end) const override { isa().moe->add_bias(bias_, begin, end); }

 private:
  ExpertBias bias_;
};

OpPtr add_expert_bias(uintptr_t x, int64_t x_stride, uintptr_t chosen, uintptr_t weights, int64_t slots, uintptr_t table,
                      int64_t columns) {
  return std::make_shared<AddExpertBias>(ExpertBias{pointer<float>(x), x_stride, pointer<const int32_t>(chosen),
                                                    pointer<const float>(weights), slots, pointer<const float>(table),
                                                    columns});
}

OpPtr experts(std::shared_ptr<const ExpertGroup> group, uintptr_t x, int64_t x_stride, Dtype dtype, uintptr_t chosen,
              uintptr_t weights, int64_t slots, uintptr_t out, int64_t out_stride, uintptr_t add, int64_t add_stride,
              bool weighs_input) {
  if (dtype == Dtype::i8) throw std::invalid_argument("the input of experts is float32 or bfloat16");
  if (slots < 1) throw std::invalid_argument("a token needs an expert");
  const Experts::Rows rows{pointer<const char>(x),
                           x_stride * (dtype == Dtype::bf16 ? 2 : 4),
                           dtype,
                           pointer<const int32_t>(chosen),
                           pointer<const float>(weights),
                           slots,
                           weighs_input,
                           pointer<float>(out),
                           out_stride,
                           pointer<const float>(add),
                           add_stride};
  return std::make_shared<Experts>(std::move(group), rows);
}

}  // namespace

void bind_moe(nb::module_& m) {
  nb::enum_<Scoring>(m, "Scoring")
      .value("softmax", Scoring::softmax)
      .value("sigmoid", Scoring::sigmoid)
      .value("sparsemixer", Scoring::sparsemixer);
  nb::class_<ExpertMatrix>(m, "ExpertMatrix");
  nb::class_<ExpertGroup>(m, "ExpertGroup")
      .def(nb::init<std::vector<ExpertMatrixPtr>, std::vector<ExpertMatrixPtr>, Activation>(), "gate_up"_a, "down"_a,
           "activation"_a = Activation::silu);
  m.def("dense_expert", &dense_expert, "weights"_a);
  m.def(
      "quantized_expert",
      [](std::vector<std::shared_ptr<PackedQuant>> parts, uintptr_t bias) {
        return quantized_expert(std::move(parts), pointer<const float>(bias));
      },
      "parts"_a, "bias"_a = 0);
  m.def("route", &route, "logits"_a, "logits_stride"_a, "bias"_a, "chosen"_a, "weights"_a, "experts"_a, "shared"_a,
        "top_k"_a, "groups"_a, "top_groups"_a, "best_of_group"_a, "scoring"_a, "renormalize"_a, "least_sum"_a,
        "scale"_a, "jitter"_a, "factors"_a = 0,
        "The experts of each token of the step and their weights, from its logits.");
  m.def("add_expert_bias", &add_expert_bias, "x"_a, "x_stride"_a, "chosen"_a, "weights"_a, "slots"_a, "table"_a,
        "columns"_a, "x[t] += the sum over the experts of each token t of weight * table[expert].");
  m.def("experts", &experts, "group"_a, "x"_a, "x_stride"_a, "dtype"_a, "chosen"_a, "weights"_a, "slots"_a, "out"_a,
        "out_stride"_a, "add"_a = 0, "add_stride"_a = 0, "weighs_input"_a = false,
        "out[t] = add[t] + the weighted sum of what the experts of each token t make of x[t].");
}

}  // namespace octavo
