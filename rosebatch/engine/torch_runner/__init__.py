"""Carries out plans with PyTorch's own operators: every device, batch-invariant on a CPU, the oracle of the tests."""
