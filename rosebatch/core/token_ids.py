"""Token ids of a prompt, with the same in 32 bits each: what sorts, checks and hashes them takes no look at each id."""

from array import array
from collections.abc import Iterable

# Up to so many token ids, a look at each of them takes less time than NumPy's call.
FEW = 64


class TokenIds(tuple[int, ...]):
    """Token ids."""

    _packed: "array[int] | None" = None

    @classmethod
    def of(cls, token_ids: Iterable[int]) -> "TokenIds":
        """These token ids, which are numbers."""
        return token_ids if isinstance(token_ids, TokenIds) else cls(token_ids)

    @property
    def packed(self) -> "array[int]":
        """The same as 32-bit numbers, made once. Not to be changed.

        Raises:
            OverflowError: one has more bits, or a sign. It is of no model.
            TypeError: one is no whole number.
        """
        if self._packed is None:
            # CPython fills an array without signs in a third of the time, and from a plain tuple in a tenth. A slice is
            # one, and copied at once; ``tuple`` would take one id after the other.
            self._packed = array("I", self[:])
        return self._packed
