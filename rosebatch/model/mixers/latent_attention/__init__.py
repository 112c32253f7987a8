"""Latent attention: a softmax over latents in blocks, from which keys and values are products (MLA)."""
