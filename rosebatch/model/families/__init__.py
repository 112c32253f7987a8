"""A file for each family of models: its layers, and the names of its tensors."""
