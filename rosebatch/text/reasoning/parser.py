"""What every form of reasoning has in common."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Split(NamedTuple):
    """The tokens of an answer.

    Attributes:
        thoughts: without the marks around them; None if the model did not think.
        rest: what remains for the answer.
    """

    thoughts: list[int] | None
    rest: list[int]


class Thinking(Protocol):
    """Follows one answer, token by token.

    Attributes:
        open: whether the last token was a thought, or the mark before one.
        over: whether the answer has begun.
        count: thoughts so far.
    """

    open: bool
    over: bool
    count: int

    def feed(self, token_id: int) -> None:
        """Take the next token."""
        ...


# The tokens that may come at one place.
Allowed = tuple[int, ...]


class ReasoningFormat(Protocol):
    """A form of reasoning.

    Attributes:
        marks: names of the special tokens that an answer's text must keep to be read.
        reserved: tokens that no thought contains.
        begin: what is written before the first thought of an answer that must match a grammar; empty leaves it to the
            model whether it thinks.
        start: the token that the model may write instead of such an answer, to think first; None if ``begin`` is.
        end: what ends the thoughts and lets any answer follow.
    """

    marks: tuple[str, ...]
    reserved: tuple[int, ...]
    begin: tuple[Allowed, ...]
    start: int | None
    end: tuple[Allowed, ...]

    def has_ended(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt says that nothing is to be thought."""
        ...

    def follow(self, prompt: Sequence[int]) -> Thinking:
        """Follow the answer to a prompt."""
        ...

    def split(self, prompt: Sequence[int], token_ids: Sequence[int]) -> Split:
        """Tell thoughts and answer apart."""
        ...

    def answer(self, text: str, *, thought: bool) -> str:
        """The answer in the text of ``Split.rest``.

        Args:
            text: with ``marks``.
            thought: whether the model thought before.
        """
        ...

    def before_grammar(self, *, calls: bool) -> tuple[Allowed, ...]:
        """What is between the end of the thoughts and an answer that matches a grammar.

        Args:
            calls: whether the grammar is of tool calls.
        """
        ...
