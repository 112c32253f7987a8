"""The memory of a model: K/V blocks, states, and how many there are."""
