"""Measurement: offline throughput, kernels, the limits of the machine."""
