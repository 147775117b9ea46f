"""The CPU backend, with kernels in C++. Read ``backend.py`` first."""
