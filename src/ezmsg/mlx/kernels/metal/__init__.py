"""Kernels for Metal, through ``mx.fast.metal_kernel``."""
