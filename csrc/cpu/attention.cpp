// Attention of a tile of rows over its context; attention.hpp has the layout and the order of the arithmetic.
#include "attention.hpp"

#include <type_traits>

#include "attention_math.hpp"
#include "attention_panels.hpp"
#include "attention_states.hpp"
#include "attention_tile.hpp"
#include "attention_write.hpp"
#include "rows.hpp"
#if defined(OCTAVO_AMX)
#include "attention_amx.hpp"
#endif

namespace octavo::OCTAVO_ISA {

namespace {

// The computation of one item; T is the type of the cache's elements. `by_pairs`: products are those of pairs of
// bfloat16, which queries and the cache's elements are exactly. Weights are rounded to it, before they are summed, so that
// they sum to one: an error of 2^-9 of each term, as of GPU kernels (Dao 2023, arXiv 2307.08691) and of the result itself.
template <typename T, bool by_pairs>
class Tile {
 public:
  Tile(const Attention& a, const Step& step, const AttentionItem& item)
      : a_(a),
        step_(step),
        item_(item),
        panels_(a, table_of(item), step.seq_lens[item.sequence], item.kv_head),
        sight_(a, step, item),
        group_(a.group()),
        rows_(item.queries * group_),
        head_dim_(a.shape.head_dim),
        padded_(a.shape.padded()),
        layout_(a) {
    const int64_t buffers = Panels<T>::kBuffers * Panels<T>::floats(a.shape);
    const int64_t panel = kByTiles ? Panels<T>::floats(a.shape) : 0;
    float* memory =
        attention_scratch(buffers + panel + 2 * kPiece + rows_ * (head_dim_ + kPiece + 2 * layout_.stride));
    const auto take = [&](int64_t floats) {
      float* taken = memory;
      memory += floats;
      return taken;
    };
    panels_.set_buffers(take(buffers));
    seen_values_ = take(panel);
    key_scales_ = take(kPiece);
    value_scales_ = take(kPiece);
    scores_ = take(rows_ * kPiece);
    total_ = take(rows_ * layout_.stride);
    state_ = take(rows_ * layout_.stride);
    query_ = take(rows_ * head_dim_);
  }

  void run(const AttentionItem* next) {
    load_queries();
    bool first = true;
    for (int64_t piece = item_.first_piece; piece < item_.end_piece; ++piece) {
      float* states = item_.states ? item_.states + (piece - item_.first_piece) * rows_ * layout_.stride : state_;
      panels_.find(sight_.panels(piece));
      if (piece + 1 < item_.end_piece)
        find_next(item_, sight_, piece + 1);
      else if (next)
        find_next(*next, Sight(a_, step_, *next), next->first_piece);
      fold_piece(piece, !item_.states && first ? total_ : states);
      if (!item_.states && !first) layout_.fold(total_, state_, rows_);
      first = false;
    }
    if (!item_.states) write(total_);
  }

  // The states of the pieces, folded in order.
  void combine() {
    const int64_t piece_floats = rows_ * layout_.stride;
    const int64_t pieces = item_.end_piece - item_.first_piece;
    for (int64_t i = 1; i < pieces; ++i) layout_.fold(item_.states, item_.states + i * piece_floats, rows_);
    write(item_.states);
  }

 private:
  static constexpr bool kScaled = std::is_same_v<T, int8_t>;  // keys and values of a token have a scale
#if defined(OCTAVO_AMX)
  static constexpr bool kByTiles = by_pairs;
#else
  static constexpr bool kByTiles = false;
#endif
  static constexpr Operand kQueries = by_pairs ? Operand::scaled_pairs : Operand::floats;
  static constexpr Operand kWeights = by_pairs ? Operand::pairs : Operand::floats;

  const int32_t* table_of(const AttentionItem& item) const {
    return step_.block_tables + item.sequence * step_.block_table_stride;
  }

  void find_next(const AttentionItem& item, const Sight& sight, int64_t piece) {
    panels_.find_next(table_of(item), item.kv_head, sight.panels(piece));
  }

  // ---- rows -----------------------------------------------------------------------------------------------------

  int64_t head_of(int64_t row) const { return item_.kv_head * group_ + row % group_; }

  // Scores are powers of two unless they are capped first.
  float scale() const { return a_.soft_cap > 0.0f ? a_.scale : a_.scale * kLog2e; }

  // From one row of queries to the next; in floats, or words.
  int64_t query_stride() const { return by_pairs ? head_dim_ / 2 : head_dim_; }

  // Queries in float32, scaled; or as they are.
  void load_queries() {
    if constexpr (by_pairs) {
      const auto* q = static_cast<const uint16_t*>(a_.q);
      for (int64_t row = 0; row < rows_; ++row)
        std::memcpy(query_ + row * query_stride(),
                    q + (sight_.first_token + row / group_) * a_.q_stride + head_of(row) * head_dim_,
                    2 * static_cast<size_t>(head_dim_));
      return;
    }
    with_type(a_.dtype, [&](auto type) {
      for (int64_t row = 0; row < rows_; ++row) {
        const auto* q = static_cast<const std::remove_pointer_t<decltype(type)>*>(a_.q) +
                        (sight_.first_token + row / group_) * a_.q_stride + head_of(row) * head_dim_;
        float* target = query_ + row * head_dim_;
        for_vectors(head_dim_, [&](int64_t i, auto lanes) { store(target + i, load(q + i, lanes) * scale(), lanes); });
      }
    });
  }

  // Results divided by their sums of weights. A sink is one more weight, added last.
  void write(float* totals) const {
    const int64_t value_dim = a_.shape.value_dim();
    with_type(a_.dtype, [&](auto type) {
      for (int64_t row = 0; row < rows_; ++row) {
        const int64_t token = sight_.first_token + row / group_;
        auto* out = static_cast<decltype(type)>(a_.out) + (token * a_.heads + head_of(row)) * value_dim;
        const float* total = totals + row * layout_.stride;
        const float sum = layout_.sum_of(totals, row);
        if (a_.sinks == nullptr) {
          for_vectors(value_dim, [&](int64_t i, auto lanes) { store(out + i, load(total + i) / sum, lanes); });
          continue;
        }
        const float top = layout_.top(totals, row), sink = a_.sinks[head_of(row)] * kLog2e, highest = max(top, sink);
        const float part = exp2_not_above_zero(top - highest);
        const float all = fma(sum, part, exp2_not_above_zero(sink - highest));
        for_vectors(value_dim, [&](int64_t i, auto lanes) { store(out + i, load(total + i) * part / all, lanes); });
      }
    });
  }

  // ---- a piece --------------------------------------------------------------------------------------------------

  // Every row's state of one piece of the context.
  void fold_piece(int64_t piece, float* states) {
    const int64_t begin = piece * kPiece;
    const Range positions = sight_.positions(piece), panels = sight_.panels(piece);
    score(panels, begin);
    if constexpr (kScaled) {
      panels_.gather_key_scales(positions, begin, key_scales_);
      panels_.gather_value_scales(positions, begin, value_scales_);
    }
    for (int64_t row = 0; row < rows_; ++row) weigh(row, begin, states);
    accumulate(panels, begin, states);
  }

  // Scores of the rows and panels of which a row sees anything.
  void score(Range panels, int64_t piece_begin) {
    Product<T> p;
    p.row_stride = query_stride();
    p.factor = scale();
    p.segments = 1;
    p.pair_stride = 2 * kPanel;
    p.pairs = head_dim_ / 2;
    p.sum_stride = kPiece;
    p.start_stride = 0;
    for (int64_t panel_index = panels.begin; panel_index < panels.end; panel_index += 2) {
      const int64_t position = panel_index * kPanel;
      const bool two = panel_index + 1 < panels.end;
      const Range queries = sight_.seeing_any(position, position + (two ? 2 : 1) * kPanel);
      if (queries.empty()) continue;
#if defined(OCTAVO_AMX)
      if constexpr (kByTiles) {
        score_by_tiles(panel_index, two, queries, position - piece_begin);
        continue;
      }
#endif
      p.rows = query_ + queries.begin * group_ * query_stride();
      p.panels[0][0] = panels_.keys(panel_index, 0);
      p.panels[1][0] = two ? panels_.keys(panel_index + 1, 1) : nullptr;
      for (int i = 0; i < 2; ++i)
        p.ahead[i][0] = panels_.keys_ahead(panel_index + i, p.panels[i][0]);
      p.sums = scores_ + queries.begin * group_ * kPiece + position - piece_begin;
      p.start = kZeros;
      multiply<kQueries>(p, (queries.end - queries.begin) * group_);
    }
  }

#if defined(OCTAVO_AMX)
  void score_by_tiles(int64_t panel_index, bool two, Range queries, int64_t position_in_piece) {
    const T* first = panels_.keys(panel_index, 0);
    const T* second = two ? panels_.keys(panel_index + 1, 1) : first;
    fetch_panel(panels_.keys_ahead(panel_index, first), 4 * kPanel * (head_dim_ / 2));
    if (two) fetch_panel(panels_.keys_ahead(panel_index + 1, second), 4 * kPanel * (head_dim_ / 2));
    const int groups = two ? 2 : 1;
    const int64_t end = queries.end * group_;
    alignas(64) float sums[kMostTileRows * 2 * kPanel];
    for (int64_t row = queries.begin * group_; row < end; row += kMostTileRows) {
      const int64_t rows = smaller(kMostTileRows, end - row);
      tiles_.multiply_keys(reinterpret_cast<const char*>(first),
                           reinterpret_cast<const char*>(second) - reinterpret_cast<const char*>(first), groups, head_dim_,
                           reinterpret_cast<const char*>(query_ + row * query_stride()), 4 * query_stride(), rows, sums);
      for (int64_t r = 0; r < rows; ++r)
        for (int g = 0; g < groups; ++g)
          store(scores_ + (row + r) * kPiece + position_in_piece + g * kPanel,
                load(sums + (r * groups + g) * kPanel) * scale());
    }
  }
#endif

  // Turns the scores of a row into weights, 2^(score - top), zero where it does not see; leaves top and sum in states.
  void weigh(int64_t row, int64_t piece_begin, float* states) {
    const Range range = cut(sight_.seen(row / group_), {piece_begin, piece_begin + kPiece});
    F32 sums = {};
    if (!range.empty()) {
      const int32_t begin = static_cast<int32_t>(range.begin - piece_begin);
      const int32_t end = static_cast<int32_t>(range.end - piece_begin);
      const int32_t first = begin / kLanes * kLanes, last = (end - 1) / kLanes * kLanes;
      float* scores = scores_ + row * kPiece;
      if (kScaled || a_.soft_cap > 0.0f || a_.alibi || a_.bias) {
        const auto distance = static_cast<int32_t>(piece_begin - (sight_.first_position + row / group_));
        finish_scores(a_, head_of(row), distance, kScaled ? key_scales_ : nullptr, scores, first, end);
      }
      for (const int32_t i : {first, last}) {
        const I32 index = counting() + i;
        store(scores + i, (index >= begin) & (index < end) ? load(scores + i) : splat(-kInfinity));
      }
      const float highest = largest(scores, first, end);
      layout_.top(states, row) = highest;
      for (int32_t i = first; i < end; i += kLanes) {
        F32 w = exp2_not_above_zero(load(scores + i) - highest);
        if constexpr (by_pairs && !kScaled) w = rounded(w);
        sums += w;
        if constexpr (kScaled) w *= load(value_scales_ + i);
        if constexpr (by_pairs)
          store_words(scores + weight_offset(i), w);
        else
          store(scores + weight_offset(i), w);
      }
    } else {
      layout_.top(states, row) = -kInfinity;
    }
    layout_.sum_of(states, row) = sum(sums);
    float* result = states + row * layout_.stride;
    for (int64_t i = 0; i < layout_.width; i += kLanes) store(result + i, F32{});
  }

  // From a row's first weight to that of a position of the piece, an even one: in floats, or in words of two. Weights take
  // the place of the scores: a pair's is written when its scores have been read.
  static int64_t weight_offset(int64_t position) { return by_pairs ? position / 2 : position; }

  // Adds the weighted values to the states.
  void accumulate(Range panels, int64_t piece_begin, float* states) {
    int64_t index = panels.begin;
    while (index < panels.end) {
      const int64_t position = index * kPanel;
      // As many panels as all queries see whole go together.
      int count = 0;
      while (count < kSegments && index + count < panels.end && seen_by_all(position + count * kPanel)) ++count;
      if (count > 0)
        add_panels(index, count, piece_begin, states);
      else
        add_edge(index, piece_begin, states);
      index += count > 0 ? count : 1;
    }
  }

  bool seen_by_all(int64_t position) const {
    return sight_.seen(0).end >= position + kPanel && sight_.seen(item_.queries - 1).begin <= position;
  }

  void add_panels(int64_t index, int count, int64_t piece_begin, float* states) {
    const T *values[kSegments], *next[kSegments];
    for (int s = 0; s < count; ++s) {
      values[s] = panels_.values(index + s, s);
      next[s] = panels_.values_ahead(index + s, values[s]);
    }
#if defined(OCTAVO_AMX)
    if constexpr (kByTiles) {
      const char* panels[kSegments];
      for (int s = 0; s < count; ++s) {
        panels[s] = reinterpret_cast<const char*>(values[s]);
        fetch_panel(next[s], 2 * kPanel * padded_);
      }
      return add_values_by_tiles(panels, count, index * kPanel - piece_begin, {0, item_.queries}, states);
    }
#endif
    multiply_values(values, next, count, kPanel / 2, scores_ + weight_offset(index * kPanel - piece_begin), item_.queries,
                    states);
  }

#if defined(OCTAVO_AMX)
  void add_values_by_tiles(const char* const* panels, int count, int64_t position_in_piece, Range queries, float* states) {
    const int64_t end = queries.end * group_;
    for (int64_t row = queries.begin * group_; row < end; row += kMostTileRows)
      tiles_.add_values(panels, count, 4 * padded_, scores_ + row * kPiece + weight_offset(position_in_piece), kPiece,
                        smaller(kMostTileRows, end - row), states + row * layout_.stride, layout_.stride, layout_.width);
  }
#endif

  // A panel that some queries see in part or not at all: those together that see the same of it.
  void add_edge(int64_t index, int64_t piece_begin, float* states) {
    const int64_t position = index * kPanel;
    const T* values = panels_.values(index, 0);
    const T* next = panels_.values_ahead(index, values);
    const Range any = sight_.seeing_any(position, position + kPanel);
    const auto seen = [&](int64_t query) { return cut(sight_.seen(query), {position, position + kPanel}); };
    for (int64_t query = any.begin; query < any.end;) {
      const Range tokens = seen(query);
      int64_t count = 1;
      while (query + count < any.end && seen(query + count) == tokens) ++count;
#if defined(OCTAVO_AMX)
      if constexpr (kByTiles) {
        if (!tokens.empty()) {
          const char* panel = reinterpret_cast<const char*>(values);
          if (tokens.end - tokens.begin < kPanel) {
            copy_tokens(panel, 4 * padded_, layout_.width, tokens.begin - position, tokens.end - position,
                        reinterpret_cast<char*>(seen_values_));
            panel = reinterpret_cast<const char*>(seen_values_);
          }
          add_values_by_tiles(&panel, 1, position - piece_begin, {query, query + count}, states);
        }
        query += count;
        continue;
      }
#endif
      add_tokens(values, next, {tokens.begin - position, tokens.end - position}, query, count,
                 scores_ + weight_offset(position - piece_begin), states);
      query += count;
    }
  }

  // Queries that see the same tokens of the panel: pairs of tokens, and a single one at either end.
  void add_tokens(const T* values, const T* next, Range tokens, int64_t query, int64_t queries, const float* rows,
                  float* states) {
    const float* weights = rows + query * group_ * kPiece;
    float* sums = states + query * group_ * layout_.stride;
    int64_t token = tokens.begin;
    const auto add_one = [&] {
#if defined(OCTAVO_BF16)
      if constexpr (by_pairs)
        return add_token_of_pair(weights, kPiece, queries * group_, values, token++, padded_, layout_.width, sums,
                                 layout_.stride);
#endif
      add_token(weights, kPiece, queries * group_, values, token++, padded_, layout_.width, sums, layout_.stride);
    };
    if (token % 2 == 1 && token < tokens.end) add_one();
    const int64_t pairs = (tokens.end - token) / 2;
    if (pairs > 0) {
      const T* first = values + token * padded_;
      const T* ahead = next + token * padded_;
      multiply_values(&first, &ahead, 1, pairs, weights + weight_offset(token), queries, sums);
      token += 2 * pairs;
    }
    if (token < tokens.end) add_one();
  }

  void multiply_values(const T* const* values, const T* const* next, int count, int64_t pairs, const float* weights,
                       int64_t queries, float* sums) {
    Product<T> p;
    p.row_stride = kPiece;
    p.segments = count;
    p.pair_stride = 2 * padded_;
    p.pairs = pairs;
    p.sum_stride = layout_.stride;
    p.start_stride = p.sum_stride;
    for (int64_t d = 0; d < layout_.width; d += 2 * kPanel) {
      for (int i = 0; i < 2; ++i) {
        const int64_t column = (d + i * kPanel) * Pairs<T>::kColumn;
        const bool beyond = d + i * kPanel >= layout_.width;
        for (int s = 0; s < count; ++s) {
          p.panels[i][s] = beyond ? nullptr : values[s] + column;
          p.ahead[i][s] = beyond ? nullptr : next[s] + column;
        }
      }
      p.rows = weights;
      p.sums = sums + d;
      p.start = p.sums;
      multiply<kWeights>(p, queries * group_);
    }
  }

  const Attention& a_;
  const Step& step_;
  const AttentionItem& item_;
  Panels<T> panels_;
  Sight sight_;
  int64_t group_, rows_, head_dim_, padded_;
  StateLayout layout_;
  float *query_, *scores_, *state_, *total_, *key_scales_, *value_scales_;
  float* seen_values_;  // a panel of values of which tokens are left out
#if defined(OCTAVO_AMX)
  AttentionTiles tiles_;
#endif
};

// Calls f with a null pointer to the class that computes such items.
template <typename F>
void with_tile(const Attention& a, const F& f) {
#if defined(OCTAVO_BF16) || defined(OCTAVO_AMX)
  if (a.dtype == Dtype::bf16 && a.shape.dtype == Dtype::bf16) return f(static_cast<Tile<uint16_t, true>*>(nullptr));
#endif
#if defined(OCTAVO_BF16)
  if (a.dtype == Dtype::bf16 && a.shape.dtype == Dtype::i8) return f(static_cast<Tile<int8_t, true>*>(nullptr));
#endif
  if (a.shape.dtype == Dtype::f32)
    f(static_cast<Tile<float, false>*>(nullptr));
  else if (a.shape.dtype == Dtype::bf16)
    f(static_cast<Tile<uint16_t, false>*>(nullptr));
  else
    f(static_cast<Tile<int8_t, false>*>(nullptr));
}

void attend(const Attention& a, const Step& step, const AttentionItem& item, const AttentionItem* next) {
  with_tile(a, [&](auto tile) { std::remove_pointer_t<decltype(tile)>(a, step, item).run(next); });
}

void combine(const Attention& a, const Step& step, const AttentionItem& item) {
  with_tile(a, [&](auto tile) { std::remove_pointer_t<decltype(tile)>(a, step, item).combine(); });
}

}  // namespace

const AttentionTable* attention_table() {
  static const AttentionTable table{write_cache, attend, combine};
  return &table;
}

}  // namespace octavo::OCTAVO_ISA
