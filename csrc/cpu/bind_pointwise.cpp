#include "pointwise.hpp"

#include "bind.hpp"

namespace octavo {

void bind_pointwise(nanobind::module_& m) { (void)m; }

}  // namespace octavo
