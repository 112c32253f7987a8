"""Where the sequences of an engine are: waiting, running, or at their end. No torch."""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, count

from rosebatch.engine.scheduling.sequence import SequenceState, Status


@dataclass(slots=True)
class SequenceQueues:
    """All unfinished sequences, each in one place. A running one has a slot of the runner.

    Attributes:
        waiting: in the order in which they are admitted. They hold no blocks, except forks that have their prompt's.
        running: the oldest first.
        ending: their last tokens are planned, and not known yet.
        planned: of the running, those whose last token the last plan may have.
        forked: forks of the last plan's prompts. They join the waiting before the next plan.
        started: those that a plan has had, by id.
        released: ids whose slots the next plan gives back.
    """

    waiting: deque[SequenceState] = field(default_factory=deque)
    running: list[SequenceState] = field(default_factory=list)
    ending: list[SequenceState] = field(default_factory=list)
    planned: list[SequenceState] = field(default_factory=list)
    forked: list[SequenceState] = field(default_factory=list)
    started: dict[int, SequenceState] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    # Forks that have yet to join the waiting, those of waiting prompts included.
    _num_forks: int = 0
    _turns: Iterator[int] = field(default_factory=lambda: count(1))

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.ending) + self._num_forks

    def __iter__(self) -> Iterator[SequenceState]:
        """All sequences but forks whose prompt is not computed: these hold no blocks."""
        return chain(self.running, self.ending, self.waiting, self.forked)

    @property
    def num_ending(self) -> int:
        """Those whose tokens are all planned: the next plan gives their slots to others."""
        return len(self.ending) + len(self._planned())

    def _planned(self) -> list[SequenceState]:
        """The running ones among these. Some have ended since they were planned, or have wrong drafts."""
        return [
            s
            for s in self.planned
            if s.status is Status.RUNNING
            and (pending := s.num_pending_tokens)
            and s.num_prompt_tokens + len(s.generated) + pending == s.spec.max_len
        ]

    def add(self, sequence: SequenceState) -> None:
        """Queue a new sequence after all others. Its forks follow when its prompt is computed."""
        self.waiting.append(sequence)
        self._num_forks += len(sequence.forks)

    def fork(self, sequence: SequenceState) -> None:
        """Take the forks of a sequence whose prompt is planned to its end."""
        self.forked += sequence.forks
        sequence.forks = []

    def join_forks(self) -> None:
        """Put the forks of the last plan before all that wait."""
        self.waiting.extendleft(reversed(self.forked))
        self._num_forks -= len(self.forked)
        self.forked = []

    def start_next(self) -> None:
        """Move the first that waits to the running: to their end, or where it was before it restarted."""
        sequence = self.waiting.popleft()
        sequence.status = Status.RUNNING
        if sequence.turn:
            insort(self.running, sequence, key=lambda each: each.turn)
        else:
            sequence.turn = next(self._turns)
            self.running.append(sequence)
        self.started[sequence.spec.id] = sequence

    def send_back(self, sequence: SequenceState, place: int = 0, *, keeps_turn: bool = False) -> None:
        """Let a running sequence, which has lost its blocks, wait behind ``place`` others. It keeps its tokens.

        ``keeps_turn``: it will be as old as it is, not the youngest.
        """
        self.running.remove(sequence)
        sequence.status = Status.WAITING
        sequence.decoding, sequence.resumed, sequence.drafts, sequence.ahead = False, False, (), ()
        sequence.num_seen_tokens, sequence.lags = 0, False
        if not keeps_turn:
            sequence.turn = 0
        self.released.append(sequence.id)
        self.waiting.insert(place, sequence)

    def end_planned(self) -> None:
        """Release the slots of sequences whose last token is planned."""
        if ending := self._planned():
            for sequence in ending:
                sequence.status = Status.ENDING
                self.released.append(sequence.spec.id)
            self.ending += ending
            self.running = [s for s in self.running if s.status is Status.RUNNING]
        self.planned = []

    def finish(self, sequences: list[SequenceState]) -> None:
        """Forget sequences that were running or ending."""
        if not sequences:
            return
        for sequence in sequences:
            if sequence.status is Status.RUNNING:
                self.released.append(sequence.id)
            sequence.status = Status.FINISHED
            del self.started[sequence.spec.id]
        self.running = [s for s in self.running if s.status is Status.RUNNING]
        self.ending = [s for s in self.ending if s.status is Status.ENDING]

    def clear(self) -> None:
        """Forget all sequences, and what was released."""
        for each in (self.waiting, self.running, self.ending, self.planned, self.forked, self.started, self.released):
            each.clear()
        self._num_forks = 0

    def check_integrity(self) -> None:
        """Assert that each sequence is where it belongs by its status and numbers."""
        assert [s.turn for s in self.running] == sorted(s.turn for s in self.running), "the oldest come first"
        for sequence in self.running:
            assert sequence.status is Status.RUNNING
            ends = sequence.num_pending_tokens and sequence.num_tokens == sequence.max_len
            assert not ends or any(sequence is each for each in self.planned), "what is planned to its end is known"
            assert sequence.num_computed_tokens < sequence.num_tokens <= sequence.max_len
        for sequence in self.ending:
            assert sequence.status is Status.ENDING and sequence.num_pending_tokens
        for sequence in self.waiting:
            assert sequence.status is Status.WAITING
            left = sequence.num_prompt_tokens - sequence.num_computed_tokens
            assert not sequence.tables or (left == 1 if sequence.snapshot is None else left > 0)
        assert all(self.started[s.id] is s for s in (*self.running, *self.ending)), "what runs was started"
        assert not any(s.status is Status.FINISHED for s in self.started.values()), "what finished is forgotten"
        unborn = sum(len(sequence.forks) for sequence in (*self.running, *self.waiting))
        assert self._num_forks == unborn + len(self.forked), "forks are counted once"
