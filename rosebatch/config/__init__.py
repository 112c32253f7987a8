"""Settings of a run: fields and flags, switches, the shape of a model."""
