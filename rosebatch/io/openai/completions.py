"""``/v1/completions``."""

from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from rosebatch.core.errors import RowError
from rosebatch.io.openai.endpoint import Endpoint, ParsedBody, additions, completion_body, has_any
from rosebatch.io.openai.fields import GenerationBody, checked, generation_fields
from rosebatch.io.results import Choice, Result
from rosebatch.io.scored_tokens import ScoredToken, ScoredTokens


class _Body(GenerationBody):
    prompt: str | list[Any] | None = None


def _parse(values: dict[str, Any], defaults: Mapping[str, Any]) -> ParsedBody:
    body = checked(values, _Body)
    if body.messages is not None:
        raise RowError("invalid_field", f"messages cannot be used with {COMPLETIONS.url}")
    if body.logprobs is True:
        raise RowError("invalid_field", f"logprobs of {COMPLETIONS.url} must be the number of likeliest tokens")
    prompts = prompts_of(body.prompt)
    one = prompts[0] if len(prompts) == 1 else None
    if body.suffix and not isinstance(one, str):
        raise RowError("invalid_field", "suffix needs one prompt, given as text")
    return ParsedBody(
        {
            **generation_fields(body, values, defaults, chat=False),
            "prompt": one if isinstance(one, str) else None,
            "prompt_token_ids": one if isinstance(one, tuple) else None,
            "prompts": prompts if one is None else (),
        }
    )


def _body(result: Result, model: str, created: int) -> dict[str, Any]:
    choices = list(map(_choice, result.choices))
    return completion_body(result, model, created, choices, prefix="cmpl", kind="text_completion")


def prompts_of(prompt: str | list[Any] | None, name: str = "prompt") -> tuple[str | tuple[int, ...], ...]:
    """One prompt or several, each as text or token ids, from the field ``name``.

    Raises:
        RowError: it has none, or they are something else.
    """
    if not prompt:
        raise RowError("missing_prompt", f"{name} is missing or empty")
    if isinstance(prompt, str):
        return (prompt,)
    several = prompt if all(isinstance(each, (str, list)) for each in prompt) else [prompt]
    for each in several:
        if not each:
            raise RowError("missing_prompt", f"{name} is missing or empty")
        if not isinstance(each, str) and not all(type(token) is int for token in each):
            raise RowError("invalid_field", f"{name} must be a text, a list of token ids, or a list of these")
    return tuple(each if isinstance(each, str) else tuple(each) for each in several)


def _choice(choice: Choice) -> dict[str, Any]:
    """A completion. If the prompt is echoed, its log-probabilities come first, in the same lists."""
    logprobs = None
    if choice.logprobs is not None:
        both = [choice.prompt_logprobs if choice.echo else None, choice.logprobs]
        scored = [_Scored.of(tokens) for tokens in both if tokens is not None]
        logprobs = {
            "tokens": [label for each in scored for label in each.labels],
            "token_logprobs": [value for each in scored for value in each.logprobs],
            "top_logprobs": [likeliest for each in scored for likeliest in each.likeliest],
            "text_offset": _offsets([piece for each in scored for piece in each.pieces], choice.text or ""),
        }
    fields = {"text": choice.text or "", "logprobs": logprobs, "finish_reason": choice.finish_reason}
    return {**fields, **additions(choice)}


class _Piece(NamedTuple):
    """A token's part of the text; how many characters it is, None unless these are whole."""

    raw: bytes
    length: int | None


class _Scored(NamedTuple):
    """Lists with an entry for each token. Objects of all tokens took four times as long.

    Attributes:
        labels: the tokens' texts.
        logprobs: the first token of a prompt has none; the client's type has no null.
        likeliest: log-probabilities by text, the token itself always included; none for the first of a prompt.
        pieces: of the text.
    """

    labels: list[str]
    logprobs: list[float]
    likeliest: list[dict[str, float]]
    pieces: list[_Piece]

    @classmethod
    def of(cls, tokens: ScoredTokens) -> "_Scored":
        ids, values, width = tokens.logprobs.columns()
        first, table = [] if tokens.first is None else [tokens.first], tokens.table
        labels = list(table.each(_label, ids))
        return cls(
            [*table.each(_label, first), *labels[::width]],
            [0.0 for _ in first] + [value or 0.0 for value in values[::width]],
            [{} for _ in first]
            + [_likeliest(labels[at : at + width], values[at : at + width]) for at in range(0, len(ids), width)],
            list(table.each(_piece, first + ids[::width])),
        )


def _label(token: ScoredToken) -> str:
    return token.label


def _piece(token: ScoredToken) -> _Piece:
    raw = b"" if token.special else token.raw or b""
    try:
        return _Piece(raw, len(raw.decode()))
    except UnicodeDecodeError:
        return _Piece(raw, None)


def _likeliest(labels: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Log-probabilities of a token's likeliest ones and, behind them, its own. Its own comes first in the arguments.

    If two tokens have the same text, the likelier one counts.
    """
    found = dict(zip(labels[1:], values[1:], strict=True))
    if len(found) < len(labels) - 1:
        for label, value in zip(reversed(labels[1:]), reversed(values[1:]), strict=True):
            found[label] = value
    found.setdefault(labels[0], values[0])
    return found


def _offsets(pieces: Sequence[_Piece], text: str) -> list[int]:
    """The place in the text where each token begins."""
    raw = [piece.raw for piece in pieces]
    lengths = [piece.length for piece in pieces if piece.length is not None]
    whole = len(lengths) == len(pieces)
    offsets = accumulate(lengths[:-1], initial=0) if whole and lengths else _character_offsets(raw)
    # Some tokenizers drop the space before a text's first word.
    shift = int(b"".join(raw).startswith(b" ") and not text.startswith(" "))
    return [max(0, offset - shift) for offset in offsets]


def _character_offsets(pieces: Sequence[bytes]) -> Iterator[int]:
    """Characters before each piece of a text in UTF-8. What is no whole character is one, U+FFFD."""
    decoder, length = getincrementaldecoder("utf-8")(errors="replace"), 0
    for piece in pieces:
        pending = decoder.getstate()[0]
        first = decoder.decode(piece[:1])
        # The piece does not go on with the bytes before it: these are a character of their own.
        is_broken = bool(pending and first) and (len(first) > 1 or bool(decoder.getstate()[0]))
        yield length + is_broken
        length += len(first) + len(decoder.decode(piece[1:]))


COMPLETIONS = Endpoint("/v1/completions", _parse, _body, lambda body: not has_any(body, ["input"]))
