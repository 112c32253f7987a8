"""Prompts to which nothing is generated: their hidden states are pooled to one vector."""
