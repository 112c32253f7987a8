"""Whether the next window of decode steps has drafts, which the device finds, and how many."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rosebatch.engine.drafts.history import find_ending, what_followed
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.sequence import SequenceState

# Tokens of a row that a step may compute, its last one and drafts: a graph for each, see ``rosebatch_kernels.drafts``.
QUERIES = (2, 4, 8)
# Rows that one look takes, of which each tells whether drafts would have been right; and tokens that it compares.
_LOOKED_AT, _COMPARED = 32, 7
# Plans without another look, where the last ones found nothing; and without drafts, where the last ones did not pay.
_LONGEST_PAUSE, _LONGEST_REST = 16, 64
# Of the share of right drafts, what the last look counts, at a few rows; and the last window, of all rows.
_LAST_LOOK, _LAST_WINDOW = 0.5, 0.5
# Of a row's own drafts, what counts in its next window; and as how many drafts of its own those of all rows count.
_KEPT_OF_A_ROW, _OF_ALL_ROWS = 0.8, 6.0
# How much shorter drafts must make the rest of the work to be tried, and to be kept.
_TRIED, _KEPT = 1.15, 1.05
# Seconds that a new kind of step takes until it is a graph; a step's launches; what drafts add to them, waiting for the
# host included, and each further query. And bytes. Measured with Qwen3-0.6B on an H200.
_CAPTURE, _LAUNCHES, _DRAFTS, _QUERY, BYTES_A_SECOND = 0.06, 0.4e-3, 0.25e-3, 0.07e-3, 3.3e12


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a decode step takes.

    Attributes:
        weights: bytes of the model's matrices.
        row: bytes that each row reads and writes, beside its K and V.
        token: bytes of a token's K and V.
        free_tokens: of a step, which take as long as reading the weights.
    """

    weights: int
    row: int
    token: int
    free_tokens: int

    def of(self, rows: int, tokens: int, queries: int = 1) -> float:
        """Seconds of a step of so many rows, which have so many tokens together."""
        count = rows * queries
        # Several queries of a row read its keys once.
        read = self.weights * max(1.0, count / self.free_tokens) + self.row * count + self.token * tokens
        return _LAUNCHES + read / BYTES_A_SECOND + (queries > 1) * (_DRAFTS + _QUERY * (queries - 1))


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
        # Of drafts that follow right ones: the share of all rows.
        self.right = 0.0
        # By row: drafts that were right, and drafts. The older they are, the less they count.
        self._of_rows: dict[int, tuple[float, float]] = {}
        self._turn = 0
        self._pause = self._left = 0
        self._rest = self._resting = 0
        # Rows and queries of the steps that have had drafts.
        self._kinds = set[tuple[int, int]]()

    def propose(self, scheduler: Scheduler) -> None:
        """Decide for the next window; no window with drafts is under way."""
        planner = scheduler.planner
        rows = [each for each in scheduler.queues.running if each.decoding]
        drafts, planner.queries = planner.queries > 1, 1
        if not rows or any(each.spec.has_features or each.spec.guided for each in rows):
            return
        if self._resting:
            self._resting -= 1
            return
        if not any(each.spec.id in self._of_rows for each in rows):
            # Nothing is known of this work: the last one's rows say little of it.
            self.right = 0.0
        if not drafts:
            self._look(rows, array("I") if planner.answers is None else planner.answers.tokens)
        least = _KEPT if drafts else _TRIED
        if expected(self.right, QUERIES[-1]) >= least:
            planner.queries = self._best(scheduler, rows, least)
        if drafts:
            self._rest = 0 if planner.queries > 1 else min(max(2 * self._rest, 1), _LONGEST_REST)
            self._resting = self._rest

    def _best(self, scheduler: Scheduler, rows: list[SequenceState], least: float) -> int:
        """Queries of a row that save the most of what the rest takes without drafts; 1 if none save enough."""
        tokens = read = sum(each.num_tokens for each in rows)
        if self.sharing_rows is not None and len(rows) >= self.sharing_rows:
            pool = scheduler.pool
            read = min(tokens, (pool.num_blocks - pool.num_free) * pool.block_size)
        plain = self.cost.of(len(rows), read)
        # As the runner rounds them.
        count = 1 << (len(scheduler.queues.running) - 1).bit_length()
        # Of rows whose last tokens are under way, none are left.
        left = np.maximum([each.num_remaining_tokens for each in rows], 1)
        waiting = len(scheduler.queues.waiting)
        coming, rights = _steps_to_come(rows, int(left.max()), waiting), self._rights(rows)
        best, most = 1, 0.0
        for queries in QUERIES:
            fewer = expected(self.right, queries)
            if not waiting:
                # The work ends with its slowest row.
                fewer = left.max() / (left / expected(rights, queries)).max()
            gain = fewer * plain / self.cost.of(count, tokens, queries)
            if count * queries > self.most_rows or gain < least:
                continue
            saved = coming * plain * (1 - 1 / gain) - _CAPTURE * ((count, queries) not in self._kinds)
            if saved > most:
                best, most = queries, saved
        if best > 1:
            self._kinds.add((count, best))
        return best

    def learn(self, queries: int, steps: int, lengths: Mapping[int, int]) -> None:
        """Learn from a window with drafts of so many steps: how many tokens it brought each row, by its id."""
        # The others ended in it.
        if going := {row: length for row, length in lengths.items() if length >= steps}:
            share = share_of(sum(going.values()) / len(going) / steps, queries)
            self.right += _LAST_WINDOW * (share - self.right)
            # Of those that have ended, nothing is kept, as long as drafts may be on.
            self._of_rows = {row: self._of_rows[row] for row in lengths if row in self._of_rows}
            for row, length in going.items():
                self._learn(row, share_of(length / steps, queries) * length, length)

    def _look(self, rows: list[SequenceState], answers: "array[int]") -> None:
        if self._left:
            self._left -= 1
            return
        shares = list[float]()
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
            shares.append(right / (right + (right < _COMPARED)))
            self._learn(row.spec.id, right, right + (right < _COMPARED))
        self._turn += _LOOKED_AT
        if not shares:
            # None of them is long enough yet, or all are too long.
            return
        self.right += _LAST_LOOK * (sum(shares) / len(shares) - self.right)
        self._of_rows = {row.spec.id: self._of_rows[row.spec.id] for row in rows if row.spec.id in self._of_rows}
        self._pause = 0 if any(shares) else min(max(2 * self._pause, 1), _LONGEST_PAUSE)
        self._left = self._pause

    def _learn(self, row: int, right: float, drafts: float) -> None:
        before_right, before = self._of_rows.get(row, (0.0, 0.0))
        self._of_rows[row] = _KEPT_OF_A_ROW * before_right + right, _KEPT_OF_A_ROW * before + drafts

    def _rights(self, rows: list[SequenceState]) -> NDArray[np.float64]:
        """Of each row, the share of right drafts: its own, and that of all rows as long as it has had few."""
        own = np.array([self._of_rows.get(row.spec.id, (0.0, 0.0)) for row in rows], np.float64)
        shares: NDArray[np.float64] = (own[:, 0] + _OF_ALL_ROWS * self.right) / (own[:, 1] + _OF_ALL_ROWS)
        return shares


def _steps_to_come(rows: list[SequenceState], most: int, waiting: int) -> float:
    """Steps without drafts until all is done, if those that wait are like those that run; at most, as rows may stop."""
    return most + waiting * sum(each.max_len - each.num_prompt_tokens for each in rows) / len(rows) ** 2


def expected(right: Any, queries: int) -> Any:
    """Tokens that a row gets of a step, if so many of the drafts are right that follow right ones; also of arrays."""
    return sum(right**each for each in range(queries))


def share_of(tokens: float, queries: int) -> float:
    """The share of right drafts with which a row gets so many tokens of a step."""
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle, queries) < tokens else (low, middle)
    return low
