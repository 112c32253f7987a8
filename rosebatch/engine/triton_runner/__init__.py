"""Carries out plans with Triton kernels and CUDA graphs: the host launches and does not wait."""
