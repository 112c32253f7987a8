"""Attention over latents, from which keys and values are products (MLA)."""
