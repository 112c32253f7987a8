"""Writes into the paged KV cache: the K and V of new tokens, and whole blocks for copy-on-write."""
