// Sampling from rows of logits, and logprobs: the passes over the vocabulary.
//
// A row's tokens are ranked by logit, highest first, and by id, lowest first, among equals. A token's *distance* is the
// row's greatest logit minus its own: zero or positive (never -0), infinite for a masked token. Every filter keeps a
// prefix of the ranking, and a prefix is given by its last token, so filters need no sorting.
//
// The passes over the vocabulary are in SamplingTable, for each instruction set; the decisions on their results are in
// sampling_row.cpp. They require rows without a NaN and with a finite greatest logit.
#pragma once
#include <cstdint>

namespace octavo {

// Some tokens of a row, ids ascending; all of them, 0 .. size - 1, where ids is null.
struct Tokens {
  const float* logits;
  const int32_t* ids;
  int64_t size;
};

// The hash of octavo/kernels/sampling.py: uniform 32-bit numbers that depend on nothing but a row's key and a token's id.
// T is uint32_t, or a vector of them.
template <typename T>
inline __attribute__((always_inline)) T random_bits(T id, const uint32_t* key) {
  T x = id + 0x9E3779B9u;
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  x = x ^ (x >> 16) ^ key[0];
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13) ^ key[1]) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// Constants of the bounds on scores; see sampling_row.cpp.
struct Race {
  float top;    // the row's greatest logit
  float slope;  // 2^23 / ln 2 / temperature
  const uint32_t* key;
};

// Bounds are reduced by blocks of so many tokens, and greatest logits by columns of so many.
constexpr int64_t kRaceBlock = 256;
constexpr int64_t kColumn = 16;

struct SamplingTable {
  // Writes -infinity to the tokens whose bit is clear: bit i % 32 of word i / 32 is token i's.
  void (*apply_mask)(float* row, int64_t size, const uint32_t* allowed);
  // The row's greatest logit, or NaN if there is a NaN. Also the greatest of each of some columns, disjoint sets of
  // kColumn tokens which together hold most of the row or, if it is short, none; `columns` has room for size / kColumn.
  float (*survey)(const float* row, int64_t size, float* columns, int64_t* num_columns);
  // Writes the tokens whose distance is at most `reach`, ids ascending, and returns how many; room for size of each.
  int64_t (*within)(const float* row, int64_t size, float top, float reach, float* logits, int32_t* ids);
  // e^(-distance / temperature), float32.
  void (*weights)(const float* logits, int64_t size, float top, float temperature, float* out);
  // Their sum, in float64 and an order that depends on size alone.
  double (*mass)(const float* logits, int64_t size, float top, float temperature);
  // How many logits are greater.
  int64_t (*count_greater)(const float* row, int64_t size, float logit);
  // The bounds of tokens [begin, end).
  void (*bounds)(const Tokens&, const Race&, int64_t begin, int64_t end, float* out);
  // The lowest bound of each block of kRaceBlock tokens, the last maybe shorter.
  void (*lowest_bounds)(const Tokens&, const Race&, float* out);
};

// ---- a row at a time (sampling_row.cpp) ---------------------------------------------------------------------------

// Layout of the records FILTERS of octavo/kernels/sampling.py; a disabled filter keeps all tokens.
struct Filters {
  double temperature;  // 0: the most likely token is taken
  int64_t top_k;       // from 1
  double top_p;        // above 0
  double min_p;
};

// Results that are no tokens: NO_TOKEN of octavo/kernels/sampling.py.
enum Reason : int64_t { kNan = -1, kInfinite = -2, kAllMasked = -3 };

// Tokens that `allowed` (see SamplingTable::apply_mask) lacks are masked in the row first; null allows all.
int64_t choose_token(float* row, int64_t vocab, const Filters& filters, const uint32_t* key, const uint32_t* allowed);

struct TokenLogprobs {
  double* logprob;       // NaN if the row has no finite greatest logit; then nothing else is written
  int64_t* rank;         // 1 + number of greater logits
  int64_t* top_ids;      // [k], the best by rank
  double* top_logprobs;  // [k]
};

// k is at most vocab.
void token_logprobs(const float* row, int64_t vocab, int64_t token, int64_t k, const TokenLogprobs& out);

}  // namespace octavo
