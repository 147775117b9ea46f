// The limits of this machine that kernels are measured against.
#pragma once

namespace octavo {

// Bytes a second read from memory by so many threads together: the best of several reads of 32 MiB.
double measure_read_bandwidth(int threads);

// The same in pieces of 2 KiB in random order, each fetched while the one before it is read, as decode attention reads
// blocks.
double measure_chunk_bandwidth(int threads);

// Operations a second, a multiply-add being two, by so many threads together, in the chosen instruction set: the best of
// several rounds. Of float32 multiply-adds; of dot products of bfloat16 pairs and of 8-bit quads, 0 where no instruction
// does them.
double measure_fma_peak(int threads);
double measure_bf16_dot_peak(int threads);
double measure_int8_dot_peak(int threads);

}  // namespace octavo
