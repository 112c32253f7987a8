"""Which tokens grammars allow, as the masks of a plan."""

from collections.abc import Sequence

import numpy as np

from rosebatch.core.request import Constraint


def fill_masks(constraints: Sequence[Constraint], vocab_size: int) -> np.ndarray:
    """The masks of these, ``[R, ceil(V / 32)]`` int32; see ``Masks``. Those of a kind are filled together."""
    masks = np.zeros((len(constraints), -(-vocab_size // 32)), np.int32)
    kinds = {type(each) for each in constraints}
    if len(kinds) == 1:
        type(constraints[0]).fill_all(constraints, masks)
        return masks
    for kind in kinds:
        rows = [row for row, each in enumerate(constraints) if type(each) is kind]
        own = np.zeros((len(rows), masks.shape[1]), np.int32)
        kind.fill_all([constraints[row] for row in rows], own)
        masks[rows] = own
    return masks
