// The pointwise kernels' entry points.
#pragma once
#include "isa.hpp"
#include "ops.hpp"

namespace octavo {

struct PointwiseTable {};

}  // namespace octavo
