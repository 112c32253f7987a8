"""A head that is asked for drafts, and how many of them are worth their time."""

from collections.abc import Callable, Sequence

from rosebatch.engine.drafts.window_drafter import expected
from rosebatch.engine.plan import DraftRequest

_MOST = 7
# What drafts must save, of a step.
_LEAST = 1.03
# Of what rows told, how much counts beside what a newer row tells.
_OLDER = 0.97
# A new head is right in two of three drafts, until rows tell.
_FIRST_RIGHT, _FIRST_TRIED = 2.0, 3.0
# Rows and steps that a head is left alone, between two tries whether it is worth its time by now.
_PAUSE = 32


class AskedHead:
    """Learns of all rows how often a head is right: it was trained for the model, and not for a row.

    Args:
        ask: makes the drafts, as many as are asked for; see ``DraftRequest``.
        cost: of a draft, in units of a step.
    """

    def __init__(self, ask: Callable[[Sequence[DraftRequest]], list[list[int]]], cost: float) -> None:
        self.ask = ask
        self.cost = cost
        self._right, self._tried = _FIRST_RIGHT, _FIRST_TRIED
        self._paused = 0

    def most(self) -> int:
        """How many drafts a row should ask for now."""
        share = self._right / self._tried
        gains = [expected(share, 1 + drafts) / (1 + self.cost * drafts) for drafts in range(_MOST + 1)]
        best = max(range(_MOST + 1), key=lambda drafts: gains[drafts])
        if gains[best] >= _LEAST:
            return best
        self._paused += 1
        return int(self._paused % _PAUSE == 0)

    def learn(self, right: int, drafts: int) -> None:
        """So many of a row's drafts were right: nothing is known of those behind the first wrong one."""
        self._right = _OLDER * self._right + right
        self._tried = _OLDER * self._tried + right + (right < drafts)
