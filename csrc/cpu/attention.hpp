// The attention kernels' entry points.
#pragma once
#include "isa.hpp"
#include "ops.hpp"

namespace octavo {

struct AttentionTable {};

}  // namespace octavo
