// Distribution of loops over rows among threads, and the operations that are such loops.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "ops.hpp"
#include "threads.hpp"

namespace octavo {

// A thread should get at least this much work (in units of about one vectorised addition of a float): waking one and
// waiting for it costs about a microsecond.
constexpr int64_t kWorkOfThread = 8192;

// Calls f(begin, end) for ranges that together are 0 .. rows - 1, on as many threads as the work is worth.
template <typename F>
void for_row_ranges(int64_t rows, int64_t work_of_row, const F& f) {
  const int64_t worth = rows * work_of_row / kWorkOfThread;
  const int64_t ranges = std::min<int64_t>({rows, worth, ThreadPool::instance().size()});
  if (ranges <= 1) {
    if (rows > 0) f(int64_t{0}, rows);
    return;
  }
  parallel_for(ranges, [&](int64_t i) { f(rows * i / ranges, rows * (i + 1) / ranges); });
}

// Computes each token's rows from the same token's rows alone.
class TokenOp : public Op {
 public:
  // `work` is that of a token.
  explicit TokenOp(int64_t work) : work_(work) {}
  virtual void run_tokens(const Step& step, int64_t begin, int64_t end) const = 0;
  int64_t work() const { return work_; }
  void run(const Step& step) override { run_rows(step, 0, step.tokens); }
  bool run_rows(const Step& step, int64_t begin, int64_t end) override {
    for_row_ranges(end - begin, work_, [&](int64_t b, int64_t e) { run_tokens(step, begin + b, begin + e); });
    return true;
  }

 private:
  int64_t work_;
};

// Two of them in one loop over the tokens, so that threads synchronise once.
class TokenOps : public TokenOp {
 public:
  TokenOps(std::shared_ptr<TokenOp> first, std::shared_ptr<TokenOp> second)
      : TokenOp(first->work() + second->work()), first_(std::move(first)), second_(std::move(second)) {}
  void run_tokens(const Step& step, int64_t begin, int64_t end) const override {
    first_->run_tokens(step, begin, end);
    second_->run_tokens(step, begin, end);
  }

 private:
  std::shared_ptr<TokenOp> first_, second_;
};

}  // namespace octavo
