"""Model families and their weights: one file a family, shared layers beside them."""
