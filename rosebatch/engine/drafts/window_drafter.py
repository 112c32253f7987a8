"""Whether the next window of decode steps has drafts, which the device finds, and how many."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rosebatch.engine.drafts.history import find_ending, what_followed
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.sequence import SequenceState

# Tokens of a row that a step may compute, its last one and drafts: a graph for each, see ``rosebatch_kernels.drafts``.
QUERIES = (2, 4, 8)
# Rows that one look takes, of which each tells whether drafts would have been right; and tokens that it compares.
_LOOKED_AT, _COMPARED = 4, 7
# Plans without another look, where the last ones found nothing; and without drafts, where the last ones did not pay.
_LONGEST_PAUSE, _LONGEST_REST = 16, 64
# Of the share of right drafts, what the last look counts, at a few rows; and the last window, of all rows.
_LAST_LOOK, _LAST_WINDOW = 0.3, 0.5
# Of a step with few rows, that each further query takes, measured with Qwen3-0.6B on an H200.
_MORE_LAUNCHES = 0.06
# What drafts must save to be tried, and to be kept.
_TRIED, _KEPT = 1.15, 1.05
# Of a new kind of step, until it is a graph; and of a step's launches and of reading. On an H200, about.
_CAPTURE, _LAUNCHES, BYTES_A_SECOND = 0.06, 1e-3, 3.3e12


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


def seconds(cost: float) -> float:
    """Of a step that takes so much, see ``StepCost``."""
    return _LAUNCHES + cost / BYTES_A_SECOND


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
        self._rest = self._resting = 0
        # Whether the work ends with its slowest rows: no others wait for their slots.
        self._last_rows = False
        # Rows and queries of the steps that have had drafts.
        self._kinds = set[tuple[int, int]]()

    def propose(self, scheduler: Scheduler) -> None:
        """Decide for the next window; no window with drafts is under way."""
        planner = scheduler.planner
        rows = [each for each in scheduler.queues.running if each.decoding]
        drafts, planner.queries = planner.queries > 1, 1
        if not rows or any(each.spec.has_features or each.spec.guided for each in rows):
            return
        self._last_rows = not scheduler.queues.waiting
        if self._resting:
            self._resting -= 1
            return
        if not drafts:
            self._look(rows, array("I") if planner.answers is None else planner.answers.tokens)
        least = _KEPT if drafts else _TRIED
        if expected(self.right, QUERIES[-1]) >= least:
            planner.queries = self._best(scheduler, rows, least)
        if drafts and planner.queries == 1:
            self._resting = self._rest = min(max(2 * self._rest, 1), _LONGEST_REST)

    def _best(self, scheduler: Scheduler, rows: list[SequenceState], least: float) -> int:
        """Queries of a row that save the most of what the rest takes without drafts; 1 if none save enough."""
        tokens = read = sum(each.num_tokens for each in rows)
        if self.sharing_rows is not None and len(rows) >= self.sharing_rows:
            pool = scheduler.pool
            read = min(tokens, (pool.num_blocks - pool.num_free) * pool.block_size)
        plain = self.cost.of(len(rows), read)
        # As the runner rounds them.
        count = 1 << (len(scheduler.queues.running) - 1).bit_length()
        coming = _steps_to_come(rows, len(scheduler.queues.waiting))
        best, most = 1, 0.0
        for queries in QUERIES:
            gain = expected(self.right, queries) * plain / self.cost.of(count, tokens, queries)
            if count * queries > self.most_rows or gain < least:
                continue
            saved = coming * seconds(plain) * (1 - 1 / gain) - _CAPTURE * ((count, queries) not in self._kinds)
            if saved > most:
                best, most = queries, saved
        if best > 1:
            self._kinds.add((count, best))
        return best

    def learn(self, queries: int, steps: int, lengths: Sequence[int]) -> None:
        """Learn from a window with drafts of so many steps: how many tokens it brought each row."""
        # The others ended in it.
        if going := [length for length in lengths if length >= steps]:
            share = share_of(self._typical(going) / steps, queries)
            if share >= self.right:
                self._rest = 0
            self._learn(share, _LAST_WINDOW)

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
        if shares:
            self._learn(self._typical(shares), _LAST_LOOK)
        self._turn += _LOOKED_AT
        self._pause = 0 if any(shares) else min(max(2 * self._pause, 1), _LONGEST_PAUSE)
        self._left = self._pause

    def _typical(self, values: Sequence[float]) -> float:
        """Of these of rows, the mean while others wait; else that of the slower ones, with which the work ends."""
        return sorted(values)[len(values) // 4] if self._last_rows else sum(values) / len(values)

    def _learn(self, share: float, newest: float) -> None:
        self.right += newest * (share - self.right)


def _steps_to_come(rows: list[SequenceState], waiting: int) -> float:
    """Steps without drafts until all is done, if those that wait are like those that run; at most, as rows may stop."""
    left = max(each.num_remaining_tokens for each in rows)
    return left + waiting * sum(each.max_len - each.num_prompt_tokens for each in rows) / len(rows) ** 2


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
