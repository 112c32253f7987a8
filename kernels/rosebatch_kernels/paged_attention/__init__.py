"""Attention of new tokens over everything a sequence has in the paged KV cache."""
