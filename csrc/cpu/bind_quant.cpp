#include "quant.hpp"

#include "bind.hpp"

namespace octavo {

void bind_quant(nanobind::module_& m) { (void)m; }

}  // namespace octavo
