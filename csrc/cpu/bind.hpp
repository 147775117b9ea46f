// Each kernel file's operations are made known to Python by a function of its own binding file part.
#pragma once
#include <nanobind/nanobind.h>

namespace octavo {
void bind_tape(nanobind::module_& m);
void bind_gemm(nanobind::module_& m);
void bind_pointwise(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_quant(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_moe(nanobind::module_& m);
void bind_lora(nanobind::module_& m);
void bind_lookup(nanobind::module_& m);
}  // namespace octavo
