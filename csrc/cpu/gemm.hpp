// The gemm kernels' entry points.
#pragma once
#include "isa.hpp"
#include "ops.hpp"

namespace octavo {

struct GemmTable {};

}  // namespace octavo
