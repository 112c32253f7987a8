"""What a kind of token mixing states of a layer."""

from typing import NamedTuple

import torch


class StatePlane(NamedTuple):
    """A tensor of fixed size that a layer keeps of each sequence.

    Attributes:
        shape: of one sequence's part.
        dtype: None for that of activations.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
