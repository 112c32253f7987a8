"""Which tokens are computed next, and in which blocks of the KV cache. No torch."""
