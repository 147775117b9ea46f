// How loops over rows are shared out among the threads.
#pragma once
#include <algorithm>
#include <cstdint>

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

}  // namespace octavo
