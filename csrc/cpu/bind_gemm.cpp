#include "gemm.hpp"

#include "bind.hpp"

namespace octavo {

void bind_gemm(nanobind::module_& m) { (void)m; }

}  // namespace octavo
