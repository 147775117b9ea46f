// The tape: operations recorded once and run for each step; and the operations that call the host or select rows.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "communicator.hpp"
#include "denormals.hpp"
#include "ops.hpp"
#include "ranges.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

namespace {

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_).count(); }

 private:
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
};

// Consecutive row-wise operations over the same rows are merged into one loop: memory is reused only by buffers of equal
// size (see octavo/kernels/cpu/tape.py), so rows of different tokens do not overlap.
class Tape {
 public:
  void append(OpPtr op, Rows rows) {
    const auto tokens = std::dynamic_pointer_cast<TokenOp>(op);
    const bool joins = tokens && !entries_.empty() && entries_.back().rows == rows;
    const auto before = joins ? std::dynamic_pointer_cast<TokenOp>(entries_.back().op) : nullptr;
    if (before)
      entries_.back().op = std::make_shared<TokenOps>(before, tokens);
    else
      entries_.push_back({std::move(op), rows});
  }
  size_t size() const { return entries_.size(); }
  // `sampled`: what operations over the sampled rows see, if these are sequences of their own.
  void run(const Step& step, const Step* sampled) const {
    nb::gil_scoped_release release;
    const auto mode = DenormalMode::flushed();
    ThreadPool::Busy busy;
    const Step steps[] = {step, sampled == nullptr ? step.over(Rows::sampled) : *sampled, step.over(Rows::encoder)};
    // With few rows the memory has nothing to do between products, so threads that wait fetch the next one's weights.
    const bool few = step.tokens <= kFewRows && ThreadPool::instance().size() > 1;
    if (!few) fetch_for(entries_.end(), steps);
    auto fetched = entries_.begin();
    for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
      if (few && fetched <= entry) fetched = fetch_for(entry + 1, steps);
      entry->op->run(steps[static_cast<int>(entry->rows)]);
    }
  }
  // Runs a part of about so many seconds: from operation number `op` on, of which the rows before `row` are computed.
  // The same of the next part. Between the parts of a step no other step of this tape may run.
  std::pair<size_t, int64_t> run_for(const Step& step, size_t op, int64_t row, double seconds) const {
    nb::gil_scoped_release release;
    const Stopwatch part;
    const auto mode = DenormalMode::flushed();
    ThreadPool::Busy busy;
    const Step steps[] = {step, step.over(Rows::sampled), step.over(Rows::encoder)};
    fetch_for(entries_.end(), steps);
    for (; op < entries_.size(); ++op, row = 0) {
      row = run_rows(entries_[op], steps[static_cast<int>(entries_[op].rows)], row, part, seconds);
      if (row > 0) return {op, row};
      if (part.seconds() >= seconds) return {op + 1, 0};
    }
    return {op, 0};
  }

 private:
  struct Entry {
    OpPtr op;
    Rows rows;
  };
  using Iterator = std::vector<Entry>::const_iterator;

  static constexpr int64_t kFewRows = 16;
  // Rows of an operation that are computed before the clock is read, at first.
  static constexpr int64_t kRowsOfPart = 72;

  // Rows from `row` on, while there is time: where to go on, or 0 if all are computed. What cannot be divided is run whole.
  static int64_t run_rows(const Entry& entry, const Step& step, int64_t row, const Stopwatch& part, double seconds) {
    if (step.tokens <= kRowsOfPart) {
      entry.op->run(step);
      return 0;
    }
    int64_t rows = kRowsOfPart;
    while (row < step.tokens) {
      const Stopwatch own;
      const int64_t end = std::min(row + rows, step.tokens);
      if (!entry.op->run_rows(step, row, end)) {
        entry.op->run(step);
        return 0;
      }
      const double left = seconds - part.seconds();
      if (left <= 0) return end < step.tokens ? end : 0;
      // As many as half the time that is left is enough for, by the last ones.
      const double fitting = static_cast<double>(end - row) * left / (2 * std::max(own.seconds(), 1e-6));
      rows = fitting > static_cast<double>(step.tokens) ? step.tokens : std::max(kRowsOfPart, static_cast<int64_t>(fitting));
      row = end;
    }
    return 0;
  }

  // Lets threads that wait fetch the weights of the first operation that has any, from this one on; returns it.
  Iterator fetch_for(Iterator entry, const Step* steps) const {
    ThreadPool& pool = ThreadPool::instance();
    const int threads = pool.size();
    const auto weights = [&](int thread) {
      const Step& step = steps[static_cast<int>(entry->rows)];
      return step.tokens > 0 ? entry->op->first_weights(step, thread, threads) : Bytes{};
    };
    while (entry != entries_.end() && weights(0).count == 0) ++entry;
    for (int thread = 0; thread < threads; ++thread) {
      const Bytes first = entry == entries_.end() ? Bytes{} : weights(thread);
      pool.fetch_when_idle(thread, first.data, first.count);
    }
    return entry;
  }

  std::vector<Entry> entries_;
};

// Calls a Python function with the number of rows. An exception ends the run of the tape.
class HostCall : public Op {
 public:
  HostCall(nb::object function, bool takes_ids) : function_(std::move(function)), takes_ids_(takes_ids) {}
  ~HostCall() override {
    nb::gil_scoped_acquire acquire;
    function_.reset();
  }
  void run(const Step& step) override {
    nb::gil_scoped_acquire acquire;
    const auto mode = DenormalMode::kept();
    if (takes_ids_)
      function_(step.tokens, reinterpret_cast<uintptr_t>(step.token_ids));
    else
      function_(step.tokens);
  }

 private:
  nb::object function_;
  bool takes_ids_;
};

// out[i] = x[sampled_rows[i]], rows of so many bytes. Not a TokenOp, as it reads other rows than it writes.
class TakeSampled : public Op {
 public:
  TakeSampled(const char* x, int64_t stride, char* out, int64_t bytes)
      : x_(x), stride_(stride), out_(out), bytes_(bytes) {}
  void run(const Step& step) override {
    for (int64_t i = 0; i < step.tokens; ++i)
      std::memcpy(out_ + i * bytes_, x_ + step.sampled_rows[i] * stride_, bytes_);
  }

 private:
  const char* x_;
  int64_t stride_;
  char* out_;
  int64_t bytes_;
};

// out[i] = the mean of the rows of x from sampled_rows[i] on, float32 [count, width], added in order.
class MeanSampled : public Op {
 public:
  MeanSampled(const float* x, int64_t stride, float* out, int64_t width, int64_t count)
      : x_(x), stride_(stride), out_(out), width_(width), count_(count) {}
  void run(const Step& step) override {
    const float share = 1.0f / static_cast<float>(count_);
    parallel_for(step.tokens, [&](int64_t i) {
      const float* rows = x_ + step.sampled_rows[i] * stride_;
      float* out = out_ + i * width_;
      std::memcpy(out, rows, sizeof(float) * static_cast<size_t>(width_));
      for (int64_t row = 1; row < count_; ++row)
        for (int64_t j = 0; j < width_; ++j) out[j] += rows[row * stride_ + j];
      for (int64_t j = 0; j < width_; ++j) out[j] *= share;
    });
  }

 private:
  const float* x_;
  int64_t stride_;
  float* out_;
  int64_t width_, count_;
};

class AllReduce : public Op {
 public:
  AllReduce(std::shared_ptr<Communicator> group, float* x, int64_t width, const float* bias, const float* add,
            int64_t add_stride)
      : group_(std::move(group)), x_(x), width_(width), bias_(bias), add_(add), add_stride_(add_stride) {}
  void run(const Step& step) override { group_->all_reduce(x_, step.tokens, width_, bias_, add_, add_stride_); }

 private:
  std::shared_ptr<Communicator> group_;
  float* x_;
  int64_t width_;
  const float* bias_;
  const float* add_;
  int64_t add_stride_;
};

class AllGather : public Op {
 public:
  AllGather(std::shared_ptr<Communicator> group, const float* x, float* out, int64_t width)
      : group_(std::move(group)), x_(x), out_(out), width_(width) {}
  void run(const Step& step) override { group_->all_gather(x_, out_, step.tokens, width_); }

 private:
  std::shared_ptr<Communicator> group_;
  const float* x_;
  float* out_;
  int64_t width_;
};

}  // namespace

void bind_tape(nb::module_& m) {
  nb::enum_<Rows>(m, "Rows")
      .value("tokens", Rows::tokens)
      .value("sampled", Rows::sampled)
      .value("encoder", Rows::encoder);
  nb::class_<Tape>(m, "Tape")
      .def(nb::init<>())
      .def("append", &Tape::append, "op"_a, "rows"_a = Rows::tokens)
      .def("run", &Tape::run, "step"_a, "sampled"_a.none() = nb::none())
      .def("run_for", &Tape::run_for, "step"_a, "op"_a, "row"_a, "seconds"_a)
      .def("__len__", &Tape::size);
  nb::class_<Communicator>(m, "Communicator")
      .def("__init__",
           [](Communicator* c, uintptr_t memory, int64_t bytes, int rank, int size, double timeout) {
             new (c) Communicator(pointer<void>(memory), bytes, rank, size, timeout);
           },
           "memory"_a, "bytes"_a, "rank"_a, "size"_a, "timeout"_a)
      .def_static("bytes_for", &Communicator::bytes_for, "size"_a, "slot_floats"_a);
  m.def("host_call",
        [](nb::object function, bool takes_ids) -> OpPtr {
          return std::make_shared<HostCall>(std::move(function), takes_ids);
        },
        "function"_a, "takes_ids"_a = false);
  m.def("take_sampled",
        [](uintptr_t x, int64_t stride, uintptr_t out, int64_t bytes) -> OpPtr {
          return std::make_shared<TakeSampled>(pointer<char>(x), stride, pointer<char>(out), bytes);
        },
        "x"_a, "stride"_a, "out"_a, "bytes"_a);
  m.def("mean_sampled",
        [](uintptr_t x, int64_t stride, uintptr_t out, int64_t width, int64_t count) -> OpPtr {
          return std::make_shared<MeanSampled>(pointer<float>(x), stride, pointer<float>(out), width, count);
        },
        "x"_a, "stride"_a, "out"_a, "width"_a, "count"_a);
  m.def("all_reduce",
        [](std::shared_ptr<Communicator> group, uintptr_t x, int64_t width, uintptr_t bias, uintptr_t add,
           int64_t add_stride) -> OpPtr {
          return std::make_shared<AllReduce>(std::move(group), pointer<float>(x), width, pointer<float>(bias),
                                             pointer<float>(add), add_stride);
        },
        "group"_a, "x"_a, "width"_a, "bias"_a = 0, "add"_a = 0, "add_stride"_a = 0);
  m.def("all_gather",
        [](std::shared_ptr<Communicator> group, uintptr_t x, uintptr_t out, int64_t width) -> OpPtr {
          return std::make_shared<AllGather>(std::move(group), pointer<float>(x), pointer<float>(out), width);
        },
        "group"_a, "x"_a, "out"_a, "width"_a);
}

}  // namespace octavo
