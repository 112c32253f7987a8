"""Keeps reasoning within its budget, and starts a grammar where the reasoning ends."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rosebatch.core.request import Constraint, feed_rows, fill_rows
from rosebatch.text.reasoning.parser import Allowed, ReasoningFormat


class ReasoningConstraint:
    """Follows one completion (see ``rosebatch.core.request.Constraint``).

    Thoughts are free until the budget is spent; then their end is forced. Without a grammar the answer is free too.

    Args:
        form: of the reasoning.
        prompt: its tokens.
        budget: most thoughts; None for no limit.
        grammar: starts what the answer has to match; None for any answer.
        calls: whether that is a grammar of tool calls.
        vocab_size: width of the model's logits.
        end_ids: tokens that end a completion. Where an answer has to follow, no thought is one of them.
    """

    def __init__(
        self,
        form: ReasoningFormat,
        prompt: Sequence[int],
        budget: int | None,
        grammar: Callable[[], Constraint] | None,
        *,
        calls: bool,
        vocab_size: int,
        end_ids: Collection[int],
    ) -> None:
        self._form = form
        self._thinking = form.follow(prompt)
        self._budget = budget
        self._grammar = None if grammar is None else grammar()
        self._before_grammar = form.before_grammar(calls=calls)
        self._free = _all_but(vocab_size, frozenset(() if grammar is None else (*form.reserved, *end_ids)))
        # What has to come next, before anything else.
        self._forced: deque[Allowed] = deque(form.begin if grammar is not None else ())
        self._ended = self._answers = False
        self._force_end()

    @property
    def error(self) -> str | None:
        """See ``Constraint``."""
        return None if self._grammar is None else self._grammar.error

    @property
    def forces(self) -> bool:
        """See ``Constraint``: thoughts are free."""
        return self._grammar is not None and self._answers and self._grammar.forces

    @classmethod
    def fill_all(cls, constraints: "Sequence[ReasoningConstraint]", masks: Any) -> None:
        """See ``Constraint``."""
        bound = ((row, each._grammar) for row, each in enumerate(constraints) if each._follows_grammar)
        fill_rows({row: grammar for row, grammar in bound if grammar is not None}, masks)
        for mask, each in zip(masks, constraints, strict=True):
            each._fill(mask)

    def feed(self, token_id: int) -> bool:
        """See ``Constraint``."""
        if self._answers:
            return self._grammar is not None and self._grammar.feed(token_id)
        begins = self._follows_grammar
        if self._forced:
            self._forced.popleft()
        self._thinking.feed(token_id)
        if begins and not self._thinking.open:
            # The model answers at once.
            self._answers = True
            return self._grammar is not None and self._grammar.feed(token_id)
        if self._grammar is not None and self._thinking.over and not self._ended:
            self._ended = True
            self._forced = deque(self._before_grammar)
        self._force_end()
        self._answers = self._ended and not self._forced
        return False

    @classmethod
    def feed_all(cls, constraints: "Sequence[ReasoningConstraint]", token_ids: Sequence[int]) -> list[bool]:
        """See ``Constraint``."""
        answers = {
            row: each._grammar for row, each in enumerate(constraints) if each._answers and each._grammar is not None
        }
        ended = feed_rows(answers, token_ids)
        for row, each in enumerate(constraints):
            if row not in answers:
                ended[row] = each.feed(token_ids[row])
        return ended

    def follow(self, token_id: int) -> tuple[list[int], bool]:
        """See ``Constraint``."""
        if self._grammar is not None and self._answers:
            return self._grammar.follow(token_id)
        return [token_id], self.feed(token_id)

    def rest(self) -> Sequence[int]:
        """See ``Constraint``."""
        return ()

    def ahead(self, token_ids: Sequence[int]) -> Sequence[Constraint]:
        """See ``Constraint``."""
        return self._grammar.ahead(token_ids) if self._grammar is not None and self._answers else ()

    @property
    def _follows_grammar(self) -> bool:
        """Whether the next token is one of the grammar, or the one that opens the thoughts."""
        if self._grammar is None or self._forced:
            return False
        return self._answers or not self._thinking.open

    def _force_end(self) -> None:
        spent = self._budget is not None and self._thinking.open and self._thinking.count >= self._budget
        if spent and not self._forced:
            # With a grammar, only the mark: the rest follows from that.
            self._forced = deque(self._form.end if self._grammar is None else self._form.end[:1])

    def _fill(self, mask: Any) -> None:
        if self._forced:
            mask[:] = 0
            _allow(mask, self._forced[0])
        elif not self._follows_grammar:
            mask[:] = self._free
        elif not self._answers and self._form.start is not None:
            _allow(mask, (self._form.start,))


@lru_cache(maxsize=16)
def _all_but(vocab_size: int, others: frozenset[int]) -> Any:
    """A mask of all tokens but these: int32 [ceil(vocab_size / 32)]."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, bool)
    allowed[:vocab_size] = True
    allowed[[token_id for token_id in others if token_id < vocab_size]] = False
    return np.packbits(allowed, bitorder="little").view(np.int32)


def _allow(mask: Any, token_ids: Allowed) -> None:
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
