"""Mixture of experts: the router, the order of tokens by expert, and the products with each expert's weights."""
