"""Images of rows: what a message refers to, what of it may be read, and its pixels. Rows are other people's.

``references`` finds them in messages. ``load`` gets the bytes of one within a ``MediaPolicy`` (``contents``), and makes
pixels of these in a process of its own (``decode``).
"""
