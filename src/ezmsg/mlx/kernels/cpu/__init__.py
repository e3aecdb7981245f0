"""Kernels for MLX's CPU device, compiled by numba."""
