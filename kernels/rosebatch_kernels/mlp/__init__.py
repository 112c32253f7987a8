"""What stands between and behind the two matrix products of an MLP."""
