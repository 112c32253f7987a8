"""Drafts from a sequence's own tokens: what came after the last place that ends like the sequence.

Source of the idea: prompt lookup (Saxena 2023), and suffixes of any length (arXiv 2411.04975).
"""

import numpy as np

# Tokens of an ending that is looked for; a longer one is no better guess.
_LONGEST = 32


def after_ending(token_ids: np.ndarray, shortest: int, most: int) -> tuple[int, np.ndarray]:
    """What followed the longest ending of the tokens that they have elsewhere, too; of equal ones, the last.

    Args:
        token_ids: ``[T]``.
        shortest: tokens of an ending that count.
        most: tokens to return.

    Returns:
        the length of the ending, and at most ``most`` tokens; 0 and none where there is no such ending.
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
    if length < shortest:
        return 0, token_ids[:0]
    first = int(found[-1]) + 1
    return length, token_ids[first : first + most]
