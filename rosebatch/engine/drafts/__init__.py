"""Tokens that may follow a sequence: what proposes them, and how many are worth a try."""
