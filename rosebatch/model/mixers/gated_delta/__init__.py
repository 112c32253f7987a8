"""The gated delta rule: a state of each sequence in place of K and V."""
