// Exact integer dot products of a tile of rows and a panel's 16 columns, over one group of 32 values.
#pragma once
#if defined(OCTAVO_VNNI)
#include "quant_dot_vnni.hpp"
#elif defined(OCTAVO_AVX2) || defined(OCTAVO_AVX512)
#include "quant_dot_16bit.hpp"
#else
#include "quant_dot_plain.hpp"
#endif
