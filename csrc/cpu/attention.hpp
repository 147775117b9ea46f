// Paged attention: the layout of the KV cache and the kernels' entry points.
//
// A layer's cache is two arrays, keys and values, of blocks; a block holds a tile for each KV head. With P = head_dim
// rounded up to a multiple of 16, a tile is block_size * P elements, then, for int8, block_size float32 scales.
//
// If block_size is a multiple of 16, a tile is a row of panels of 16 tokens, in which vectors need no shuffling:
//   keys    [P / 2][16 tokens][2]   pairs of dimensions   } bfloat16; float32 and int8 lie plane by plane, the pair
//   values  [16 tokens / 2][P][2]   pairs of tokens       } next to last: keys [P / 2][2][16], values [8][2][P]
// Scores of 16 tokens are lanes of a vector, as are 16 dimensions of a result. A bfloat16 pair is one 32-bit lane: a
// shift and a mask widen it, and it is what a bfloat16 dot-product instruction takes.
// Any other block size is stored as [block_size][P], and panels are gathered from it. So is a latent cache, of any block
// size, which has one array: a token's value is the beginning of its key (DeepSeek-V2, arXiv 2405.04434, section 2.1).
//
// Invariance. A row (a query of a head) accumulates its context in pieces of kPiece positions counted from position 0, in
// order. Within a piece every score is one chain of fused multiply-adds over the dimensions, and every element of the
// result one chain over the tokens that the row attends to, in order. So the result depends neither on the other rows of
// a tile, nor on the chunk that the row is computed in, nor on the thread that computes a piece.
//
// With avx512_bf16, queries of bfloat16 and a cache of bfloat16 or int8, the chains are of pairs, the odd element first, as
// the instruction is defined. Queries, keys and values are bfloat16 exactly (an int8 is one too). A softmax weight is the
// sum of two bfloat16, 16 bits of its 24, and of a pair of tokens the high halves are added before the low ones; one
// bfloat16 would save a third of the products, but its error of 2^-9 is that of the result's own rounding. Of a pair that
// a row sees one token of, the other counts as zeros, whatever is in its slot.
//
// With amx_bf16, queries and a cache of bfloat16, the sums are those of tiles (attention_amx.hpp); int8 caches are computed
// as with avx512.
#pragma once
#include "isa.hpp"
#include "ops.hpp"

namespace octavo {

constexpr int64_t kPanel = 16;
constexpr int64_t kPiece = 256;
// More tokens than a context has.
constexpr int64_t kAll = int64_t{1} << 40;

struct CacheShape {
  Dtype dtype;
  int64_t kv_heads, head_dim, block_size;
  int64_t latent = 0;  // size of a value in a latent cache, which has one KV head; 0: keys and values are two arrays

  int64_t value_dim() const { return latent ? latent : head_dim; }
  int64_t padded() const { return round_up(head_dim); }
  int64_t padded_value() const { return round_up(value_dim()); }
  bool panelled() const { return !latent && block_size % kPanel == 0; }
  int64_t item_size() const { return dtype == Dtype::f32 ? 4 : dtype == Dtype::bf16 ? 2 : 1; }
  int64_t data_bytes() const { return block_size * padded() * item_size(); }  // of a tile, scales not included
  int64_t tile_bytes() const { return data_bytes() + (dtype == Dtype::i8 ? 4 * block_size : 0); }

 private:
  static int64_t round_up(int64_t dim) { return (dim + 15) / 16 * 16; }
};

// Writes k and v [T, kv_heads, head_dim] to Step.slots, but for negative ones; strides count elements. int8: each token
// and head has a scale, its largest magnitude / 127. Of a latent cache k is the first part of the vectors, [T, latent],
// and v the rest.
struct CacheWrite {
  const void* k;
  int64_t k_stride;
  const void* v;
  int64_t v_stride;
  Dtype dtype;
  char* key_cache;
  char* value_cache;
  CacheShape shape;
};

// Attention of q [T, heads, head_dim] to out [T, heads, value_dim], contiguous, both of type dtype.
struct Attention {
  const void* q;
  int64_t q_stride;
  void* out;
  Dtype dtype;
  int64_t heads;
  const char* key_cache;
  const char* value_cache;
  CacheShape shape;
  float scale;
  // A token sees itself and the window - 1 tokens before it; 0: all before it. Unless causal, as many as the window on
  // either side of it.
  int64_t window;
  float soft_cap;      // scores become cap * tanh(score / cap); 0: they do not
  const float* alibi;  // [heads] or null: slope * (position of key - position of query) is added to scores
  bool causal;         // a token sees none after it
  // [heads, bias_stride] or null: bias[bias_reach + position of key - position of query] is added to scores, and beyond the
  // reach its outermost number, which the kLanes next to it are too.
  const float* bias;
  int64_t bias_stride, bias_reach;
  const float* sinks;  // [heads] or null: logits that join each row's sum of weights, and have no value
  bool sees_spans;  // a token also sees what comes after it, up to Step.sees_until; it is causal else
  bool chunked;     // windows are chunks: a token sees itself and those before it from a multiple of `window` on

  // The first position that a token may see.
  int64_t first_seen(int64_t position) const {
    if (chunked) return position - position % window;
    return position > before() ? position - before() : 0;
  }
  // The first position of a token that does not see `position` any more.
  int64_t first_beyond(int64_t position) const {
    return chunked ? (position / window + 1) * window : position + before() + 1;
  }
  // How many tokens before it and after it a token sees at most.
  int64_t before() const { return window > 0 ? window - (causal ? 1 : 0) : kAll; }
  int64_t after() const { return causal ? 0 : window > 0 ? window : kAll; }
  int64_t group() const { return heads / shape.kv_heads; }  // query heads of a KV head
};

// Rows computed together: `queries` tokens of a sequence from its first_query-th in this step on, for all heads of a
// KV head, over the context's pieces [first_piece, end_piece). Row i is query i / group, head i % group.
struct AttentionItem {
  int64_t sequence, kv_head, first_query, queries, first_piece, end_piece;
  // Memory for each piece's state, for `combine`; null: the item has the whole context and writes the result.
  float* states;
};

// A piece's states: for each row its result [padded_value], not yet divided by its sum, its largest score and its sum.
inline int64_t state_floats(const Attention& a) { return a.shape.padded_value() + 16; }

struct AttentionTable {
  void (*write)(const CacheWrite&, const Step&, int64_t begin, int64_t end);
  // `next`, or null, is the thread's most likely next item: its first keys are prefetched.
  void (*attend)(const Attention&, const Step&, const AttentionItem&, const AttentionItem* next);
  // Folds the states of an item's pieces, [end_piece - first_piece][rows][state_floats], and writes the result.
  void (*combine)(const Attention&, const Step&, const AttentionItem&);
};

// Memory of the calling thread, 64-byte aligned, until its next call.
float* attention_scratch(int64_t floats);

}  // namespace octavo
