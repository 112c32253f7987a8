"""Formats of weights. Each is a file with a ``find`` function, which ``formats.py`` lists."""
