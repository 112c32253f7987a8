"""Paged attention: a softmax over K and V in blocks."""
