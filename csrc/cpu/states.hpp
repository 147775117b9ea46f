// Recurrent states: where a step's sequences have them, and the kernels' entry points.
//
// A layer's states lie in blocks of float32 numbers, each the state after the block's last computed token. A step reads
// the state before a sequence's first token, and writes every block that its tokens touch (octavo/kernels/interface.py).
// Tokens are computed one after the other, in one order for each element: results do not depend on how a sequence is cut
// into steps, nor on threads, which share out channels or heads.
#pragma once
#include "isa.hpp"
#include "ops.hpp"

namespace octavo {

struct StateMemory {
  float* data;
  int64_t block_floats;  // from one block to the next
  int64_t block_tokens;
  int64_t group;
};

// The tokens of one sequence in a step: rows [row, row + tokens), the first at `position`. Of a step of the group.
struct StateSpan {
  const StateMemory* memory;
  const int32_t* table;
  int64_t row, tokens, position;

  StateSpan(const StateMemory& states, const Step& step, int64_t sequence)
      : memory(&states),
        table(step.block_tables + sequence * step.block_table_stride),
        row(step.query_start[sequence]),
        tokens(step.query_start[sequence + 1] - row),
        position(tokens > 0 ? step.positions[row] : 0) {}

  float* block_of(int64_t at) const { return memory->data + table[at / memory->block_tokens] * memory->block_floats; }
  // The state before the first token; null: it is zero.
  const float* before() const { return position > 0 ? block_of(position - 1) : nullptr; }
  // The end of the tokens, counted from the first, that are in the block of token `i`.
  int64_t end_of_block(int64_t i) const {
    const int64_t end = ((position + i) / memory->block_tokens + 1) * memory->block_tokens - position;
    return end < tokens ? end : tokens;
  }
};

// out [T, channels], contiguous, = activation(conv(x * in_gate)) * out_gate; weight [taps, channels], bias [channels] or
// null. x and the gates, which may be null, have type dtype and strided rows. The state is [taps - 1, channels], from
// `offset` on.
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
};

struct StatesTable {
  // All sequences of a step of the group, for channels [begin, end).
  void (*causal_conv)(const CausalConv&, const Step&, int64_t begin, int64_t end);
};

}  // namespace octavo
