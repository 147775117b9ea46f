#include <nanobind/nanobind.h>

#include <limits>
#include <stdexcept>
#include <string>

#include "bind.hpp"
#include "sampling.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

namespace {

void require_vocabulary(int64_t vocab) {
  if (vocab < 1 || vocab > std::numeric_limits<int32_t>::max())
    throw std::invalid_argument("a vocabulary must have from 1 to 2^31 - 1 tokens, not " + std::to_string(vocab));
}

// Rows differ much in what they cost, so each is a task of its own.
// `mask` holds a bit for each token of each row, rows of whole words; 0 masks nothing.
void choose_tokens(uintptr_t logits, int64_t stride, int64_t rows, int64_t vocab, uintptr_t filters, uintptr_t keys,
                   uintptr_t mask, uintptr_t out) {
  require_vocabulary(vocab);
  const int64_t words = (vocab + 31) / 32;
  nb::gil_scoped_release release;
  parallel_for(rows, [&](int64_t i) {
    const uint32_t* const allowed = mask ? pointer<uint32_t>(mask) + i * words : nullptr;
    pointer<int64_t>(out)[i] = choose_token(pointer<float>(logits) + i * stride, vocab, pointer<Filters>(filters)[i],
                                            pointer<uint32_t>(keys) + 2 * i, allowed);
  });
}

void logprobs_of_tokens(uintptr_t logits, int64_t stride, int64_t rows, int64_t vocab, uintptr_t indices,
                        uintptr_t tokens, uintptr_t counts, uintptr_t logprobs, uintptr_t ranks, int64_t width,
                        uintptr_t top_ids, uintptr_t top_logprobs) {
  require_vocabulary(vocab);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t token = pointer<int64_t>(tokens)[i], count = pointer<int64_t>(counts)[i];
    if (token < 0 || token >= vocab)
      throw std::invalid_argument("a token must be in [0, " + std::to_string(vocab) + "), not " + std::to_string(token));
    if (count < 0 || count > vocab || count > width)
      throw std::invalid_argument("a count must be from 0 to the width (" + std::to_string(width) +
                                  ") and the vocabulary's size, not " + std::to_string(count));
  }
  nb::gil_scoped_release release;
  parallel_for(rows, [&](int64_t i) {
    const TokenLogprobs result{pointer<double>(logprobs) + i, pointer<int64_t>(ranks) + i,
                               pointer<int64_t>(top_ids) + i * width, pointer<double>(top_logprobs) + i * width};
    token_logprobs(pointer<float>(logits) + pointer<int64_t>(indices)[i] * stride, vocab, pointer<int64_t>(tokens)[i],
                   pointer<int64_t>(counts)[i], result);
  });
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def("choose_tokens", &choose_tokens, "logits"_a, "stride"_a, "rows"_a, "vocab"_a, "filters"_a, "keys"_a,
        "mask"_a, "out"_a);
  m.def("token_logprobs", &logprobs_of_tokens, "logits"_a, "stride"_a, "rows"_a, "vocab"_a, "indices"_a, "tokens"_a,
        "counts"_a, "logprobs"_a, "ranks"_a, "width"_a, "top_ids"_a, "top_logprobs"_a);
}

}  // namespace octavo
