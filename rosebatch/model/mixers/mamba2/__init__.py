"""Mamba2: a state space of each sequence in place of K and V, or beside them."""
