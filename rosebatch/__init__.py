"""Offline batch text generation: a file of prompts in, completions and a throughput report out."""

__version__ = "0.1.0"
