"""Prompts that are embedded: from hidden states to one vector."""
