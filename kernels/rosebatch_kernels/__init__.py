"""Operators of the engine, one folder each: a PyTorch reference beside the kernels that replace it.

In a folder, ``reference.py`` defines the results. ``kernel.py`` (or ``decode.py`` and ``prefill.py``) is Triton; its
``TUNED`` holds the measured sizes. ``torch_*.py`` is PyTorch for production, where it differs from the reference.
``bench.py`` times the kernels. ``common`` holds what operators share. Imports torch and triton only, never rosebatch.
"""
