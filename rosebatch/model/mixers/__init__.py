"""The kinds of token mixing, a folder each."""
