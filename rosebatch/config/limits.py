"""Limits of the shapes of all models."""

# Of any size of a model: far above those of all models, and low enough to compute with.
MAX_SIZE = 2**24
MAX_LAYERS = 2**12
# Kernels hold token ids and positions in 32 bits.
MAX_ID = 2**31
