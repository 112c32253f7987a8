"""Log-probabilities of tokens, and the likeliest tokens beside them."""
