"""From the completions of a row to its result: texts cut at stop strings, log-probabilities by token."""

from array import array
from collections.abc import Sequence

import msgspec

from rosebatch.core.request import Completion, PackedLogprobs
from rosebatch.io.labelled_tokens import LabelledTokens
from rosebatch.io.results import Choice, Result
from rosebatch.io.scored_tokens import ScoredTokens, TokenTable
from rosebatch.job.prepared import Prepared, PreparedPrompt
from rosebatch.job.scored_prompts import scores_of
from rosebatch.text.chat_parsers import ChatReader, ChatText
from rosebatch.text.spans import Spans
from rosebatch.text.stop_strings import cut_at_stop
from rosebatch.text.tokenizer import Tokenizer
from rosebatch.text.tool_calls.call import ToolCall


def result_of(
    prepared: Prepared,
    completions: Sequence[Completion],
    texts: Sequence[str | ChatText | Spans | None],
    tokenizer: Tokenizer | None,
    table: TokenTable,
    *,
    return_token_ids: bool,
) -> Result:
    """The result of a row.

    Args:
        prepared: the row.
        completions: ``n`` of its first prompt, then those of the next.
        texts: of all tokens of each completion, stop strings included; None without a tokenizer. Where tokens of
            prompts have labels: the places of these in the prompt's text.
        tokenizer: None for a model that works on token ids.
        table: of its tokens.
        return_token_ids: whether choices have token ids.
    """
    prompts, n = prepared.prompts, prepared.row.sampling.n
    choices: list[Choice] = []
    pooled: list[array[float]] = []
    tokens: list[LabelledTokens] = []
    scores = scores_of(prompts, completions) if prompts[0].scoring is not None else []
    prompt_tokens = completion_tokens = cached_tokens = 0
    first = completions[0]
    for number, (done, text) in enumerate(zip(completions, texts, strict=True)):
        request = done.request
        if not done.sample:
            # This one has what concerns the prompt.
            first = done
            prompt_tokens += len(request.prompt_token_ids)
            cached_tokens += done.cached_tokens
        completion_tokens += len(done.token_ids)
        if done.pooled is not None:
            pooled.append(done.pooled)
            if request.pooling is not None and request.pooling.of_tokens:
                own = _of_first_type(request.prompt_token_ids, tokenizer)
                spans = text if isinstance(text, Spans) else None
                tokens.append(LabelledTokens(own, done.pooled, request.pooling, spans, table))
        elif not scores and not isinstance(text, Spans):
            choices.append(_choice(prompts[number // n], done, text, first, tokenizer, table, return_token_ids))
    return Result(
        row=prepared.row,
        choices=choices,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=cached_tokens,
        pooled=pooled,
        tokens=tokens,
        scores=scores,
        prompt=prompts[0].text,
        completions=completions,
    )


def _of_first_type(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> Sequence[int]:
    """The same tokens by the ids that the tokenizer knows: those of the second type have others."""
    moved = 0 if tokenizer is None else tokenizer.prompts.second_text
    return [each % moved for each in token_ids] if moved and max(token_ids) >= moved else token_ids


def _choice(
    prompt: PreparedPrompt,
    completion: Completion,
    text: str | ChatText | None,
    first: Completion,
    tokenizer: Tokenizer | None,
    table: TokenTable,
    return_token_ids: bool,
) -> Choice:
    token_ids, sampling = list(completion.token_ids), prompt.sampling
    content, finish_reason, logprobs, prompt_logprobs = _NOTHING, completion.finish_reason, None, None
    whole, reasoning_tokens, stop_reason = None, 0, None
    if tokenizer is not None and text is not None:
        content = ended = _parse(text, prompt, token_ids, tokenizer)
        if isinstance(text, ChatText):
            reasoning_tokens = text.reasoning_tokens
            if text.whole is not None:
                before = _length_before_answer(text, text.whole, prompt, token_ids, tokenizer)
                ended = _parse(text.whole[before:], prompt, token_ids, tokenizer, before)
                whole = text.whole[:before] + (ended.text or "")
        # Only the whole text shows a stop string in the last characters of a completion that reached its length.
        finish_reason = "stop" if ended.cut else finish_reason
        stop_reason = ended.cut
        if stop_reason is None and sampling.stop and finish_reason == "stop" and not completion.has_end_token:
            # A special token, which is not in the text.
            last = tokenizer.backend.id_to_token(token_ids[-1])
            stop_reason = last if last in sampling.stop else None
        if ended.calls and finish_reason == "stop":
            finish_reason = "tool_calls"
    if sampling.logprobs is not None:
        logprobs = ScoredTokens(completion.logprobs or PackedLogprobs(), table)
    if sampling.prompt_logprobs is not None:
        prompt_logprobs = ScoredTokens(first.prompt_logprobs or PackedLogprobs(), table, prompt.token_ids[0])
    return Choice(
        text=_with_echo(content, prompt, completion, tokenizer) if prompt.echo else content.text,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        token_ids=token_ids if return_token_ids else None,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=bool(prompt.echo),
        reasoning=content.reasoning,
        reasoning_tokens=reasoning_tokens,
        tool_calls=content.calls,
        whole=whole,
    )


def _with_echo(
    content: "_Content", prompt: PreparedPrompt, completion: Completion, tokenizer: Tokenizer | None
) -> str | None:
    if content.text is None:
        return None
    # A prompt of token ids may end within a character.
    if prompt.echo.endswith("\ufffd") and not content.cut and tokenizer is not None:
        whole: str = tokenizer.backend.decode([*prompt.token_ids, *completion.text_token_ids])
        return whole
    return prompt.echo + content.text


class _Content(msgspec.Struct, frozen=True):
    """The parts of a completion; ``cut`` is the stop string that ended it."""

    text: str | None
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    cut: str | None = None


_NOTHING = _Content(None)


def _parse(
    text: str | ChatText, prompt: PreparedPrompt, token_ids: Sequence[int], tokenizer: Tokenizer, before: int = 0
) -> _Content:
    """The parts of a completion from its text, stop strings included.

    Args:
        text: of the completion, or of its answer alone.
        prompt: of the completion.
        token_ids: of the completion.
        tokenizer: of the model.
        before: characters of the completion before the text.
    """
    sampling, protected = prompt.sampling, 0
    if isinstance(text, str) and not sampling.stop:
        return _Content(text)
    first = token_ids[: sampling.min_tokens] if sampling.stop else ()
    if isinstance(text, str):
        if first:
            protected = len(tokenizer.decode(first, skip_special_tokens=sampling.skip_special_tokens)) - before
        plain, string = cut_at_stop(text, sampling.stop, max(0, protected), keep=sampling.include_stop_str_in_output)
        return _Content(plain, cut=string)
    assert prompt.reader is not None, "it has read the answer"
    if first:
        begin = prompt.reader.read(first)
        protected = len(prompt.reader.parse(begin.rest, thought=begin.reasoning_tokens > 0).content)
    return _parse_chat(text, prompt.reader, sampling.stop, protected, keep=sampling.include_stop_str_in_output)


def _length_before_answer(
    text: ChatText, whole: str, prompt: PreparedPrompt, token_ids: Sequence[int], tokenizer: Tokenizer
) -> int:
    """Characters of a whole text that no stop string ends: those of its thoughts."""
    if not prompt.sampling.stop or not text.tokens_before:
        return 0
    skip = prompt.sampling.skip_special_tokens
    begin = len(tokenizer.decode(token_ids[: text.tokens_before], skip_special_tokens=skip))
    return len(whole) - len(whole[begin:].lstrip())


def _parse_chat(whole: ChatText, reader: ChatReader, stop: Sequence[str], protected: int, *, keep: bool) -> _Content:
    """An answer up to its first stop string. Thoughts are no part of the answer."""
    # Marks and headers of messages, which parsing takes out, hold no stop strings.
    parsed = reader.parse(whole.rest, thought=whole.reasoning_tokens > 0)
    text, string = cut_at_stop(parsed.content, stop, protected, keep=keep)
    return _Content(text, whole.reasoning, parsed.calls, string)
