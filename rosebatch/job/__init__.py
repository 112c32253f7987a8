"""A whole job: rows in, result rows out. Tokenizing, seeds, resuming and writing, around the engine."""
