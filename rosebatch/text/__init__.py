"""Text to token ids and back, and grammars over token ids. Knows nothing of the engine."""
