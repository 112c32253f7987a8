"""Rotary position embedding in the half-split layout of the Llama family."""
