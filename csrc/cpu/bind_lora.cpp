// Low-rank products of adapters as operations, and their Python names.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "gemm.hpp"
#include "lora_adapter.hpp"
#include "ranges.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

// x + -0.0 has the bits of x for every x: so rows without an adapter keep those of the product.
constexpr float kNothing = -0.0f;

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::bf16 ? 2 : 4; }
int64_t padded(int64_t floats) { return (floats + 15) / 16 * 16; }

// Memory that grows to what was asked for; what was in it is lost. Aligned to 64 bytes.
class Memory {
 public:
  float* take(int64_t floats) {
    if (static_cast<int64_t>(memory_.size()) < floats + 16) memory_ = std::vector<float>(static_cast<size_t>(floats) + 16);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory_.data()) + 63) / 64 * 64);
  }

 private:
  std::vector<float> memory_;
};

int64_t slot_of(const Step& step, int64_t row) {
  return step.adapters[step.adapter_rows == nullptr ? row : step.adapter_rows[row]];
}

// out[row] = add[row] + up(down(x[row])) of the row's adapter, for each row that has one; of the others, without `add`,
// out[row] = -0.0.
//
// Rows are sorted by adapter, and a task has some of an adapter's rows: it computes what `down` makes of them, and then
// all columns, or, where there are fewer such tasks than threads, a share of them: then several tasks compute the same
// of `down`, at the same time. A row's sums do not depend on the others in its task.
class LowRankProducts : public Op {
 public:
  using Slots = std::shared_ptr<const LowRankSlots<LowRankAdapter>>;
  struct Buffers {
    const char* x;
    int64_t x_stride;
    Dtype x_dtype;
    const float* add;
    int64_t add_stride;
    float* out;
    int64_t out_stride;
  };

  LowRankProducts(Slots slots, int64_t inputs, std::vector<int64_t> outputs, Dtype dtype, const Buffers& buffers)
      : slots_(std::move(slots)), inputs_(inputs), outputs_(std::move(outputs)), dtype_(dtype), b_(buffers) {
    for (const int64_t part : outputs_) groups_ += (part + kGroup - 1) / kGroup;
    columns_ = std::accumulate(outputs_.begin(), outputs_.end(), int64_t{0});
  }

  void run(const Step& step) override {
    if (step.adapters == nullptr || step.tokens == 0) return;
    thread_local Plan mine;
    Plan& plan = mine;  // the caller's, in all threads
    sort(step, plan);
    make_tasks(plan);
    parallel_for(static_cast<int64_t>(plan.tasks.size()), [&](int64_t i) { run_task(plan, static_cast<size_t>(i)); });
  }

 private:
  static constexpr int64_t kMostRows = 24, kLeastRows = 4;  // of a task
  static constexpr int64_t kTasksOfThread = 4;

  // Rows places[begin .. end) of one adapter, or of none if it is null; groups of columns of all parts.
  struct Task {
    const LowRankAdapter* adapter;
    int64_t begin, end, first_group, last_group;
  };
  struct Plan {
    std::vector<int32_t> places;  // the rows by slot, those without an adapter first
    std::vector<int32_t> ends;    // of each slot's rows; the first are those without an adapter
    std::vector<Task> tasks;
  };

  void sort(const Step& step, Plan& plan) const {
    const auto bucket = [&](int64_t row) {
      const int64_t slot = slot_of(step, row);
      return slots_->at(slot) == nullptr ? 0 : slot + 1;
    };
    plan.places.resize(static_cast<size_t>(step.tokens));
    plan.ends.assign(static_cast<size_t>(slots_->size()) + 2, 0);
    for (int64_t row = 0; row < step.tokens; ++row) ++plan.ends[bucket(row) + 1];
    for (size_t i = 1; i < plan.ends.size(); ++i) plan.ends[i] += plan.ends[i - 1];
    for (int64_t row = 0; row < step.tokens; ++row) plan.places[plan.ends[bucket(row)]++] = static_cast<int32_t>(row);
    plan.ends.pop_back();
  }

  void make_tasks(Plan& plan) const {
    const int64_t threads = ThreadPool::instance().size(), rows = static_cast<int64_t>(plan.places.size());
    const int64_t most = std::clamp((rows + kTasksOfThread * threads - 1) / (kTasksOfThread * threads), kLeastRows, kMostRows);
    plan.tasks.clear();
    int64_t begin = plan.ends[0], blocks = 0;
    for (size_t slot = 1; slot < plan.ends.size(); begin = plan.ends[slot++]) blocks += (plan.ends[slot] - begin + most - 1) / most;
    const int64_t shares = blocks == 0 ? 1 : std::min(groups_, (threads + blocks - 1) / blocks);
    const auto add_rows = [&](const LowRankAdapter* adapter, int64_t first, int64_t last, int64_t shares) {
      const int64_t parts = (last - first + most - 1) / most;
      for (int64_t part = 0; part < parts; ++part)
        for (int64_t share = 0; share < shares; ++share)
          plan.tasks.push_back({adapter, first + (last - first) * part / parts, first + (last - first) * (part + 1) / parts,
                                groups_ * share / shares, groups_ * (share + 1) / shares});
    };
    begin = plan.ends[0];
    for (size_t slot = 1; slot < plan.ends.size(); begin = plan.ends[slot++])
      add_rows(slots_->at(static_cast<int64_t>(slot) - 1), begin, plan.ends[slot], shares);
    if (b_.add == nullptr) add_rows(nullptr, 0, plan.ends[0], 1);
  }

  // What the next task, most likely this thread's, begins to read.
  static void fetch_next(const Plan& plan, size_t i) {
    const LowRankAdapter* next = i + 1 < plan.tasks.size() ? plan.tasks[i + 1].adapter : nullptr;
    if (next == nullptr || next == plan.tasks[i].adapter) return;
    for (int64_t at = 0; at < std::min(kLowRankAhead, next->nbytes()); at += kLowRankLine) __builtin_prefetch(next->data() + at, 0, 2);
  }

  void run_task(const Plan& plan, size_t index) const {
    const Task& task = plan.tasks[index];
    const int32_t* places = plan.places.data() + task.begin;
    const int64_t rows = task.end - task.begin;
    if (task.adapter == nullptr) return fill(places, rows, 0, columns_);
    thread_local Memory memory_of_x, memory_of_sums;
    fetch_next(plan, index);
    const float* x = nullptr;
    const int64_t x_stride = padded(inputs_) + 16;  // rows must not share lines of the cache
    int64_t column = 0, first_group = 0;
    for (size_t i = 0; i < outputs_.size(); column += outputs_[i], first_group += (outputs_[i] + kGroup - 1) / kGroup, ++i) {
      const int64_t begin = std::max<int64_t>(0, task.first_group - first_group);
      const int64_t end = std::min((outputs_[i] + kGroup - 1) / kGroup, task.last_group - first_group);
      if (begin >= end) continue;
      const LowRankView& part = task.adapter->part(i);
      if (part.rank == 0) {
        if (b_.add == nullptr) fill(places, rows, column + begin * kGroup, std::min(outputs_[i], end * kGroup) + column);
        continue;
      }
      if (x == nullptr) x = take_rows(part, places, rows, memory_of_x.take(rows * x_stride), x_stride);
      multiply(part, x, x_stride, places, rows, begin, end, column, memory_of_sums);
    }
  }

  void multiply(const LowRankView& part, const float* x, int64_t x_stride, const int32_t* places, int64_t rows,
                int64_t begin, int64_t end, int64_t column, Memory& memory) const {
    const int64_t stride = padded(part.padded_rank);
    float* sums = memory.take(2 * rows * stride);
    float* ready = sums + rows * stride;
    isa().lora->shrink(part, x, x_stride, rows, sums, stride);
    isa().gemm->prepare(sums, Dtype::f32, stride, part.rank, dtype_, ready, part.padded_rank, stride, rows);
    isa().lora->expand(part, ready, stride, places, rows, begin, end, b_.add == nullptr ? nullptr : b_.add + column,
                       b_.add_stride, b_.out + column, b_.out_stride);
  }

  const float* take_rows(const LowRankView& part, const int32_t* places, int64_t rows, float* out, int64_t stride) const {
    for (int64_t r = 0; r < rows; ++r)
      isa().gemm->prepare(b_.x + places[r] * b_.x_stride * bytes_of(b_.x_dtype), b_.x_dtype, 0, inputs_, dtype_,
                          out + r * stride, part.padded_inputs(), stride, 1);
    return out;
  }

  void fill(const int32_t* places, int64_t rows, int64_t begin, int64_t end) const {
    for (int64_t r = 0; r < rows; ++r) std::fill(b_.out + places[r] * b_.out_stride + begin, b_.out + places[r] * b_.out_stride + end, kNothing);
  }

  Slots slots_;
  int64_t inputs_;
  std::vector<int64_t> outputs_;
  Dtype dtype_;
  Buffers b_;
  int64_t groups_ = 0, columns_;
};

// out[token] += up(column id - first of down) of the token's adapter.
class LowRankLookup : public TokenOp {
 public:
  using Slots = std::shared_ptr<const LowRankSlots<LowRankTable>>;
  LowRankLookup(Slots slots, int64_t width, int64_t first, float* out)
      : TokenOp(4 * width), slots_(std::move(slots)), width_(width), first_(first), out_(out) {}

  void run_tokens(const Step& step, int64_t begin, int64_t end) const override {
    if (step.adapters == nullptr) return;
    thread_local Memory memory;
    for (int64_t token = begin; token < end; ++token) {
      const LowRankTable* table = slots_->at(slot_of(step, token));
      const int64_t row = step.token_ids[token] - first_;
      if (table == nullptr || row < 0 || row >= table->rows) continue;
      const LowRankView& part = table->up.part(0);
      const auto place = static_cast<int32_t>(token);
      float* x = memory.take(padded(part.padded_rank));
      isa().gemm->prepare(table->down.data() + row * part.rank * part.bytes_of_value(), part.dtype, 0, part.rank,
                          part.dtype, x, part.padded_rank, 0, 1);
      isa().lora->expand(part, x, 0, &place, 1, 0, part.groups, out_, width_, out_, width_);
    }
  }

 private:
  Slots slots_;
  int64_t width_, first_;
  float* out_;
};

// One operation in steps with adapters, another in those without.
class IfAdapters : public Op {
 public:
  IfAdapters(OpPtr with, OpPtr without) : with_(std::move(with)), without_(std::move(without)) {}
  void run(const Step& step) override { (step.adapters == nullptr ? without_ : with_)->run(step); }

 private:
  OpPtr with_, without_;
};

OpPtr low_rank(LowRankProducts::Slots slots, int64_t inputs, std::vector<int64_t> outputs, Dtype dtype, uintptr_t x,
               int64_t x_stride, Dtype x_dtype, uintptr_t add, int64_t add_stride, uintptr_t out, int64_t out_stride) {
  const int64_t columns = std::accumulate(outputs.begin(), outputs.end(), int64_t{0});
  if (x_dtype == Dtype::i8 || dtype == Dtype::i8) throw std::invalid_argument("rows are float32 or bfloat16");
  if (x_stride < inputs || out_stride < columns || (add != 0 && add_stride < columns))
    throw std::invalid_argument("a stride is less than the columns of a row");
  const LowRankProducts::Buffers buffers{pointer<const char>(x), x_stride,           x_dtype,   pointer<const float>(add),
                                         add_stride,             pointer<float>(out), out_stride};
  return std::make_shared<LowRankProducts>(std::move(slots), inputs, std::move(outputs), dtype, buffers);
}

std::shared_ptr<LowRankAdapter> low_rank_adapter(const std::vector<uintptr_t>& down, const std::vector<uintptr_t>& up,
                                                 const std::vector<int64_t>& ranks, const std::vector<int64_t>& outputs,
                                                 int64_t inputs, Dtype dtype) {
  if (down.size() != ranks.size() || up.size() != ranks.size() || outputs.size() != ranks.size())
    throw std::invalid_argument("each part has two matrices, a rank and outputs");
  std::vector<LowRankAdapter::Source> parts;
  for (size_t i = 0; i < ranks.size(); ++i)
    parts.push_back({pointer<const void>(down[i]), pointer<const void>(up[i]), ranks[i], outputs[i]});
  nb::gil_scoped_release release;
  return std::make_shared<LowRankAdapter>(parts, inputs, dtype);
}

std::shared_ptr<LowRankTable> low_rank_table(uintptr_t down, uintptr_t up, int64_t rank, int64_t rows, int64_t outputs,
                                             Dtype dtype) {
  nb::gil_scoped_release release;
  const char* data = pointer<const char>(down);
  return std::make_shared<LowRankTable>(
      LowRankTable{std::vector<char>(data, data + rows * rank * bytes_of(dtype)), rows,
                   LowRankAdapter({{nullptr, pointer<const void>(up), rank, outputs}}, 0, dtype)});
}

}  // namespace

void bind_lora(nb::module_& m) {
  nb::class_<LowRankAdapter>(m, "LowRankAdapter").def_prop_ro("nbytes", &LowRankAdapter::nbytes);
  nb::class_<LowRankTable>(m, "LowRankTable").def_prop_ro("nbytes", [](const LowRankTable& table) {
    return static_cast<int64_t>(table.down.size()) + table.up.nbytes();
  });
  nb::class_<LowRankSlots<LowRankAdapter>>(m, "LowRankSlots")
      .def(nb::init<int64_t>(), "slots"_a)
      .def("place",
           [](LowRankSlots<LowRankAdapter>& slots, int64_t slot, std::shared_ptr<LowRankAdapter> adapter) {
             slots.place(slot, std::move(adapter));
           },
           "slot"_a, "adapter"_a.none());
  nb::class_<LowRankSlots<LowRankTable>>(m, "LowRankTableSlots")
      .def(nb::init<int64_t>(), "slots"_a)
      .def("place",
           [](LowRankSlots<LowRankTable>& slots, int64_t slot, std::shared_ptr<LowRankTable> table) {
             slots.place(slot, std::move(table));
           },
           "slot"_a, "table"_a.none());
  m.def("low_rank_adapter", &low_rank_adapter, "down"_a, "up"_a, "ranks"_a, "outputs"_a, "inputs"_a, "dtype"_a,
        "Packed copies of down [rank, inputs] and up [outputs, rank] of each part, contiguous, given by address; of rank "
        "0 where the adapter has no such part.");
  m.def("low_rank_table", &low_rank_table, "down"_a, "up"_a, "rank"_a, "rows"_a, "outputs"_a, "dtype"_a,
        "The same of an embedding: down, transposed, is [rows, rank].");
  m.def("low_rank", &low_rank, "slots"_a, "inputs"_a, "outputs"_a, "dtype"_a, "x"_a, "x_stride"_a, "x_dtype"_a, "add"_a,
        "add_stride"_a, "out"_a, "out_stride"_a,
        "out[r] = add[r] + up(down(x[r])) of the adapter of each row r of the step; of rows without one add[r] or -0.0.");
  m.def("low_rank_lookup",
        [](LowRankLookup::Slots slots, int64_t width, int64_t first, uintptr_t out) -> OpPtr {
          return std::make_shared<LowRankLookup>(std::move(slots), width, first, pointer<float>(out));
        },
        "slots"_a, "width"_a, "first"_a, "out"_a, "out[t] += up(down[id - first]) of the adapter of each token t.");
  m.def("if_adapters",
        [](OpPtr with, OpPtr without) -> OpPtr { return std::make_shared<IfAdapters>(std::move(with), std::move(without)); },
        "with_adapters"_a, "without"_a, "The one in steps with adapters, the other in those without.");
}

}  // namespace octavo
