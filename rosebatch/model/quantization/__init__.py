"""Quantized weights: formats, what they share, and what a run rounds at load."""
