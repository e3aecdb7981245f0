"""Kernels for CUDA, through ``mx.fast.cuda_kernel``."""
