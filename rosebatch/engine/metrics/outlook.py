"""What an engine has done, and what it has before it: enough to tell how long that will take."""

import math
from collections import Counter
from functools import cache
from operator import add, sub
from typing import NamedTuple

# Lengths are counted by bins, each a fifth longer than the one before.
_BINS_A_DOUBLING = 4
# Never changed: each outlook has its own.
_NONE: Counter[int] = Counter()


@cache
def bin_of(length: int) -> int:
    """The bin that counts sequences with so many generated tokens."""
    return int(_BINS_A_DOUBLING * math.log2(max(length, 1)))


def begin_of(number: int) -> float:
    """The length at which a bin begins."""
    return float(2 ** (number / _BINS_A_DOUBLING))


class Outlook(NamedTuple):
    """Counts of a moment; those of several engines can be added. Some are by length, see ``bin_of``.

    Attributes:
        engines: counted here.
        requests, sequences: unfinished ones.
        begun: by length, sequences whose prompts are computed.
        prompt_left: tokens of prompts that are not.
        generated: by length, tokens of unfinished sequences so far.
        room: tokens that they may still get.
        finished: by length, sequences that have finished since the counts began.
        stopped: by length, those of them that ended before they had to.
        prompt_tokens, output_tokens: computed and generated since then, also for unfinished sequences.
        prefill_seconds, decode_seconds: that the device took for them.
        steps, decoded: that generated tokens, and these.
        squares, products: the sum over the steps of their tokens squared, and of their tokens times their seconds.
        seconds: of each engine since its counts began, summed up.
        age: of each engine, seconds since it told this, summed up.
    """

    engines: int = 0
    requests: int = 0
    sequences: int = 0
    begun: Counter[int] = _NONE
    prompt_left: int = 0
    generated: Counter[int] = _NONE
    room: int = 0
    finished: Counter[int] = _NONE
    stopped: Counter[int] = _NONE
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    decoded: int = 0
    squares: float = 0.0
    products: float = 0.0
    seconds: float = 0.0
    age: float = 0.0

    def plus(self, other: "Outlook") -> "Outlook":
        """The sums."""
        return Outlook(*map(add, self, other))

    def minus(self, other: "Outlook") -> "Outlook":
        """The differences; no length is counted less than never."""
        return Outlook(*map(sub, self, other))

    @property
    def done(self) -> "Outlook":
        """What was counted since the counts began, without what is under way."""
        return self._replace(engines=0, requests=0, sequences=0, begun=_NONE, prompt_left=0, generated=_NONE, room=0)
