"""Whether the next window of decode steps has drafts, which the device finds, and how many."""

from array import array
from dataclasses import dataclass

import numpy as np

from rosebatch.engine.drafts.history import find_ending, what_followed
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.sequence import SequenceState

# Tokens of a row that a step may compute, its last one and drafts: a graph for each, see ``rosebatch_kernels.drafts``.
QUERIES = (2, 4, 8)
# Rows that one look takes, of which each tells whether drafts would have been right; and tokens that it compares.
_LOOKED_AT, _COMPARED = 2, 7
# Plans without another look, where the last ones found nothing.
_LONGEST_PAUSE = 16
# Of the share of right drafts, what the last look or window counts.
_NEWEST = 0.3
# Of a step with few rows, that each further query takes, measured with Qwen3-0.6B on an H200.
_MORE_LAUNCHES = 0.06
# What drafts must save to be tried, and to be kept.
_TRIED, _KEPT = 1.15, 1.05


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a decode step takes, in units of bytes that it reads.

    Attributes:
        weights: bytes of the model's matrices.
        token: bytes of a token's K and V.
        free_tokens: of a step, which take as long as reading the weights.
    """

    weights: int
    token: int
    free_tokens: int

    def of(self, rows: int, tokens: int, queries: int = 1) -> float:
        """A step of so many rows, which have so many tokens together."""
        products = self.weights * max(1.0, rows * queries / self.free_tokens)
        # Several queries of a row read its keys once.
        return products * (1 + _MORE_LAUNCHES * (queries - 1)) + self.token * tokens


class WindowDrafter:
    """Turns drafts on where the rows' own tokens show that they would be right often enough, and off again.

    While windows have none, looks at a few rows tell: whether what they last got is what followed the same ending
    before. Nothing depends on time.

    Args:
        cost: of steps.
        most_rows: of a step, with those of drafts.
        most_tokens: of a row that has drafts.
        sharing_rows: from so many on, a step without drafts reads keys that rows share once; None for never.
    """

    def __init__(self, cost: StepCost, most_rows: int, most_tokens: int, sharing_rows: int | None = None) -> None:
        self.cost = cost
        self.most_rows = most_rows
        self.most_tokens = most_tokens
        self.sharing_rows = sharing_rows
        # Of drafts that follow right ones.
        self.right = 0.0
        self._turn = 0
        self._pause = self._left = 0

    def propose(self, scheduler: Scheduler) -> None:
        """Decide for the next window; no window with drafts is under way."""
        planner = scheduler.planner
        rows = [each for each in scheduler.queues.running if each.decoding]
        drafts, planner.queries = planner.queries > 1, 1
        if not rows:
            return
        if not drafts:
            self._look(rows, array("I") if planner.answers is None else planner.answers.tokens)
        least = _KEPT if drafts else _TRIED
        if expected(self.right, QUERIES[-1]) < least or any(s.spec.has_features or s.spec.guided for s in rows):
            return
        tokens = read = sum(each.num_tokens for each in rows)
        if self.sharing_rows is not None and len(rows) >= self.sharing_rows:
            pool = scheduler.pool
            read = min(tokens, (pool.num_blocks - pool.num_free) * pool.block_size)
        planner.queries = self._best(self.cost.of(len(rows), read), len(scheduler.queues.running), tokens, least)

    def _best(self, plain: float, rows: int, tokens: int, least: float) -> int:
        """Queries of a row that save the most of what a step takes without drafts; 1 if none save enough."""
        # As the runner rounds them.
        rows = 1 << (rows - 1).bit_length()
        gains = {
            each: expected(self.right, each) * plain / self.cost.of(rows, tokens, each)
            for each in QUERIES
            if rows * each <= self.most_rows
        }
        best = max(gains, key=lambda each: gains[each], default=1)
        return best if gains.get(best, 0.0) >= least else 1

    def learn(self, queries: int, tokens: int, accepted: int) -> None:
        """Learn from a window with drafts: how many tokens it brought, and how many of them were drafts."""
        if steps := tokens - accepted:
            self._learn(share_of(tokens / steps, queries))

    def _look(self, rows: list[SequenceState], answers: "array[int]") -> None:
        if self._left:
            self._left -= 1
            return
        found = 0
        for number in range(min(_LOOKED_AT, len(rows))):
            row = rows[(self._turn + number) % len(rows)]
            own = row.spec.predicted + row.token_ids
            if len(row.generated) <= _COMPARED or len(own) > self.most_tokens:
                continue
            known = np.frombuffer(answers + own, np.uint32)
            came = known[-_COMPARED:]
            before = known[:-_COMPARED]
            length, distance = find_ending(before)
            guesses = what_followed(before, distance, _COMPARED) if length else came[:0]
            same = guesses == came[: len(guesses)]
            right = len(same) if same.all() else int(same.argmin())
            found += right
            self._learn(right / (right + (right < _COMPARED)))
        self._turn += _LOOKED_AT
        self._pause = 0 if found else min(max(2 * self._pause, 1), _LONGEST_PAUSE)
        self._left = self._pause

    def _learn(self, share: float) -> None:
        self.right += _NEWEST * (share - self.right)


def expected(right: float, queries: int) -> float:
    """Tokens that a row gets of a step, if so many of the drafts are right that follow right ones."""
    return float(sum(right**each for each in range(queries)))


def share_of(tokens: float, queries: int) -> float:
    """The share of right drafts with which a row gets so many tokens of a step."""
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle, queries) < tokens else (low, middle)
    return low
