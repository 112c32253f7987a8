"""Normalisation over the last axis, alone and with the residual addition before it."""
