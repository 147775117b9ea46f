// Distribution of a step's attention among threads.
#pragma once
#include "attention.hpp"

namespace octavo {

// Attention of the tokens [begin, end) of a step. Results do not depend on how the work is cut; see attention.hpp.
void run_attention(const Attention& a, const Step& step, int64_t begin = 0, int64_t end = kAll);

}  // namespace octavo
