#include "sampling_rank.hpp"

#include <algorithm>
#include <array>

namespace octavo {

namespace {

constexpr int kBits = 10;
constexpr uint32_t kLastBin = (1 << kBits) - 1;
constexpr int64_t kFew = 48;

using Histogram = std::array<double, kLastBin + 1>;

// The bin in which the prefix ends, the last of the given ones if none. Takes what weighs before it off the target.
uint32_t end_bin(const Histogram& bins, uint32_t last, double& target) {
  uint32_t end = 0;
  while (end < last && bins[end] < target) target -= bins[end++];
  return end;
}

// A bin for each distance, never decreasing: 128 for each doubling of 1 + distance, which spreads what logits most
// often are, up to 255.
uint32_t coarse_bin(float logit, float top) {
  const float shifted = 1.0f + distance_of(logit, top);
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  return std::min((bits - 0x3f800000u) >> 16, kLastBin);
}

// The tokens of the coarse bin in which the prefix ends, in order of id.
template <typename F>
void coarse(const Tokens& list, float top, const F& weight, double& target, std::vector<Ranked>& out) {
  Histogram bins{};
  for (int64_t i = 0; i < list.size; ++i) bins[coarse_bin(list.logits[i], top)] += weight(i);
  const uint32_t end = end_bin(bins, kLastBin, target);
  for (int64_t i = 0; i < list.size; ++i)
    if (coarse_bin(list.logits[i], top) == end) out.push_back(ranked(list, i, top, weight(i)));
}

struct Range {
  uint32_t lowest, highest;
};

Range range_of(const std::vector<Ranked>& tokens) {
  Range range{tokens.front().distance, tokens.front().distance};
  for (const Ranked& token : tokens) {
    range.lowest = std::min(range.lowest, token.distance);
    range.highest = std::max(range.highest, token.distance);
  }
  return range;
}

// Keeps the tokens among which the prefix ends, in order of id. The bins are the leading bits in which the distances
// differ, so that a few rounds leave a single distance.
void narrow(std::vector<Ranked>& tokens, Range range, double& target) {
  int shift = 0;
  while ((range.highest - range.lowest) >> shift > kLastBin) ++shift;
  const auto bin_of = [=](const Ranked& token) { return (token.distance - range.lowest) >> shift; };
  Histogram bins{};
  for (const Ranked& token : tokens) bins[bin_of(token)] += token.weight;
  const uint32_t end = end_bin(bins, (range.highest - range.lowest) >> shift, target);
  tokens.erase(std::remove_if(tokens.begin(), tokens.end(), [&](const Ranked& t) { return bin_of(t) != end; }),
               tokens.end());
}

template <typename F>
Ranked end_of_weighted(const Tokens& list, float top, const F& weight, double target, std::vector<Ranked>& tokens) {
  tokens.clear();
  if (list.size > kFew)
    coarse(list, top, weight, target, tokens);
  else
    for (int64_t i = 0; i < list.size; ++i) tokens.push_back(ranked(list, i, top, weight(i)));

  Range range = range_of(tokens);
  while (static_cast<int64_t>(tokens.size()) > kFew && range.lowest != range.highest) {
    narrow(tokens, range, target);
    range = range_of(tokens);
  }
  // Those of one distance are in order already, however many they are.
  if (range.lowest != range.highest) std::sort(tokens.begin(), tokens.end(), precedes);
  for (const Ranked& token : tokens) {
    if (token.weight >= target) return token;
    target -= token.weight;
  }
  return tokens.back();
}

}  // namespace

Ranked end_of_prefix(const Tokens& list, float top, const float* weights, double target, std::vector<Ranked>& scratch) {
  if (weights == nullptr) return end_of_weighted(list, top, [](int64_t) { return 1.0f; }, target, scratch);
  return end_of_weighted(list, top, [=](int64_t i) { return weights[i]; }, target, scratch);
}

}  // namespace octavo
