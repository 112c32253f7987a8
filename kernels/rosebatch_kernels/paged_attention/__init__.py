"""Attention of new tokens over all keys of their sequences in the paged KV cache."""
