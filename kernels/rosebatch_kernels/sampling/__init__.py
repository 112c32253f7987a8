"""From logits to token ids, each row with its own random number."""
