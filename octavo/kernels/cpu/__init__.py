"""Octavo's C++ kernels for CPUs, as a backend."""
