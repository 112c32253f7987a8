"""Prompts in, results out. Nothing here knows the engine."""
