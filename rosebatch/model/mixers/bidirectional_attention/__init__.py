"""Bidirectional attention, over whole prompts: each token sees those after it too."""
