"""Which tokens grammars allow, as the masks of a plan."""

from collections.abc import Mapping, Sequence

import numpy as np

from rosebatch.core.request import Constraint, fill_rows


def fill_masks(
    constraints: Sequence[Constraint], vocab_size: int, known: Mapping[int, int] | None = None
) -> np.ndarray:
    """The masks of these, ``[R, ceil(V / 32)]`` int32; see ``Masks``. Those of a kind are filled together.

    ``known`` has the only token of rows whose constraint has followed it already.
    """
    masks = np.zeros((len(constraints), -(-vocab_size // 32)), np.int32)
    if len({type(each) for each in constraints}) == 1:
        type(constraints[0]).fill_all(constraints, masks)
    else:
        fill_rows(dict(enumerate(constraints)), masks)
    for row, token_id in (known or {}).items():
        masks[row] = 0
        masks[row].view(np.uint32)[token_id // 32] = 1 << token_id % 32
    return masks
