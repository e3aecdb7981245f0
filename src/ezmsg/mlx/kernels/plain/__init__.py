"""Kernels for any device, of plain MLX operations."""
