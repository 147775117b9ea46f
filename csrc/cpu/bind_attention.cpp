#include "attention.hpp"

#include "bind.hpp"

namespace octavo {

void bind_attention(nanobind::module_& m) { (void)m; }

}  // namespace octavo
