"""Which sequences get drafts in the next step, and how many."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rosebatch.engine.drafts.history import find_ending, goes_on, what_followed
from rosebatch.engine.plan import DraftRequest
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.sequence import SequenceState

# Steps that a sequence without a right draft goes without another try: twice as many each time. A sequence whose ending
# was nowhere before goes fewer: a copy may begin at any step.
_LONGEST_PAUSE, _LONGEST_PAUSE_UNFOUND = 64, 4
# Of a head: each draft takes a pass through it, some twentieth of a step. At first, and at most.
_FIRST_OF_HEAD, _MOST_OF_HEAD = 3, 5

Ask = Callable[[Sequence[DraftRequest]], list[list[int]]]


@dataclass(slots=True)
class _Tried:
    """What became of a sequence's last drafts.

    Attributes:
        num_tokens: of the sequence when they were made.
        drafts: the tokens.
        most: how many the next ones may be.
        pause, left: steps without another try, and those of them to come.
        distance: from the end of the sequence back to the place where it goes on alike; 0 for none.
    """

    num_tokens: int = 0
    drafts: list[int] = field(default_factory=list)
    most: int = 1
    pause: int = 0
    left: int = 0
    distance: int = 0

    def judge(self, token_ids: "array[int]") -> None:
        """Learn from the tokens that came since: twice as many if all were right, a pause if none was."""
        pairs = list(zip(self.drafts, token_ids[self.num_tokens :], strict=False))
        right = next((number for number, (draft, token_id) in enumerate(pairs) if draft != token_id), len(pairs))
        if right == len(self.drafts):
            self.most = 2 * right
        elif right < len(pairs):
            # Where other drafts were verified in their place, the rest of them is not known.
            self.most = max(right, 1)
        if right:
            self.pause = self.left = 0
        else:
            self.wait(_LONGEST_PAUSE)

    def wait(self, longest: int) -> None:
        """Pause, twice as long as the last time, and no longer than this."""
        self.left = self.pause = min(max(2 * self.pause, 1), longest)


@dataclass(slots=True)
class _Row:
    """What became of a sequence's drafts: of copies of what it has, and of those that a head made."""

    copies: _Tried = field(default_factory=_Tried)
    head: _Tried = field(default_factory=lambda: _Tried(most=_FIRST_OF_HEAD))


class Drafter:
    """Proposes drafts before each step, as many as cost nearly nothing there.

    A step takes about as long for a few tokens as for one: it reads all weights. So sequences share the tokens that are
    free, those with the longest known ending first, and behind them those that a head drafts for. A sequence gets what
    is longer of both. Nothing depends on time, so a second run takes the same steps.

    Args:
        free_tokens: of a step, those of sequences without drafts included.
        most: drafts of a sequence.
        ask: makes drafts with a head, as many as are asked for; None without one.
    """

    def __init__(self, *, free_tokens: int, most: int, ask: Ask | None = None) -> None:
        self.free_tokens = free_tokens
        self.most = most
        self.ask = ask
        self._rows: dict[int, _Row] = {}
        # What the last plan tells of.
        self._drafted: list[tuple[SequenceState, _Tried]] = []

    def propose(self, scheduler: Scheduler) -> None:
        """Give drafts to running sequences, for the plan that comes next; none is under way."""
        for sequence, tried in self._drafted:
            tried.judge(sequence.token_ids)
        self._drafted = []
        running = scheduler.queues.running
        room = self.free_tokens - sum([s.num_uncomputed_tokens for s in running]) - len(scheduler.queues.waiting)
        if room <= 0 or not running:
            return
        before, self._rows = self._rows, {}
        answers = array("I") if scheduler.planner.answers is None else scheduler.planner.answers.tokens
        copies: list[tuple[int, SequenceState, list[int]]] = []
        asked: list[tuple[SequenceState, int]] = []
        for sequence in running:
            row = self._rows[sequence.id] = before.get(sequence.id) or _Row()
            ready = sequence.decoding and sequence.num_uncomputed_tokens == 1
            length, drafts = self._copy(sequence, row.copies, answers, ready=ready)
            most = self._most_of_head(sequence, row.head, ready=ready)
            if most > len(drafts):
                asked.append((sequence, most))
                # Those of the head tell whether these would have been right.
                self._remember(sequence, row.copies, drafts)
            elif drafts:
                copies.append((length, sequence, drafts))
        for _, sequence, drafts in sorted(copies, key=lambda each: -each[0]):
            room -= self._give(scheduler, sequence, self._rows[sequence.id].copies, drafts[:room])
            if room <= 0:
                return
        if self.ask is None or not asked:
            return
        # Each as many as all can have.
        asked = asked[:room]
        requests = [
            DraftRequest(s.id, s.token_ids[-1], s.num_computed_tokens, min(most, room // len(asked)))
            for s, most in asked
        ]
        for (sequence, _), drafts in zip(asked, self.ask(requests), strict=True):
            self._give(scheduler, sequence, self._rows[sequence.id].head, drafts)

    def _copy(
        self, sequence: SequenceState, tried: _Tried, answers: "array[int]", *, ready: bool
    ) -> tuple[int, list[int]]:
        """The length of an ending that was there before, and what followed it; nothing while it is no time to look."""
        if tried.left:
            tried.left -= 1
        elif ready:
            own = np.frombuffer(answers + sequence.spec.predicted + sequence.token_ids, np.uint32)
            length, distance = find_ending(own)
            tried.distance = distance or (tried.distance if goes_on(own, tried.distance) else 0)
            if tried.distance:
                return length, what_followed(own, tried.distance, min(self.most, tried.most)).tolist()
            tried.wait(_LONGEST_PAUSE_UNFOUND)
        return 0, []

    def _most_of_head(self, sequence: SequenceState, tried: _Tried, *, ready: bool) -> int:
        """How many a head may draft; none while it is no time to try."""
        if self.ask is None:
            return 0
        if tried.left:
            tried.left -= 1
            return 0
        return min(tried.most, _MOST_OF_HEAD, sequence.spec.decode_len - sequence.num_tokens - 1) if ready else 0

    def _give(self, scheduler: Scheduler, sequence: SequenceState, tried: _Tried, drafts: list[int]) -> int:
        """Let the next chunk verify these; returns how many are left of them."""
        scheduler.propose(sequence, drafts)
        self._remember(sequence, tried, [*sequence.drafts])
        return len(sequence.drafts)

    def _remember(self, sequence: SequenceState, tried: _Tried, drafts: list[int]) -> None:
        """The next step tells which of them are right."""
        tried.num_tokens, tried.drafts = sequence.num_tokens, drafts
        self._drafted += [(sequence, tried)] * bool(drafts)
