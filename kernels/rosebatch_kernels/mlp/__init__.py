"""The steps between and after the two matrix products of an MLP."""
