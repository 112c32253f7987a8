"""Which tokens grammars allow, as the masks of a plan."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rosebatch.core.request import Constraint, fill_rows


def fill_masks(
    constraints: Sequence[Constraint], vocab_size: int, ready: Mapping[int, NDArray[np.int32]] | None = None
) -> NDArray[np.int32]:
    """The masks of these, ``[R, ceil(V / 32)]`` int32; see ``Masks``. Those of a kind are filled together.

    ``ready`` has the masks of rows that need none of their constraint.
    """
    masks = np.empty((len(constraints), -(-vocab_size // 32)), np.int32)
    if ready:
        fill_rows({row: each for row, each in enumerate(constraints) if row not in ready}, masks)
        for row, mask in ready.items():
            masks[row] = mask
    elif len({type(each) for each in constraints}) == 1:
        type(constraints[0]).fill_all(constraints, masks)
    else:
        fill_rows(dict(enumerate(constraints)), masks)
    return masks


def only_mask(token_id: int, vocab_size: int) -> NDArray[np.int32]:
    """A mask that allows a single token."""
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    mask[token_id // 32] = 1 << token_id % 32
    return mask.view(np.int32)


def only_allowed(masks: NDArray[np.int32]) -> list[int]:
    """The token of each mask that allows a single one; -1 of others."""
    words = masks.view(np.uint32)
    largest, found = words.max(1), [-1] * len(masks)
    # No other word has any bit.
    alone = (words.sum(1, dtype=np.uint64) == largest) & (largest & (largest - 1) == 0) & (largest > 0)
    for row in np.flatnonzero(alone):
        place = words[row].argmax()
        found[row] = 32 * int(place) + int(largest[row]).bit_length() - 1
    return found
