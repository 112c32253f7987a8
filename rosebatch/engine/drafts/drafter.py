"""Which sequences get drafts in the next step, and how many."""

from array import array
from dataclasses import dataclass, field

import numpy as np

from rosebatch.engine.drafts.asked_head import AskedHead
from rosebatch.engine.drafts.history import find_ending, goes_on, what_followed
from rosebatch.engine.plan import DraftRequest
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.sequence import SequenceState

# Steps that a sequence without a right draft goes without another try: twice as many each time. A sequence whose ending
# was nowhere before goes fewer: a copy may begin at any step.
_LONGEST_PAUSE, _LONGEST_PAUSE_UNFOUND = 64, 4


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
        came = token_ids[self.num_tokens :]
        right = _num_right(self.drafts, came)
        if right == len(self.drafts):
            self.most = 2 * right
        elif right < len(came):
            # Where other drafts were verified in their place, the rest of them is not known.
            self.most = max(right, 1)
        if right:
            self.pause = self.left = 0
        else:
            self.wait(_LONGEST_PAUSE)

    def wait(self, longest: int) -> None:
        """Pause, twice as long as the last time, and no longer than this."""
        self.left = self.pause = min(max(2 * self.pause, 1), longest)


class Drafter:
    """Proposes drafts before each step, as many as cost nearly nothing there.

    A step takes about as long for a few tokens as for one: it reads all weights. So sequences share the tokens that are
    free, those with the longest known ending first, and behind them those that a head drafts for. A sequence gets what
    is longer of both. Nothing depends on time, so a second run takes the same steps.

    Args:
        free_tokens: of a step, those of sequences without drafts included.
        most: drafts of a sequence.
        head: drafts too; None without one.
    """

    def __init__(self, *, free_tokens: int, most: int, head: AskedHead | None = None) -> None:
        self.free_tokens = free_tokens
        self.most = most
        self.head = head
        self._tried: dict[int, _Tried] = {}
        # Those with drafts for the last plan: copies, also where the head's are verified, and the head's.
        self._copied: list[SequenceState] = []
        self._asked: list[tuple[SequenceState, int, list[int]]] = []

    def propose(self, scheduler: Scheduler) -> None:
        """Give drafts to running sequences, for the plan that comes next; none is under way."""
        self._learn()
        running = scheduler.queues.running
        room = self.free_tokens - sum([s.num_uncomputed_tokens for s in running]) - len(scheduler.queues.waiting)
        if room <= 0 or not running:
            return
        before, self._tried = self._tried, {}
        answers = array("I") if scheduler.planner.answers is None else scheduler.planner.answers.tokens
        copies: list[tuple[int, SequenceState, list[int]]] = []
        asked: list[tuple[SequenceState, int]] = []
        for sequence in running:
            tried = self._tried[sequence.id] = before.get(sequence.id) or _Tried()
            ready = sequence.decoding and sequence.num_uncomputed_tokens == 1
            length, drafts = self._copy(sequence, tried, answers, ready=ready)
            most = 0
            if ready and self.head is not None:
                most = min(self.head.most(), sequence.spec.decode_len - sequence.num_tokens - 1)
            if most > len(drafts):
                asked.append((sequence, most))
                # Those of the head tell whether these would have been right.
                self._remember(sequence, drafts)
            elif drafts:
                copies.append((length, sequence, drafts))
        for _, sequence, drafts in sorted(copies, key=lambda each: -each[0]):
            scheduler.propose(sequence, drafts[:room])
            self._remember(sequence, [*sequence.drafts])
            room -= len(sequence.drafts)
            if room <= 0:
                return
        # Each as many as all can have.
        if self.head is None or not (asked := asked[:room]):
            return
        requests = [
            DraftRequest(s.id, s.token_ids[-1], s.num_computed_tokens, min(most, room // len(asked)))
            for s, most in asked
        ]
        for (sequence, _), drafts in zip(asked, self.head.ask(requests), strict=True):
            scheduler.propose(sequence, drafts)
            self._asked += [(sequence, sequence.num_tokens, [*sequence.drafts])] * bool(sequence.drafts)

    def _learn(self) -> None:
        """From the tokens that came since the last drafts."""
        for sequence in self._copied:
            self._tried[sequence.id].judge(sequence.token_ids)
        for sequence, num_tokens, drafts in self._asked:
            came = sequence.token_ids[num_tokens:]
            if self.head is not None:
                # Behind an end, nothing is known of the rest.
                self.head.learn(_num_right(drafts, came), min(len(drafts), len(came)))
        self._copied, self._asked = [], []

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

    def _remember(self, sequence: SequenceState, drafts: list[int]) -> None:
        """The next step tells which of these copies are right."""
        if drafts:
            tried = self._tried[sequence.id]
            tried.num_tokens, tried.drafts = sequence.num_tokens, drafts
            self._copied.append(sequence)


def _num_right(drafts: list[int], came: "array[int]") -> int:
    """How many drafts are the tokens that came, up to the first that is not."""
    pairs = enumerate(zip(drafts, came, strict=False))
    return next((n for n, (draft, token_id) in pairs if draft != token_id), min(len(drafts), len(came)))
