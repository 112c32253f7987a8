"""Sizes of one program of an attention kernel."""

from typing import NamedTuple


class Program(NamedTuple):
    """Keys of a tile, warps, and stages of the software pipeline."""

    keys: int
    warps: int
    stages: int
