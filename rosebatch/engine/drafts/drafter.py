"""Which sequences get drafts in the next step, and how many."""

from array import array
from dataclasses import dataclass

import numpy as np

from rosebatch.engine.drafts.history import find_ending, goes_on, what_followed
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.sequence import SequenceState

# Steps that a sequence without a right draft goes without another try: twice as many each time. A sequence whose ending
# was nowhere before goes fewer: a copy may begin at any step.
_LONGEST_PAUSE, _LONGEST_PAUSE_UNFOUND = 64, 4


@dataclass(slots=True)
class _Tried:
    """What became of a sequence's last drafts.

    Attributes:
        num_tokens: of the sequence when they were proposed.
        drafts: how many they were.
        most: how many the next ones may be.
        pause, left: steps without another try, and those of them to come.
        distance: from the end of the sequence back to the place where it goes on alike; 0 for none.
    """

    num_tokens: int = 0
    drafts: int = 0
    most: int = 1
    pause: int = 0
    left: int = 0
    distance: int = 0

    def judge(self, num_tokens: int) -> None:
        """Learn from the tokens that came since: twice as many if all were right, a pause if none was."""
        right = min(num_tokens - self.num_tokens - 1, self.drafts)
        self.most = 2 * self.drafts if right == self.drafts else max(right, 1)
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
    free, those with the longest known ending first. Nothing depends on time, so a second run takes the same steps.

    Args:
        free_tokens: of a step, those of sequences without drafts included.
        most: drafts of a sequence.
    """

    def __init__(self, *, free_tokens: int, most: int) -> None:
        self.free_tokens = free_tokens
        self.most = most
        self._tried: dict[int, _Tried] = {}
        # Those with drafts in the last plan.
        self._drafted: list[SequenceState] = []

    def propose(self, scheduler: Scheduler) -> None:
        """Give drafts to running sequences, for the plan that comes next; none is under way."""
        for sequence in self._drafted:
            self._tried[sequence.id].judge(sequence.num_tokens)
        self._drafted = []
        running = scheduler.queues.running
        room = self.free_tokens - sum([s.num_uncomputed_tokens for s in running]) - len(scheduler.queues.waiting)
        if room <= 0 or not running:
            return
        before, self._tried = self._tried, {}
        answers = array("I") if scheduler.planner.answers is None else scheduler.planner.answers.tokens
        found: list[tuple[int, SequenceState, np.ndarray]] = []
        for sequence in running:
            tried = self._tried[sequence.id] = before.get(sequence.id) or _Tried()
            if tried.left:
                tried.left -= 1
            elif sequence.decoding and sequence.num_uncomputed_tokens == 1:
                own = np.frombuffer(answers + sequence.spec.predicted + sequence.token_ids, np.uint32)
                length, distance = find_ending(own)
                tried.distance = distance or (tried.distance if goes_on(own, tried.distance) else 0)
                if tried.distance:
                    found.append((length, sequence, what_followed(own, tried.distance, min(self.most, tried.most))))
                else:
                    tried.wait(_LONGEST_PAUSE_UNFOUND)
        for _, sequence, drafts in sorted(found, key=lambda each: -each[0]):
            scheduler.propose(sequence, drafts[:room].tolist())
            tried = self._tried[sequence.id]
            tried.num_tokens, tried.drafts = sequence.num_tokens, len(sequence.drafts)
            self._drafted += [sequence] * bool(sequence.drafts)
            room -= len(sequence.drafts)
            if room <= 0:
                break
