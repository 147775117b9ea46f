// What a step is made of: operations on fixed buffers, run over as many rows as the step has tokens.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace octavo {

enum class Dtype : int { f32 = 0, bf16 = 1, i8 = 2 };

// The rows of an operation: the step's tokens, the sampled positions, or encoder tokens.
enum class Rows : int { tokens = 0, sampled = 1, encoder = 2 };

// What an embedding looks up.
enum class Ids : int { token_ids, positions, token_types };

// What is done to each element of a product; see activations.hpp.
enum class Activation : int { none, silu, gelu, gelu_tanh, relu, quick_gelu, swiglu_oai, relu2 };

// The step that operations run in. T tokens, S sequences; arrays as in octavo/kernels/interface.py.
struct Step {
  int64_t tokens = 0;  // rows of an operation: a tape sets it to `sampled` or `encoder` where these are its rows
  int64_t sampled = 0;
  int64_t encoder = 0;
  int64_t sequences = 0;
  int64_t decodes = 0;
  const int64_t* token_ids = nullptr;     // [T]
  const int64_t* positions = nullptr;     // [T], consecutive within a sequence
  const int64_t* slots = nullptr;         // [T], those of the first KV group
  const int32_t* query_start = nullptr;   // [S + 1]
  const int32_t* seq_lens = nullptr;      // [S]
  const int32_t* block_tables = nullptr;  // [S, block_table_stride], those of the first KV group
  int64_t block_table_stride = 0;
  int64_t block_table_group_stride = 0;   // from a KV group to the next
  int64_t slot_group_stride = 0;
  const int64_t* sampled_rows = nullptr;  // [sampled]: which tokens
  const int32_t* adapters = nullptr;      // [T]: slot of each token's adapter, -1 for none; null: no token has one
  const int64_t* adapter_rows = nullptr;  // of an operation over other rows: whose adapters they have; null: their own
  const int64_t* token_types = nullptr;   // [T]
  const int32_t* cross_lens = nullptr;    // [S], of networks with cross attention
  const int32_t* cross_tables = nullptr;  // [S, cross_table_stride]
  int64_t cross_table_stride = 0;
  const int32_t* sees_until = nullptr;    // [T]: the last position that a token sees beyond its own; null: none does
  const int64_t* rotary_positions = nullptr;  // [axes, rotary_stride], of networks whose heads have rotary sections
  int64_t rotary_stride = 0;
  const int32_t* num_drafts = nullptr;  // [S]: tokens at the end of each sequence's that are drafts

  const int64_t* ids(Ids which) const {
    return which == Ids::token_ids ? token_ids : which == Ids::positions ? positions : token_types;
  }

  // The same step as a layer of this KV group sees it.
  Step of_group(int64_t group) const {
    Step step = *this;
    step.slots += group * slot_group_stride;
    step.block_tables += group * block_table_group_stride;
    return step;
  }

  // The same step as cross attention sees it: over another context than that of the tokens themselves.
  Step cross() const {
    Step step = *this;
    step.seq_lens = cross_lens;
    step.block_tables = cross_tables;
    step.block_table_stride = cross_table_stride;
    return step;
  }

  // The same step for operations over other rows than its tokens.
  Step over(Rows rows) const {
    Step step = *this;
    if (rows == Rows::tokens) return step;
    step.tokens = rows == Rows::sampled ? sampled : encoder;
    if (rows == Rows::sampled)
      step.adapter_rows = sampled_rows;
    else
      step.adapters = nullptr;
    return step;
  }
};

// Consecutive memory.
struct Bytes {
  const void* data = nullptr;
  int64_t count = 0;
};

// One kernel call with its buffers. An operation holds plain pointers: the caller keeps the buffers alive.
struct Op {
  virtual ~Op() = default;
  virtual void run(const Step& step) = 0;
  // Computes rows [begin, end) alone, to the same bits; false if it cannot, and nothing is done.
  virtual bool run_rows(const Step& /*step*/, int64_t /*begin*/, int64_t /*end*/) { return false; }
  // The weights that a thread, one of so many, reads first in this step, which has tokens; of operations that have none,
  // nothing.
  virtual Bytes first_weights(const Step&, int /*thread*/, int /*threads*/) const { return {}; }
};

using OpPtr = std::shared_ptr<Op>;

}  // namespace octavo
