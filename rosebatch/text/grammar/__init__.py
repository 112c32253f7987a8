"""Structured output: grammars, from what a row wants to masks of tokens."""
