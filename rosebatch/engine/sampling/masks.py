"""Which tokens grammars allow, as the masks of a plan."""

from collections.abc import Sequence

import numpy as np

from rosebatch.core.request import Constraint, fill_rows


def fill_masks(constraints: Sequence[Constraint], vocab_size: int) -> np.ndarray:
    """The masks of these, ``[R, ceil(V / 32)]`` int32; see ``Masks``. Those of a kind are filled together."""
    masks = np.zeros((len(constraints), -(-vocab_size // 32)), np.int32)
    if len({type(each) for each in constraints}) == 1:
        type(constraints[0]).fill_all(constraints, masks)
    else:
        fill_rows(dict(enumerate(constraints)), masks)
    return masks
