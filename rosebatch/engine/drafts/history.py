"""Drafts from a sequence's own tokens: what came after the last place that ends like the sequence.

Source of the idea: prompt lookup (Saxena 2023), and suffixes of any length (arXiv 2411.04975).
"""

import numpy as np

from rosebatch.engine.plan import NO_ANSWER, SHORTEST_ENDING

# Tokens of an ending that is looked for; a longer one is no better guess.
_LONGEST = 32
# A copy with a change goes on if so many of its last tokens are those of the original.
_LOOKED_AT, _ALIKE = 8, 5


def find_ending(token_ids: np.ndarray) -> tuple[int, int]:
    """The longest ending of the tokens that they have elsewhere, too; of equal ones, the last.

    Args:
        token_ids: ``[T]``.

    Returns:
        the length of the ending, and how far before the end the other one is; 0 and 0 where there is none.
    """
    count = len(token_ids)
    # Where the next token is the last one of the ending.
    places = np.flatnonzero(token_ids[:-1] == token_ids[-1]) if count else np.empty(0, np.int64)
    length, found = 0, places
    while len(places):
        length, found = length + 1, places
        if length == _LONGEST:
            break
        places = places[places >= length]
        places = places[token_ids[places - length] == token_ids[count - 1 - length]]
    return (length, count - 1 - int(found[-1])) if length >= SHORTEST_ENDING else (0, 0)


def goes_on(token_ids: np.ndarray, distance: int) -> bool:
    """Whether the tokens still copy those so far before them, though the last ones may be changed."""
    if distance == 0:
        return False
    last = np.arange(len(token_ids) - 1, max(len(token_ids) - 1 - _LOOKED_AT, distance - 1), -1)
    return int((token_ids[last] == token_ids[last - distance]).sum()) >= _ALIKE


def what_followed(token_ids: np.ndarray, distance: int, most: int) -> np.ndarray:
    """So many tokens from so far before the end on; if there are fewer, they are repeated, as they seem to be.

    Nothing follows the end of another answer.
    """
    found = np.resize(token_ids[len(token_ids) - distance :], most)
    ends = np.flatnonzero(found == NO_ANSWER)
    return found[: ends[0]] if len(ends) else found
