"""Tokens that may follow a sequence, found in its own tokens, and what becomes of them: inside of a decode step."""
