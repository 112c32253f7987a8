"""Prompts in, results out. Knows nothing of the engine."""
