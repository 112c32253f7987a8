"""The last answers that were finished: what they have in common with an answer to come is a draft. No torch.

Source of the idea: suffixes of a job's answers (arXiv 2411.04975).
"""

from array import array
from collections import deque

from rosebatch.engine.plan import NO_ANSWER

# Shorter ones say nothing about what follows.
_SHORTEST = 8


class AnswerPool:
    """Tokens of answers, one after the other, with ``NO_ANSWER`` behind each.

    Args:
        size: tokens at most. Of longer answers the last ones are kept.

    Attributes:
        version: counts up with each change.
    """

    def __init__(self, size: int) -> None:
        self.version = 0
        self._size = size
        self._answers: deque[array[int]] = deque()
        self._length = 0
        self._joined: array[int] | None = None

    def add(self, answer: "array[int]") -> None:
        """Add an answer, in place of the oldest ones."""
        if len(answer) < _SHORTEST:
            return
        kept = answer[1 - self._size :] + array("I", [NO_ANSWER])
        self._answers.append(kept)
        self._length += len(kept)
        while self._length > self._size:
            self._length -= len(self._answers.popleft())
        self._joined, self.version = None, self.version + 1

    @property
    def tokens(self) -> "array[int]":
        """All of them, 32 bits each. Not to be changed."""
        if self._joined is None:
            self._joined = array("I")
            for answer in self._answers:
                self._joined += answer
        return self._joined
