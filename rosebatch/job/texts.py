"""The prompts of some rows, encoded in one call."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any

from rosebatch.core.errors import RowError
from rosebatch.core.words import counted
from rosebatch.engine.scheduling.servable import prompt_too_long
from rosebatch.io.rows import Row
from rosebatch.text.long_texts import Bound
from rosebatch.text.tokenizer import Tokenizer

# A text or token ids, or why there is no prompt; then the token ids, with the text if there is one.
_Prompt = str | Sequence[int] | RowError
Encoded = tuple[Sequence[int] | RowError, str | None]


class Texts:
    """The prompts of some rows with chats rendered, to be encoded in one call and on any thread.

    Args:
        rows: in any number.
        tokenizer: None for a model that works on token ids.
        max_model_len: most tokens of prompt and completion together. Long texts with more become errors.
        most_at_once: characters of a text that may be encoded as a whole.

    Attributes:
        takes_time: whether there is a text to encode, and not token ids alone.
    """

    def __init__(self, rows: Sequence[Row], tokenizer: Tokenizer | None, max_model_len: int, most_at_once: int) -> None:
        self._tokenizer = tokenizer
        self._prompts = [_plain_prompts(row, tokenizer) for row in rows]
        self._pairs = [(row.pairs, row.options.truncate_prompt_tokens) for row in rows]
        self._chats: list[str | RowError] = []
        self._num_chats = [0 if row.messages is None else 1 + len(_continuations(row)) for row in rows]
        self.takes_time = (
            any(self._num_chats)
            or any(pairs for pairs, _ in self._pairs)
            or any(isinstance(prompt, str) for prompts in self._prompts for prompt in prompts)
        )
        self._bounds = [_bound(row, max_model_len, most_at_once) for row in rows] if self.takes_time else []
        if tokenizer is not None and any(self._num_chats):
            chats = [row for row in rows if row.messages is not None]
            rendered = tokenizer.render([r.messages or [] for r in chats], [template_options(r) for r in chats])
            self._chats = [
                each + then if isinstance(each, str) else each
                for row, each in zip(chats, rendered, strict=True)
                for then in ("", *_continuations(row))
            ]

    def encode(self) -> list[list[Encoded]]:
        """For each row, its prompts as token ids, and their texts if they have any.

        After a prompt that is scored: the same with each continuation that is a text.
        """
        if not self.takes_time:
            return [[(prompt, None) for prompt in prompts if not isinstance(prompt, str)] for prompts in self._prompts]
        rows = list(zip(self._prompts, self._num_chats, self._bounds, strict=True))
        texts = [(prompt, bound) for prompts, _, bound in rows for prompt in prompts if isinstance(prompt, str)]
        if self._tokenizer is None:
            refusal = RowError("no_tokenizer", "the model has no tokenizer: give prompt_token_ids")
            encoded: Iterator[Sequence[int] | RowError] = repeat(refusal)
            chats: Iterator[tuple[Sequence[int] | RowError, str | None]] = repeat((refusal, None))
        else:
            encoded = iter(self._tokenizer.encode([text for text, _ in texts], [bound for _, bound in texts]))
            rendered = (chat if isinstance(chat, str) else None for chat in self._chats)
            bounds = [bound for _, num_chats, bound in rows for _ in range(num_chats)]
            chats = zip(self._tokenizer.encode_rendered(self._chats, bounds), rendered, strict=True)

        def of_row(prompts: Iterable[_Prompt], num_chats: int) -> Iterator[Encoded]:
            yield from islice(chats, num_chats)
            for prompt in prompts:
                yield (next(encoded), prompt) if isinstance(prompt, str) else (prompt, None)

        found = [list(of_row(prompts, num_chats)) for prompts, num_chats, _ in rows]
        return [own or self._of_pairs(*pairs) for own, pairs in zip(found, self._pairs, strict=True)]

    def _of_pairs(self, pairs: Sequence[tuple[str, str]], longest: int | None) -> list[Encoded]:
        if self._tokenizer is None:
            return [(RowError("no_tokenizer", "the model has no tokenizer: it scores no texts"), None)]
        return [(token_ids, None) for token_ids in self._tokenizer.encode_pairs(pairs, longest or None)]


def _bound(row: Row, max_model_len: int, most_at_once: int) -> Bound:
    """How many tokens each prompt of a row may have. The engine finds the few more of short texts."""
    error = prompt_too_long(f"more than {counted(max_model_len, 'token')}", max_model_len, is_pooled=not row.generates)
    # The last token of a text is not computed where it is scored.
    longest = max_model_len + (row.continuations is not None)
    # The prompt is cut, and not its continuations.
    truncate = 0 if row.continuations else row.options.truncate_prompt_tokens
    return Bound(truncate, longest, error, most_at_once)


def _continuations(row: Row) -> list[str]:
    """Those that are texts."""
    return [each for each in row.continuations or () if isinstance(each, str)]


def template_options(row: Row) -> dict[str, Any]:
    """Variables of a row's chat template."""
    return row.options.template if row.tool_use is None else {**row.options.template, "tools": row.tool_use.tools}


def _plain_prompts(row: Row, tokenizer: Tokenizer | None) -> list[_Prompt]:
    """The prompts of a row, except a chat."""
    front, lower_case = "", False
    if row.pooling is not None and tokenizer is not None:
        lower_case = tokenizer.prompts.lower_case
        try:
            front = tokenizer.prompts.named(row.pooling.prompt_name)
        except RowError as error:
            return [error]

    def text(prompt: str) -> str:
        return (front + prompt).lower() if lower_case else front + prompt

    if row.prompts:
        return [text(prompt) if isinstance(prompt, str) else prompt for prompt in row.prompts]
    if row.prompt_token_ids is not None:
        return [row.prompt_token_ids]
    if row.prompt is None:
        return []
    if row.options.suffix and tokenizer is not None:
        return [tokenizer.fill_in_middle(row.prompt, row.options.suffix)]
    return [text(row.prompt), *(row.prompt + each for each in _continuations(row))]
