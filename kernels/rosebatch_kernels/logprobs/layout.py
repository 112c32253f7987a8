"""A row of int32: a token's log-probability, its rank, ids of likeliest tokens, and their log-probabilities.

Log-probabilities are the bits of fp32.
"""

LOGPROB, RANK, IDS = range(3)


def width(room: int) -> int:
    """Numbers in a row with room for so many likeliest tokens; their log-probabilities begin at ``IDS + room``."""
    return IDS + 2 * room
