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
    masks = np.zeros((len(constraints), -(-vocab_size // 32)), np.int32)
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
    used = masks != 0
    where = used.argmax(1)
    words = masks[np.arange(len(masks)), where].view(np.uint32)
    single = (used.sum(1, dtype=np.int32) == 1) & (words & (words - 1) == 0)
    # Exact: a power of two below 2 ** 32.
    bits = np.log2(words, where=single, out=np.zeros(len(words)))
    found: list[int] = np.where(single, 32 * where + bits.astype(np.int64), -1).tolist()
    return found
