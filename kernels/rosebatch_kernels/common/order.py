"""Rows sorted by the weight that they meet."""

from typing import NamedTuple

from torch import Tensor


class Order(NamedTuple):
    """Rows by group: tokens by expert or adapter. A token of k experts is as many rows, ``token · k + slot``.

    Attributes:
        rows: ``[N]`` int32, numbers of rows, by group, then by number.
        first: ``[E]`` int32, each group's first place in ``rows``.
        tiles: ``[M, 3]`` int32: group, first place, and places; 0 places where there is nothing to do.
        tile_ends: ``[E]`` int32, the end of each group's tiles, which stand one group after the other.
    """

    rows: Tensor
    first: Tensor
    tiles: Tensor
    tile_ends: Tensor
