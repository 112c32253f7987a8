"""Sampled tokens go back into the state that the next decode step reads, without the host."""
