"""``/v1/completions``."""

from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rosebatch.core.errors import RowError
from rosebatch.io.openai.endpoint import Endpoint, ParsedBody, additions, completion_body, has_any
from rosebatch.io.openai.fields import GenerationBody, checked, generation_fields
from rosebatch.io.results import Choice, Result, ScoredToken


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
        tokens = [*(choice.prompt_logprobs or [] if choice.echo else []), *choice.logprobs]
        logprobs = {
            "tokens": [token.label for token in tokens],
            # The first token of a prompt has none; the client's type has no null.
            "token_logprobs": [token.logprob or 0.0 for token in tokens],
            "top_logprobs": [_likeliest(token) for token in tokens],
            "text_offset": _offsets(tokens, choice.text or ""),
        }
    fields = {"text": choice.text or "", "logprobs": logprobs, "finish_reason": choice.finish_reason}
    return {**fields, **additions(choice)}


def _likeliest(token: ScoredToken) -> dict[str, float]:
    """Log-probabilities by the tokens' texts, the token itself always included; none for the first of a prompt.

    If two tokens have the same text, the likelier one counts.
    """
    logprobs: dict[str, float] = {}
    for each in (*token.top, token):
        if each.logprob is not None:
            logprobs.setdefault(each.label, each.logprob)
    return logprobs


def _offsets(tokens: Sequence[ScoredToken], text: str) -> list[int]:
    """The place in the text where each token begins."""
    pieces = [b"" if token.special else token.raw or b"" for token in tokens]
    # Some tokenizers drop the space before a text's first word.
    shift = int(b"".join(pieces).startswith(b" ") and not text.startswith(" "))
    return [max(0, offset - shift) for offset in _character_offsets(pieces)]


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
