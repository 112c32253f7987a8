"""Decoders of transformers inside of the engine."""
