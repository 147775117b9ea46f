// The norms of pointwise_norm.cpp, for the table of pointwise.cpp.
#pragma once
#include "pointwise.hpp"

namespace octavo::OCTAVO_ISA {
void rms_norm(const Norm& a, const Step& step, int64_t begin, int64_t end);
void layer_norm(const Norm& a, const Step& step, int64_t begin, int64_t end);
}  // namespace octavo::OCTAVO_ISA
