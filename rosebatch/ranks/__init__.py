"""Several processes that hold a model together: one leads, the others follow its plans."""
