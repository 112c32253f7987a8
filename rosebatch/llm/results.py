"""From rows to the outputs of an ``LLM``."""

import pickle
from typing import Any

from rosebatch.io.images.policy import MediaPolicy
from rosebatch.io.results import Shape
from rosebatch.job.serve_options import ServeOptions


def serving(shape: Shape, seed: int | None, media: MediaPolicy, *, in_order: bool) -> ServeOptions:
    """How the rows of an ``LLM`` are served.

    Scripts for other engines' libraries look for all of a chat's answer in its text. The messages have its parts.
    """
    return ServeOptions(shape, seed, in_order, return_token_ids=True, whole_texts=True, media=media)


def pickled(index: int, row: Any, *, failed: bool) -> bytes:
    """An ``Encode`` of ``rosebatch.io.output`` for plain objects."""
    return pickle.dumps(row)
