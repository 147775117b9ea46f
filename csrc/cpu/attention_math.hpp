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

// 2^x for x <= 0: 1 for 0, 0 below -126.5, NaN of NaN. The polynomial of 2^r, |r| <= 1/2, has the least greatest error of
// its degree, 1e-7.
OCTAVO_INLINE F32 exp2_not_above_zero(F32 x) {
  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits; and the bias of exponents, which it then has too.
  const F32 magic = splat(12582912.0f + 127.0f);
  const F32 bounded = max(splat(-127.0f), x);
  const F32 shifted = bounded + magic;
  const F32 r = bounded - (shifted - magic);
  F32 p = splat(1.32647269e-03f);
  p = fma(p, r, splat(9.67151266e-03f));
  p = fma(p, r, splat(5.55073374e-02f));
  p = fma(p, r, splat(2.40222421e-01f));
  p = fma(p, r, splat(6.93146978e-01f));
  p = fma(p, r, splat(1.0f));
  return p * (F32)((U32)shifted << 23);  // for -127 the scale is 0
}

OCTAVO_INLINE float exp2_not_above_zero(float x) { return exp2_not_above_zero(splat(x))[0]; }

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
      : queries(item.queries),
        before(a.before()),
        after(a.after()),
        context(step.seq_lens[item.sequence]),
        first_token(step.query_start[item.sequence] + item.first_query),
        first_position(step.positions[first_token]) {}

  Range seen(int64_t query) const {
    const int64_t position = first_position + query;
    return {larger(0, position - before), smaller(context, position + after + 1)};
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
    const int64_t first = begin - after - first_position, last = smaller(end, context) + before - first_position;
    return cut({first, last}, {0, queries});
  }

  int64_t queries, before, after;
  int64_t context, first_token, first_position;
};

}  // namespace

}  // namespace octavo::OCTAVO_ISA
