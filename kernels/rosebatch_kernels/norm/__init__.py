"""Normalisation over the last axis, alone or after a residual addition."""
