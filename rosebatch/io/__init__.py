"""Prompts in, results out. Nothing here imports the engine."""
