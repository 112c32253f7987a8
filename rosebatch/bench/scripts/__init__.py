"""Benchmarks that run with ``python -m``, apart from ``rosebatch bench``."""
