// The limits of this machine that kernels are measured against.
#pragma once

namespace octavo {

// Bytes a second read from memory by so many threads together: the best of several reads of 32 MiB.
double measure_read_bandwidth(int threads);

// Floating-point operations a second, a multiply-add being two, by so many threads together, in the chosen instruction
// set: the best of several rounds.
double measure_fma_peak(int threads);

}  // namespace octavo
