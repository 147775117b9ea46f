// Each kernel file's operations are made known to Python by a function of its own binding file part.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>

namespace octavo {

// Arrays come as addresses; who passes one keeps its memory alive.
template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void bind_tape(nanobind::module_& m);
void bind_gated_delta(nanobind::module_& m);
void bind_gemm(nanobind::module_& m);
void bind_pointwise(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_quant(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_moe(nanobind::module_& m);
void bind_lora(nanobind::module_& m);
void bind_selective_scan(nanobind::module_& m);
void bind_states(nanobind::module_& m);
void bind_lookup(nanobind::module_& m);
}  // namespace octavo
