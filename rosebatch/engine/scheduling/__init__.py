"""Which tokens are computed next, in which blocks of the KV cache. No torch."""
