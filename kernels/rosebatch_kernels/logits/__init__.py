"""What is done to logits between the model and the choice of a token: penalties, biases, tokens that may not be."""
