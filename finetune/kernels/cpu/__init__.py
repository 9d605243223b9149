"""Kernels for CPUs, compiled from C and C++."""
