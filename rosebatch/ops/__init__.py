"""The operators that models and runners compute with, and which kernel each one is."""
