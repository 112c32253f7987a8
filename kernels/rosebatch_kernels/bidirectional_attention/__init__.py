"""Attention in which a token sees all tokens of its prompt, those after it too; nothing of it is kept."""
