"""From logits to tokens: features, sampling, log-probabilities."""
