"""Changes of logits between the model and the choice of a token: penalties, biases, forbidden tokens."""
