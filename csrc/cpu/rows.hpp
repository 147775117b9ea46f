// Loops over the vectors of a row, for the pointwise kernel files.
#pragma once
#include "ops.hpp"
#include "vec.hpp"

namespace octavo::OCTAVO_ISA {

// Which lanes of a vector belong to the row: all, or the first few. A tail is computed by the same vector instructions
// as the body, on lanes filled with zeros, so that an element's result does not depend on where in the row it is.
struct Full {};
struct Tail {
  int lanes;
};

template <typename T>
OCTAVO_INLINE F32 load(const T* p, Full) {
  return load(p);
}
template <typename T>
OCTAVO_INLINE F32 load(const T* p, Tail tail) {
  return load(p, tail.lanes);
}
template <typename T>
OCTAVO_INLINE void store(T* p, F32 x, Full) {
  store(p, x);
}
template <typename T>
OCTAVO_INLINE void store(T* p, F32 x, Tail tail) {
  store(p, x, tail.lanes);
}

// x with zeros in lanes outside the row.
OCTAVO_INLINE F32 keep(F32 x, Full) { return x; }
OCTAVO_INLINE F32 keep(F32 x, Tail tail) {
  float lanes[kLanes];
  store(lanes, x);
  return load(lanes, tail.lanes);
}

// Calls f(offset, lanes) for each vector of a row.
template <typename F>
OCTAVO_INLINE void for_vectors(int64_t width, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) f(i, Full{});
  if (i < width) f(i, Tail{static_cast<int>(width - i)});
}

// The sum of term(offset, lanes) over a row, in an order that depends on its width alone. Four independent sums hide the
// latency of additions.
template <typename F>
OCTAVO_INLINE float sum_of_vectors(int64_t width, const F& term) {
  F32 sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) sums[j] += term(i + j * kLanes, Full{});
  for (; i + kLanes <= width; i += kLanes) sums[0] += term(i, Full{});
  if (i < width) sums[1] += term(i, Tail{static_cast<int>(width - i)});
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Calls f with a null pointer to the type that holds an activation.
template <typename F>
OCTAVO_INLINE void with_type(Dtype dtype, const F& f) {
  if (dtype == Dtype::bf16)
    f(static_cast<uint16_t*>(nullptr));
  else
    f(static_cast<float*>(nullptr));
}

}  // namespace octavo::OCTAVO_ISA
