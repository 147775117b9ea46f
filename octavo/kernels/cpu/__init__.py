"""The CPU backend, with kernels in C++."""
