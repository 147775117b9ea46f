// The writing of the KV cache, for the table of attention.cpp.
#pragma once
#include "attention.hpp"

namespace octavo::OCTAVO_ISA {
void write_cache(const CacheWrite& a, const Step& step, int64_t begin, int64_t end);
}  // namespace octavo::OCTAVO_ISA
