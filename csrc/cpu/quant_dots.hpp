// What the dot products of quant_dot.hpp give, and how they are called.
//
// Each of the files that quant_dot.hpp chooses from has:
//   CodeFor8bit          of rows that are multiplied with codes of 8 bits
//   kPanelsAtOnce        panels that are computed side by side for many rows
//   streams_of(rows)     and for fewer rows than a tile: streams of weights that are read side by side
//   start_of_4bit(sums)  QuantGroup::start_4bit, from the sums of codes 0 and 1 and of codes 2 and 3 of all quads
//   dots_4bit<Rows, Panels, Offset>, dots_8bit<Rows, Panels>(w, panel_bytes, x, groups, dots)
//     w: a group's codes in the first panel, the next panel so many bytes further; x: its quads of row 0; groups: that of
//     row 0. Codes of 4 bits stand for code - 8 if Offset; those of 8 bits have 128 added.
#pragma once
#include "quant.hpp"
#include "vec.hpp"

namespace octavo::OCTAVO_ISA {

constexpr int kVectors = kPanel / kLanes;  // of the 16 columns

// For each row, the columns' sums.
template <int Rows>
struct Dots {
  I32 value[Rows][kVectors];
};

}  // namespace octavo::OCTAVO_ISA
