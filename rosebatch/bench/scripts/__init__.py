"""Benches started with ``python -m``, outside of ``rosebatch bench``."""
