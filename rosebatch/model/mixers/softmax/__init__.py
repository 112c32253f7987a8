"""Attention with a softmax over K and V in blocks."""
