// The quant kernels' entry points.
#pragma once
#include "isa.hpp"
#include "ops.hpp"

namespace octavo {

struct QuantTable {};

}  // namespace octavo
