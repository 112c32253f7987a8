"""Operators of the engine, one folder each: a PyTorch reference next to the kernels that replace it.

In a folder, ``reference.py`` defines the results. ``kernel.py`` (or ``decode.py``, ``prefill.py``) is Triton; ``SIZES``
has the sizes of its programs by architecture. Launchers take the ``sizes`` for a GPU, and the GPU's record as
``device``. ``torch_*.py`` is PyTorch for production, where it differs from the reference. ``common`` has what operators
share. Imports torch and triton only, never rosebatch.
"""
