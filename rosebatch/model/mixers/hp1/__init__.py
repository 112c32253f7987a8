"""HP1: attention gated by a filter in place of a softmax."""
