"""Formats of weights, one a file, which ``forms.py`` lists."""
