// Distribution of a step's attention among threads.
#pragma once
#include "attention.hpp"

namespace octavo {

// Attention of all tokens of a step. Results do not depend on how the work is cut; see attention.hpp.
void run_attention(const Attention& a, const Step& step);

}  // namespace octavo
