// Recurrent states: where a step's sequences have them, and the kernels' entry points.
//
// A layer's states lie in blocks of float32 numbers, each the state after the block's last computed token. A step reads
// the state before a sequence's first token, and writes every block that its tokens touch (octavo/kernels/interface.py).
// Tokens are computed one after the other, in one order for each element: results do not depend on how a sequence is cut
// into steps, nor on threads, which share out channels or heads.
//
// Draft tokens at the end of a sequence's may be rejected, and a state cannot be cut back. So they do not advance it: a
// block keeps their changes beside the state and the position of its last token, and the next step applies those that
// were accepted. Each channel or head has a position and changes of its own, as threads may be anywhere in them.
#pragma once
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.hpp"
#include "ops.hpp"

namespace octavo {

struct StateMemory {
  float* data;
  int64_t block_floats;  // from one block to the next
  int64_t block_tokens;
  int64_t drafts;  // whose changes a block keeps; 0: neither these nor a position
  int64_t group;

  // The floats of a kernel in a block: `state`, and for each of `parts` a position and changes of `change` floats.
  int64_t floats(int64_t state, int64_t parts, int64_t change) const {
    return state + (drafts ? parts * (1 + drafts * change) : 0);
  }
  // Throws if a block has no floats [offset, offset + count).
  void check_room(int64_t offset, int64_t count) const {
    if (offset < 0 || offset + count > block_floats)
      throw std::invalid_argument("a state of " + std::to_string(block_floats) + " numbers has no room for " +
                                  std::to_string(count) + " from " + std::to_string(offset) + " on");
  }
  // Throws if a sequence has more drafts.
  void check(const Step& step) const {
    for (int64_t sequence = 0; sequence < step.sequences; ++sequence)
      if (step.num_drafts[sequence] > drafts)
        throw std::invalid_argument("a sequence has " + std::to_string(step.num_drafts[sequence]) +
                                    " draft tokens, but blocks of states keep the changes of " + std::to_string(drafts));
  }
};

// The tokens of one sequence in a step: rows [row, row + tokens), the first at `position`. The first `certain`, at least
// one, are no drafts. Of a step of the group.
struct StateSpan {
  const StateMemory* memory;
  const int32_t* table;
  int64_t row, tokens, certain, position;

  StateSpan(const StateMemory& states, const Step& step, int64_t sequence)
      : memory(&states),
        table(step.block_tables + sequence * step.block_table_stride),
        row(step.query_start[sequence]),
        tokens(step.query_start[sequence + 1] - row),
        certain(tokens - step.num_drafts[sequence]),
        position(tokens > 0 ? step.positions[row] : 0) {}

  float* block_of(int64_t at) const { return memory->data + table[at / memory->block_tokens] * memory->block_floats; }
  // The state before the first token; null: it is zero.
  float* before() const { return position > 0 ? block_of(position - 1) : nullptr; }
  // The changes to apply to the state before the first token, which has this position.
  int64_t accepted(float last) const {
    const int64_t count = position - 1 - static_cast<int64_t>(last);
    return count < 0 ? 0 : count < memory->drafts ? count : memory->drafts;  // of dummy steps, it may be any
  }
  // The position of the state that a block gets whose last token in the step, or the last before its drafts, is `i`.
  float last(int64_t i) const { return static_cast<float>(position + i); }
  // The end of the certain tokens, counted from the first, that are in the block of token `i`.
  int64_t end_of_block(int64_t i) const {
    const int64_t end = ((position + i) / memory->block_tokens + 1) * memory->block_tokens - position;
    return end < certain ? end : certain;
  }
  // Calls f(block) for each block that gets the state before the drafts, and their changes: that of the last certain token
  // first, and those behind it that have drafts only.
  template <typename F>
  void for_draft_blocks(const F& f) const {
    if (certain == tokens) return;
    const int64_t last_block = (position + tokens - 1) / memory->block_tokens;
    for (int64_t i = (position + certain - 1) / memory->block_tokens; i <= last_block; ++i)
      f(memory->data + table[i] * memory->block_floats);
  }
};

// Computes the tokens of a sequence for a head, whose state lies in the blocks and is computed there, or for drafts in a
// copy. Head has the sizes `size` of a state and `change_size` of a draft's change, and
//   float* state(float* block), float* kept(float* block): where the state is, and the position and the changes after it
//   void compute(int64_t token, const float* from, float* to, float* change): from the state before the token to the one
//     after it, perhaps in the same place; with `change`, writes the token's
//   void apply(const float* from, float* to, const float* change): the same by a change
template <typename Head>
void compute_head(const Head& head, const StateSpan& span) {
  const bool keeps_drafts = span.memory->drafts > 0;
  const size_t bytes = static_cast<size_t>(head.size) * sizeof(float);
  float* block = span.before();
  const float* from = block ? head.state(block) : nullptr;
  for (int64_t token = 0; token < span.certain;) {
    float* next = span.block_of(span.position + token);
    float* to = head.state(next);
    if (from == nullptr) {
      std::memset(to, 0, bytes);
      from = to;
    } else if (token == 0 && keeps_drafts) {
      const float* kept = head.kept(block);
      for (int64_t i = 0, count = span.accepted(*kept); i < count; ++i, from = to)
        head.apply(from, to, kept + 1 + i * head.change_size);
    }
    for (const int64_t end = span.end_of_block(token); token < end; ++token, from = to)
      head.compute(token, from, to, nullptr);
    if (keeps_drafts) *head.kept(next) = span.last(token - 1);
    block = next;
  }
  if (span.certain == span.tokens) return;
  thread_local std::vector<float> copy;
  copy.resize(static_cast<size_t>(head.size));
  float* kept = head.kept(block);
  const int64_t drafts = span.tokens - span.certain;
  for (int64_t i = 0; i < drafts; ++i, from = copy.data())
    head.compute(span.certain + i, from, copy.data(), kept + 1 + i * head.change_size);
  span.for_draft_blocks([&](float* other) {
    if (other == block) return;
    std::memcpy(head.state(other), head.state(block), bytes);
    std::memcpy(head.kept(other), kept, static_cast<size_t>(1 + drafts * head.change_size) * sizeof(float));
  });
}

// out [T, channels], contiguous, = activation(conv(x * in_gate)) * out_gate; weight [taps, channels], bias [channels] or
// null. x and the gates, which may be null, have type dtype and strided rows. The state is [taps - 1, channels], from
// `offset` on. The change of a draft is its input [channels], behind those of the state; positions [channels] come last.
struct CausalConv {
  static constexpr int64_t kMaxTaps = 16;
  const void* x;
  int64_t x_stride;
  Dtype dtype;
  void* out;
  const float* weight;
  int64_t taps, channels;
  const float* bias;
  const void* in_gate;
  int64_t in_gate_stride;
  const void* out_gate;
  int64_t out_gate_stride;
  bool silu;
  StateMemory states;
  int64_t offset;

  int64_t floats() const { return states.floats((taps - 1) * channels, channels, 1); }
};

struct StatesTable {
  // All sequences of a step of the group, for channels [begin, end).
  void (*causal_conv)(const CausalConv&, const Step&, int64_t begin, int64_t end);
};

}  // namespace octavo
