"""Mamba2 layers: a short convolution, a state space with one decay a head, a gate with a norm."""
