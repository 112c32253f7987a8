"""Operators of the engine: one folder each, its PyTorch reference beside the kernels that replace it.

Imports torch and triton only, never rosebatch.
"""
