"""The prompts of some rows, encoded in one call."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

from rosebatch.core.errors import RowError
from rosebatch.io.rows import Row
from rosebatch.text.tokenizer import Tokenizer

# A text or token ids, or why there is no prompt; then the token ids, with the text if there is one.
_Prompt = str | Sequence[int] | RowError
Encoded = tuple[Sequence[int] | RowError, str | None]


class Texts:
    """The prompts of some rows with chats rendered, to be encoded in one call and on any thread."""

    def __init__(self, rows: Sequence[Row], tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._prompts = [_plain_prompts(row, tokenizer) for row in rows]
        self._chats: list[str | RowError] = []
        self._is_chat = [row.messages is not None for row in rows]
        if tokenizer is not None:
            chats = [row for row in rows if row.messages is not None]
            self._chats = tokenizer.render([r.messages or [] for r in chats], [template_options(r) for r in chats])

    def encode(self) -> list[list[Encoded]]:
        """For each row, its prompts as token ids, and their texts if they have any."""
        texts = [prompt for prompts in self._prompts for prompt in prompts if isinstance(prompt, str)]
        if self._tokenizer is None:
            refusal = RowError("no_tokenizer", "the model has no tokenizer: give prompt_token_ids")
            encoded: Iterator[Sequence[int] | RowError] = repeat(refusal)
            chats: Iterator[tuple[Sequence[int] | RowError, str | None]] = repeat((refusal, None))
        else:
            encoded = iter(self._tokenizer.encode(texts))
            rendered = (chat if isinstance(chat, str) else None for chat in self._chats)
            chats = zip(self._tokenizer.encode_rendered(self._chats), rendered, strict=True)

        def of_row(prompts: Iterable[_Prompt], is_chat: bool) -> Iterator[Encoded]:
            if is_chat:
                yield next(chats)
            for prompt in prompts:
                yield (next(encoded), prompt) if isinstance(prompt, str) else (prompt, None)

        return [list(of_row(*row)) for row in zip(self._prompts, self._is_chat, strict=True)]


def template_options(row: Row) -> dict[str, Any]:
    """Variables of a row's chat template."""
    return row.options.template if row.tool_use is None else {**row.options.template, "tools": row.tool_use.tools}


def _plain_prompts(row: Row, tokenizer: Tokenizer | None) -> list[_Prompt]:
    """The prompts of a row, except a chat."""
    front = ""
    if row.pooling is not None and tokenizer is not None:
        try:
            front = tokenizer.prompts.named(row.pooling.prompt_name)
        except RowError as error:
            return [error]
    if row.prompts:
        return [front + prompt if isinstance(prompt, str) else prompt for prompt in row.prompts]
    if row.prompt_token_ids is not None:
        return [row.prompt_token_ids]
    if row.prompt is None:
        return []
    if row.options.suffix and tokenizer is not None:
        return [tokenizer.fill_in_middle(row.prompt, row.options.suffix)]
    return [front + row.prompt]
