// One row's token, and one token's logprobs, from the passes of SamplingTable.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "isa.hpp"
#include "pointwise.hpp"
#include "sampling.hpp"
#include "sampling_rank.hpp"

namespace octavo {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// So many columns for each of the best tokens.
constexpr int64_t kColumnsFor = 4;

// Scratch memory of one thread, for the current row.
struct Scratch {
  std::vector<float> logits, weights, columns, bounds;
  std::vector<int32_t> ids;
  std::vector<Ranked> ranked;
};

Scratch& scratch(int64_t vocab) {
  thread_local Scratch s;
  const size_t size = static_cast<size_t>(vocab);
  if (s.logits.size() < size) {
    s.logits.resize(size);
    s.weights.resize(size);
    s.ids.resize(size);
    s.columns.resize(size / kColumn);
    s.bounds.resize(size / kRaceBlock + 1);
  }
  return s;
}

Reason reason(float top) { return std::isnan(top) ? kNan : top > 0 ? kInfinite : kAllMasked; }

// ---- prefixes of the ranking --------------------------------------------------------------------------------------

// A row and its intermediate results.
class Row {
 public:
  Row(const float* logits, int64_t vocab)
      : kernels_(*isa().sampling), s_(scratch(vocab)), all_{logits, nullptr, vocab} {
    top_ = kernels_.survey(logits, vocab, s_.columns.data(), &num_columns_);
  }

  float top() const { return top_; }
  const Tokens& all() const { return all_; }

  // Those within a distance. Only one such list can be in use at a time.
  Tokens within(float reach) {
    const int64_t size = kernels_.within(all_.logits, all_.size, top_, reach, s_.logits.data(), s_.ids.data());
    return {s_.logits.data(), s_.ids.data(), size};
  }

  // A distance that at least k tokens, and not many more if k is small, lie within.
  float reach_of_best(int64_t k) {
    if (k > num_columns_) return kInfinity;
    // Each of the k columns with the greatest maxima has a token at least as great as the k-th of them. Some times k
    // columns do nearly as well as many, and the k-th is sooner found: columns are joined two by two.
    float* const columns = s_.columns.data();
    while (num_columns_ / 2 >= kColumnsFor * k) {
      const int64_t half = (num_columns_ + 1) / 2;
      for (int64_t i = half; i < num_columns_; ++i) columns[i - half] = std::max(columns[i - half], columns[i]);
      num_columns_ = half;
    }
    std::nth_element(columns, columns + k - 1, columns + num_columns_, std::greater<float>());
    return distance_of(columns[k - 1], top_);
  }

  double mass(const Tokens& tokens, double temperature) const {
    return kernels_.mass(tokens.logits, tokens.size, top_, static_cast<float>(temperature));
  }

  // The first k of a list.
  Tokens best(const Tokens& list, int64_t k) {
    if (list.size <= k) return list;
    return keep(list, end_of_prefix(list, top_, nullptr, static_cast<double>(k), s_.ranked));
  }

  // The shortest prefix of a list that weighs as much as the target.
  Tokens nucleus(const Tokens& list, double temperature, double target) {
    kernels_.weights(list.logits, list.size, top_, static_cast<float>(temperature), s_.weights.data());
    return keep(list, end_of_prefix(list, top_, s_.weights.data(), target, s_.ranked));
  }

  // The shortest prefix of all that holds this share of the whole weight.
  Tokens nucleus_of_all(double temperature, double share) {
    const double total = mass(all_, temperature);
    // A short list does if it is heavy enough; a share of a millionth is room for rounding.
    for (const double nats : {5.0, 8.0, 11.0}) {
      const Tokens list = within(static_cast<float>(temperature * nats));
      if (mass(list, temperature) > share * total * 1.000001) return nucleus(list, temperature, share * total);
    }
    // Tokens with weights below (1 - share) * total / size have together less than (1 - share) * total, so the others
    // include the nucleus. Half of that bound is used, to allow for rounding.
    const double reach = temperature * std::log(2.0 * static_cast<double>(all_.size) / ((1.0 - share) * total));
    return nucleus(within(static_cast<float>(reach)), temperature, share * total);
  }

  // A list in order of rank.
  const std::vector<Ranked>& ranking(const Tokens& list) {
    s_.ranked.clear();
    for (int64_t i = 0; i < list.size; ++i) s_.ranked.push_back(ranked(list, i, top_));
    std::sort(s_.ranked.begin(), s_.ranked.end(), precedes);
    return s_.ranked;
  }

  int64_t winner(const Tokens& tokens, double temperature, const uint32_t* key);

 private:
  // Those of a list up to `last` in the ranking.
  Tokens keep(const Tokens& list, const Ranked& last) {
    int64_t kept = 0;
    for (int64_t i = 0; i < list.size; ++i) {
      const bool stays = !precedes(last, ranked(list, i, top_));
      s_.logits[kept] = list.logits[i];
      s_.ids[kept] = list.ids[i];
      kept += stays;
    }
    return {s_.logits.data(), s_.ids.data(), kept};
  }

  const SamplingTable& kernels_;
  Scratch& s_;
  Tokens all_;
  float top_;
  int64_t num_columns_;
};

// Min-p keeps tokens whose tempered probability is at least min_p times the best one's. Top-k keeps the first k. Top-p
// keeps the shortest prefix that holds at least the share top_p of the tempered probability of what the others left.
Tokens survivors(Row& row, const Filters& f) {
  const int64_t vocab = row.all().size;
  const bool min_p = f.min_p > 0.0, top_k = f.top_k < vocab, top_p = f.top_p < 1.0;
  if (!min_p && !top_k && !top_p) return row.all();
  if (top_p && !min_p && !top_k) return row.nucleus_of_all(f.temperature, f.top_p);
  float reach = min_p ? static_cast<float>(-f.temperature * std::log(f.min_p)) : kInfinity;
  if (top_k) reach = std::min(reach, row.reach_of_best(f.top_k));
  const Tokens list = row.best(row.within(reach), f.top_k);
  return top_p ? row.nucleus(list, f.temperature, f.top_p * row.mass(list, f.temperature)) : list;
}

// ---- the race: argmin of log(E) + distance / temperature, see octavo/kernels/sampling.py -----------------------

// Margin of the float32 bounds (in powers of two): far above their rounding errors, small enough to keep few tokens.
constexpr double kMargin = 0.01;
// A float32's bits seen as an integer: 2^23 for each power of two, from an exponent of -127.
constexpr double kExponent = 8388608.0, kBias = 127.0;

// The score log(E) + distance / temperature, in float64.
double finish(const Tokens& tokens, int64_t i, const Race& race, double temperature) {
  const uint32_t id = static_cast<uint32_t>(tokens.ids == nullptr ? i : tokens.ids[i]);
  const double uniform = (random_bits(id, race.key) + 0.5) * 0x1p-32;
  return std::log(-std::log1p(-uniform)) +
         static_cast<double>(distance_of(tokens.logits[i], race.top)) / temperature;
}

// A token's score is at least log(uniform) + distance / temperature, and the bits of a float32 read as an integer are a
// piecewise linear approximation of log2 from below (by at most 0.09). So a lower bound needs no logarithm, and tokens
// with a bound above the exact score of one token cannot win; exact scores of the others are computed.
int64_t Row::winner(const Tokens& tokens, double temperature, const uint32_t* key) {
  const Race race{top_, static_cast<float>(kExponent / std::log(2.0) / temperature), key};
  float* const lowest = s_.bounds.data();
  const int64_t blocks = (tokens.size + kRaceBlock - 1) / kRaceBlock;
  kernels_.lowest_bounds(tokens, race, lowest);

  float bounds[kRaceBlock];
  const auto compute_block = [&](int64_t block) {
    const int64_t begin = block * kRaceBlock, end = std::min(begin + kRaceBlock, tokens.size);
    kernels_.bounds(tokens, race, begin, end, bounds);
    return end - begin;
  };
  const int64_t first = std::min_element(lowest, lowest + blocks) - lowest;
  const int64_t leader = first * kRaceBlock + (std::min_element(bounds, bounds + compute_block(first)) - bounds);
  // 31, as the bounds take the uniform number times 2^31.
  const double leaders = finish(tokens, leader, race, temperature) / std::log(2.0);
  const float limit = static_cast<float>((leaders + kBias + 31 + kMargin) * kExponent);

  int64_t best = leader;
  double best_time = std::numeric_limits<double>::infinity();
  for (int64_t block = 0; block < blocks; ++block) {
    if (lowest[block] > limit) continue;
    const int64_t size = compute_block(block);
    for (int64_t i = block * kRaceBlock, j = 0; j < size; ++i, ++j) {
      if (bounds[j] > limit) continue;
      const double time = finish(tokens, i, race, temperature);
      // Among equal scores the better rank in a list wins, or the lower id without one.
      if (time < best_time || (time == best_time && tokens.ids != nullptr && tokens.logits[i] > tokens.logits[best])) {
        best_time = time;
        best = i;
      }
    }
  }
  return tokens.ids == nullptr ? best : tokens.ids[best];
}

int64_t most_likely(const float* row, int64_t vocab) {
  const int64_t token = isa().pointwise->argmax(row, vocab);
  if (token < 0) return kNan;
  return std::isfinite(row[token]) ? token : reason(row[token]);
}

}  // namespace

int64_t choose_token(float* logits, int64_t vocab, const Filters& filters, const uint32_t* key,
                     const uint32_t* allowed) {
  if (allowed != nullptr) isa().sampling->apply_mask(logits, vocab, allowed);
  if (filters.temperature == 0.0) return most_likely(logits, vocab);
  Row row(logits, vocab);
  if (!std::isfinite(row.top())) return reason(row.top());
  return row.winner(survivors(row, filters), filters.temperature, key);
}

void token_logprobs(const float* logits, int64_t vocab, int64_t token, int64_t k, const TokenLogprobs& out) {
  Row row(logits, vocab);
  if (!std::isfinite(row.top())) {
    *out.logprob = std::numeric_limits<double>::quiet_NaN();
    return;
  }
  const double log_sum = std::log(row.mass(row.all(), 1.0));
  const auto logprob_of = [&](int64_t id) { return -static_cast<double>(distance_of(logits[id], row.top())) - log_sum; };
  *out.logprob = logprob_of(token);
  *out.rank = 1 + isa().sampling->count_greater(logits, vocab, logits[token]);
  if (k == 0) return;
  const std::vector<Ranked>& ranking = row.ranking(row.best(row.within(row.reach_of_best(k)), k));
  for (int64_t i = 0; i < k; ++i) {
    out.top_ids[i] = ranking[i].id;
    out.top_logprobs[i] = logprob_of(ranking[i].id);
  }
}

}  // namespace octavo
