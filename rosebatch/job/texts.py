"""The prompts of some rows, encoded in one call."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any, TypeVar

from rosebatch.core.errors import RowError
from rosebatch.core.pooling_params import NamedPrompts
from rosebatch.core.token_ids import TokenIds
from rosebatch.core.words import counted
from rosebatch.engine.scheduling.servable import prompt_too_long
from rosebatch.io.read_ahead import grouped
from rosebatch.io.rows import Row
from rosebatch.text.long_texts import Bound
from rosebatch.text.text_pairs import Pair
from rosebatch.text.tokenizer import Tokenizer

# A text or token ids, or why there is no prompt; then the token ids, with the text if there is one.
_Prompt = str | Sequence[int] | RowError
Encoded = tuple[Sequence[int] | RowError, str | None]
# Of a prediction: hardly a token has more.
_CHARACTERS_OF_TOKEN = 16
_Given = TypeVar("_Given", bound=_Prompt)
# Characters of prompts that are encoded in one call.
_AT_ONCE = 1 << 19


class Texts:
    """The prompts of some rows with chats rendered, to be encoded in one call and on any thread.

    Args:
        rows: in any number.
        tokenizer: None for a model that works on token ids.
        max_model_len: most tokens of prompt and completion together. Long texts with more become errors.
        most_at_once: characters of a text that may be encoded as a whole.
        in_text: of prompts with images, see ``rosebatch.model.vision.vision.Vision``.

    Attributes:
        takes_time: whether there is a text to encode, and not token ids alone.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer | None,
        max_model_len: int,
        most_at_once: int,
        in_text: tuple[str, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts = [_plain_prompts(row, tokenizer) for row in rows]
        if in_text is not None:
            self._prompts = [
                [_with_places(prompt, in_text) for prompt in prompts] if row.images else prompts
                for row, prompts in zip(rows, self._prompts, strict=True)
            ]
        self._chats: list[str | RowError] = []
        # Lists: generators would take twice as long.
        others = [row.messages is not None or bool(row.pairs) for row in rows]
        texts = [isinstance(prompt, str) for prompts in self._prompts for prompt in prompts]
        self.takes_time = any(others) or any(texts)
        if not self.takes_time:
            return
        self._pairs = [row.pairs for row in rows]
        self._continuations = [
            [each for each in row.continuations if isinstance(each, str)] if row.continuations else [] for row in rows
        ]
        self._predictions = [(row.prediction, min(row.sampling.max_tokens, max_model_len)) for row in rows]
        self._has_chat = [row.messages is not None for row in rows]
        self._bounds = _bounds(rows, max_model_len, most_at_once)
        if tokenizer is not None and any(self._has_chat):
            chats = [row for row in rows if row.messages is not None]
            self._chats = tokenizer.render([r.messages or [] for r in chats], [template_options(r) for r in chats])
            if in_text is not None:
                self._chats = [
                    _with_places(chat, in_text) if row.images else chat
                    for row, chat in zip(chats, self._chats, strict=True)
                ]

    def encode(self) -> list[list[Encoded]]:
        """For each row, its prompts as token ids, and their texts if they have any.

        After a prompt that is scored: the same with each continuation that is a text, unless the prompt is refused.
        After that of a chat with a prediction: the tokens of this, as many as the answer may have.
        """
        if not self.takes_time:
            # All are token ids, or errors.
            return [list(zip(prompts, repeat(None))) for prompts in self._prompts]  # type: ignore[arg-type]
        rows = list(zip(self._prompts, self._has_chat, self._bounds, strict=True))
        texts = [(prompt, bound) for prompts, _, bound in rows for prompt in prompts if isinstance(prompt, str)]
        if self._tokenizer is None:
            refusal = RowError("no_tokenizer", "the model has no tokenizer: give --tokenizer or prompt_token_ids")
            encoded: Iterator[Sequence[int] | RowError] = repeat(refusal)
            chats: Iterator[tuple[Sequence[int] | RowError, str | None]] = repeat((refusal, None))
        else:
            encoded = _some_at_a_time(self._tokenizer, texts)
            rendered = (chat if isinstance(chat, str) else None for chat in self._chats)
            bounds = [bound for _, has_chat, bound in rows if has_chat]
            chats = zip(self._tokenizer.encode_rendered(self._chats, bounds), rendered, strict=True)

        def of_row(prompts: Iterable[_Prompt], has_chat: bool) -> Iterator[Encoded]:
            yield from islice(chats, int(has_chat))
            for prompt in prompts:
                yield (next(encoded), prompt) if isinstance(prompt, str) else (prompt, None)

        found = [list(of_row(prompts, has_chat)) for prompts, has_chat, _ in rows]
        self._add_continued(found)
        self._add_pairs(found)
        self._add_predictions(found)
        return found

    def _add_continued(self, found: Sequence[list[Encoded]]) -> None:
        """Add the prompts with their continuations, some at a time: together they may be a thousand times the row.

        So they come after the prompts alone, of which those that are too long have none.
        """
        tokenizer = self._tokenizer
        for own, continuations, has_chat, bound in zip(
            found, self._continuations, self._has_chat, self._bounds, strict=True
        ):
            if tokenizer is None or not continuations or isinstance(own[0][0], RowError):
                continue
            encode = tokenizer.encode_rendered if has_chat else tokenizer.encode
            text = own[0][1] or ""
            at_once = max(1, _AT_ONCE // len(text))
            for start in range(0, len(continuations), at_once):
                texts = [text + each for each in continuations[start : start + at_once]]
                own += [(_packed(ids), None) for ids in encode(texts, [bound] * len(texts))]

    def _add_predictions(self, found: Sequence[list[Encoded]]) -> None:
        for own, (prediction, most) in zip(found, self._predictions, strict=True):
            if prediction and self._tokenizer is not None:
                (ids,) = self._tokenizer.encode_rendered([prediction[: most * _CHARACTERS_OF_TOKEN]])
                own.append((ids if isinstance(ids, RowError) else TokenIds.of(ids[:most]), None))

    def _add_pairs(self, found: Sequence[list[Encoded]]) -> None:
        """Add the prompts of pairs. Those of rows with the same bound are encoded together, by all cores."""
        by_bound: dict[Bound, list[tuple[list[Encoded], Sequence[Pair]]]] = {}
        for own, given, bound in zip(found, self._pairs, self._bounds, strict=True):
            if given and not own:
                by_bound.setdefault(bound, []).append((own, given))
        for bound, rows in by_bound.items():
            encoded: Iterator[list[int] | RowError]
            if self._tokenizer is None:
                encoded = repeat(RowError("no_tokenizer", "the model has no tokenizer: it scores no texts"))
            else:
                prompts = self._tokenizer.prompts
                every = [pair for _, pairs in rows for pair in _for_model(pairs, prompts)]
                encoded = self._tokenizer.encode_pairs(every, bound.last or None, bound)
            for own, pairs in rows:
                packed = [_packed(token_ids) for token_ids in islice(encoded, len(pairs))]
                # One that is refused is the row's error.
                refused = next((each for each in packed if isinstance(each, RowError)), None)
                own += [(each, None) for each in (packed if refused is None else [refused])]


def _for_model(pairs: Sequence[tuple[str, str]], prompts: NamedPrompts) -> Sequence[tuple[str, str]]:
    """Pairs with the model's prompt in front, and in small letters if it wants them."""
    front = prompts.named(None)
    if not front and not prompts.lower_case:
        return pairs

    def text(given: str) -> str:
        return given.lower() if prompts.lower_case else given

    # Not one for each pair: a long text may be in all of them.
    firsts = {first: text(front + first) for first in dict.fromkeys(first for first, _ in pairs)}
    seconds = {second: text(second) for second in dict.fromkeys(second for _, second in pairs)}
    return [(firsts[first], seconds[second]) for first, second in pairs]


def _some_at_a_time(tokenizer: Tokenizer, texts: Iterable[tuple[str, Bound]]) -> Iterator[Sequence[int] | RowError]:
    """Token ids of each text: a row may have thousands, as a list of prompts."""
    for group in grouped(iter(texts), lambda each: len(each[0]), _AT_ONCE, _AT_ONCE):
        encoded = tokenizer.encode([text for text, _ in group], [bound for _, bound in group])
        yield from map(_packed, encoded)


def _packed(token_ids: Sequence[int] | RowError) -> Sequence[int] | RowError:
    """In 32 bits each: a row may have the same ones a thousand times."""
    return token_ids if isinstance(token_ids, RowError) else TokenIds.of(token_ids)


def _bounds(rows: Sequence[Row], max_model_len: int, most_at_once: int) -> list[Bound]:
    """How many tokens each prompt of a row may have. The engine finds the few more of short texts.

    Rows that have the same bound share it.
    """
    made: dict[tuple[int, bool, bool], Bound] = {}

    def of(row: Row) -> Bound:
        # The prompt is cut, and not its continuations.
        truncate = 0 if row.continuations else row.options.kept(max_model_len)
        kind = truncate, row.generates, row.continuations is not None
        if kind not in made:
            # The last token of a text is not computed where it is scored.
            longest = max_model_len + (row.continuations is not None)
            has = f"more than {counted(max_model_len, 'token')}"
            refusal = prompt_too_long(has, max_model_len, is_pooled=not row.generates)
            made[kind] = Bound(truncate, longest, refusal, most_at_once)
        return made[kind]

    return list(map(of, rows))


def template_options(row: Row) -> dict[str, Any]:
    """Variables of a row's chat template."""
    return row.options.template if row.tool_use is None else {**row.options.template, "tools": row.tool_use.tools}


def _with_places(given: _Given, in_text: tuple[str, str]) -> _Given | str:
    mark, place = in_text
    # Who writes all of a place wants nothing more around it.
    return given if not isinstance(given, str) or place.strip() in given else given.replace(mark, place)


def _plain_prompts(row: Row, tokenizer: Tokenizer | None) -> list[_Prompt]:
    """The prompts of a row, except a chat."""
    if row.prompt_token_ids is not None and row.pooling is None:
        return [row.prompt_token_ids]
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
    return [text(row.prompt)]
