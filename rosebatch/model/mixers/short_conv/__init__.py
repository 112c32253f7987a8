"""Gated convolutions over a few tokens."""
