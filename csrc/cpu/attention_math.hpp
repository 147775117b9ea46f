// The arithmetic of a softmax in powers of two, and the ranges of positions that rows see.
#pragma once
#include <limits>

#include "activations.hpp"
#include "attention.hpp"
#include "vec.hpp"

namespace octavo::OCTAVO_ISA {

namespace {

constexpr float kLog2e = 1.44269504089f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Positions begin .. end - 1.
struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
  bool operator==(Range other) const { return begin == other.begin && end == other.end; }
};

Range cut(Range a, Range b) { return {larger(a.begin, b.begin), smaller(a.end, b.end)}; }

// What the queries of an item see.
struct Sight {
  Sight(const Attention& a, const Step& step, const AttentionItem& item)
      : attention(a),
        queries(item.queries),
        after(a.after()),
        context(step.seq_lens[item.sequence]),
        first_token(step.query_start[item.sequence] + item.first_query),
        first_position(step.positions[first_token]),
        until(a.sees_spans && step.sees_until ? step.sees_until + first_token : nullptr) {}

  Range seen(int64_t query) const {
    return {attention.first_seen(first_position + query), smaller(context, last_seen(query) + 1)};
  }

  // Those that any query sees of a piece, and the panels where they are.
  Range positions(int64_t piece) const {
    return cut({piece * kPiece, (piece + 1) * kPiece}, {seen(0).begin, seen(queries - 1).end});
  }
  Range panels(int64_t piece) const {
    const Range range = positions(piece);
    return {range.begin / kPanel, (range.end + kPanel - 1) / kPanel};
  }

  // The queries that see any position of [begin, end).
  Range seeing_any(int64_t begin, int64_t end) const {
    const int64_t last = attention.first_beyond(smaller(end, context) - 1) - first_position;
    int64_t first = begin - after - first_position;
    if (until) {
      first = 0;
      while (first < queries && last_seen(first) < begin) ++first;
    }
    return cut({first, last}, {0, queries});
  }

  const Attention& attention;
  int64_t queries, after;
  int64_t context, first_token, first_position;
  const int32_t* until;  // of the queries; null: as far as `after`

 private:
  // The last position that a query sees, if the context is long enough. It does not fall from one query to the next.
  int64_t last_seen(int64_t query) const {
    const int64_t last = first_position + query + after;
    return until ? larger(last, until[query]) : last;
  }
};

}  // namespace

}  // namespace octavo::OCTAVO_ISA
