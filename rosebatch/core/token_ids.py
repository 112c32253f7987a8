"""Token ids of a prompt in 32 bits each: what sorts, checks and compares them takes no look at each id."""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

# Up to so many token ids, a look at each of them takes less time than NumPy's call.
FEW = 64

if TYPE_CHECKING:
    _Ids = array[int]
else:
    _Ids = array


class TokenIds(_Ids):
    """Token ids. Not to be changed.

    A tuple takes up to eleven times the memory, and every search for garbage looks at each id of it.

    Attributes:
        largest: of them, where somebody has looked for it already.
    """

    __slots__ = ("largest",)
    largest: int

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> "TokenIds":
        """These token ids.

        Raises:
            OverflowError: one has more than 32 bits, or a sign. It is of no model.
            TypeError: one is no whole number.
        """
        if isinstance(token_ids, cls):
            return token_ids
        if type(token_ids) is not list:
            return cls("I", token_ids)
        # CPython fills an array without signs in a third of the time, and one that is there in half of that.
        made = cls("I")
        made.fromlist(token_ids)
        return made


def packed(token_ids: Sequence[int]) -> Sequence[int]:
    """Whole numbers as ``TokenIds``; as they are if one is a token id of no model, which the engine refuses."""
    try:
        return TokenIds.of(token_ids)
    except OverflowError:
        return token_ids
