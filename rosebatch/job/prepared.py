"""Rows that the engine can take: prompts as token ids, with seeds and grammars."""

from collections.abc import Sequence
from concurrent.futures import Future

import msgspec

from rosebatch.core.errors import RowError
from rosebatch.core.images import PromptImage
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.scoring import Scoring
from rosebatch.io.rows import FailedRow, Row
from rosebatch.job.memory_estimate import row_bytes
from rosebatch.text.chat_parsers import ChatReader
from rosebatch.text.grammar.check import Tried
from rosebatch.text.grammar.compiled import Grammar

# What rows under way may take, see ``RunConfig.max_inflight_bytes``.
DEFAULT_BYTES = 1 << 30


class PreparedPrompt(msgspec.Struct, frozen=True):
    """One prompt of a row.

    Attributes:
        token_ids: at least one, if the engine is to take it; ``TokenIds`` if they are of any model.
        sampling: with a seed if it samples.
        text: as given or rendered; None if it was given as token ids.
        echo: what the completion's text begins with.
        reader: splits reasoning and tool calls off a chat's answers; None if there is nothing to split.
        scoring: of a row that is scored; None if it is not.
        continuations: the numbers of those that end with the next tokens of ``scoring``.
        images: in the prompt, once they are loaded.
        predicted: see ``Request``.
    """

    token_ids: Sequence[int]
    sampling: SamplingParams
    text: str | None = None
    echo: str = ""
    reader: ChatReader | None = None
    scoring: Scoring | None = None
    continuations: tuple[int, ...] = ()
    images: tuple[PromptImage, ...] = ()
    predicted: Sequence[int] = ()


class Prepared(msgspec.Struct, frozen=True):
    """A row that can be served, as far as that is known without an engine.

    Attributes:
        row: as it was read.
        prompts: usually one.
        size: estimate of the bytes that it takes until its result is written, without its grammar.
        tried: what becomes of its grammar in another process.
        grammar: what its completions have to match, once it is compiled.
    """

    row: Row
    prompts: tuple[PreparedPrompt, ...]
    size: int = 0
    tried: Future[Tried] | None = None
    grammar: Grammar | None = None

    @property
    def num_completions(self) -> int:
        """Of all prompts together."""
        return len(self.prompts) * self.row.sampling.n

    def failed(self, error: RowError) -> FailedRow:
        """The row as one that could not be served."""
        return self.row.failed(error)


class End:
    """The end of a source, which None is not."""


END = End()


def size_of(item: Prepared | FailedRow) -> int:
    """Bytes of a row, also if it has failed."""
    return item.size if isinstance(item, Prepared) else row_bytes(item)
