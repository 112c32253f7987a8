"""Model families and their weights: a file for each family; shared layers next to them."""
