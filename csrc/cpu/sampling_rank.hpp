// The ranking of a row's tokens, and where a prefix of it ends.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

#include "sampling.hpp"

namespace octavo {

// -0.0 + 0 is 0, so that no distance is -0.0.
inline float distance_of(float logit, float top) { return (top + 0.0f) - logit; }

// A token in the ranking.
struct Ranked {
  uint32_t distance;  // the bits of the float, which order as the floats do: none is negative
  int32_t id;
  float weight;
};

inline Ranked ranked(const Tokens& list, int64_t i, float top, float weight = 1.0f) {
  Ranked result{0, list.ids[i], weight};
  const float distance = distance_of(list.logits[i], top);
  std::memcpy(&result.distance, &distance, sizeof distance);
  return result;
}

inline bool precedes(const Ranked& a, const Ranked& b) {
  return a.distance != b.distance ? a.distance < b.distance : a.id < b.id;
}

// The last token of the shortest prefix of the ranking whose weights sum to `target`, or of all if they do not reach it.
// `list` has ids and is not empty; `top` is its greatest logit; each weighs 1 if `weights` is null. The sums are float64,
// in an order that depends on the list alone. Two or three passes, and no more than some dozens are sorted.
Ranked end_of_prefix(const Tokens& list, float top, const float* weights, double target, std::vector<Ranked>& scratch);

}  // namespace octavo
