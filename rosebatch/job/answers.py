"""From the completions of a row to its answer: texts cut at stop strings, log-probabilities by token."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rosebatch.core.request import Completion
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.io.results import Answer, Choice, ScoredToken
from rosebatch.job.prepare import PreparedPrompt
from rosebatch.job.serve import ServedRow
from rosebatch.text.chat_parsers import ChatReader, ChatText
from rosebatch.text.stop_strings import cut_at_stop
from rosebatch.text.tokenizer import Tokenizer
from rosebatch.text.tool_calls.call import ToolCall


def answer(served: ServedRow, tokenizer: Tokenizer | None, *, return_token_ids: bool) -> Answer:
    """What an output line says of a row."""
    row, n = served.prepared.row, served.prepared.row.sampling.n
    # The first completion of each prompt has what concerns the prompt.
    firsts = served.completions[::n]
    pooled = [done.pooled for done in served.completions if done.pooled is not None]
    return Answer(
        index=row.index,
        metadata=row.metadata,
        choices=[]
        if pooled
        else [
            _choice(
                served.prepared.prompts[number // n],
                completion,
                text,
                firsts[number // n],
                tokenizer,
                return_token_ids=return_token_ids,
            )
            for number, (completion, text) in enumerate(zip(served.completions, served.texts, strict=True))
        ],
        prompt_tokens=sum(len(done.request.prompt_token_ids) for done in firsts),
        completion_tokens=sum(len(done.token_ids) for done in served.completions),
        cached_tokens=sum(done.cached_tokens for done in firsts),
        pooled=pooled,
    )


def _choice(
    prompt: PreparedPrompt,
    completion: Completion,
    whole: str | ChatText | None,
    first: Completion,
    tokenizer: Tokenizer | None,
    *,
    return_token_ids: bool,
) -> Choice:
    token_ids, sampling = list(completion.token_ids), prompt.sampling
    content, finish_reason, logprobs, prompt_logprobs = _NOTHING, completion.finish_reason, None, None
    if tokenizer is not None and whole is not None:
        content = parse_text(whole, prompt, token_ids, tokenizer)
        # Only the whole text shows a stop string in the last characters of a completion that reached its length.
        finish_reason = "stop" if content.cut else finish_reason
        if content.calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        if sampling.logprobs is not None:
            logprobs = [_scored(*scored, tokenizer) for scored in completion.logprobs]
        if sampling.prompt_logprobs is not None:
            prompt_logprobs = [_scored(prompt.token_ids[0], None, (), tokenizer)]
            prompt_logprobs += [_scored(*scored, tokenizer) for scored in first.prompt_logprobs]
    return Choice(
        text=None if content.text is None else prompt.echo + content.text,
        finish_reason=finish_reason,
        token_ids=token_ids if return_token_ids else None,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=bool(prompt.echo),
        reasoning=content.reasoning,
        reasoning_tokens=0 if whole is None or isinstance(whole, str) else whole.reasoning_tokens,
        tool_calls=content.calls,
    )


class Content(NamedTuple):
    """The parts of a completion; ``cut`` is whether a stop string ended it."""

    text: str | None
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    cut: bool = False


_NOTHING = Content(None)


def parse_text(
    whole: str | ChatText, prompt: PreparedPrompt, token_ids: Sequence[int], tokenizer: Tokenizer
) -> Content:
    """The parts of a completion's text.

    Args:
        whole: its text, stop strings included.
        prompt: that it completes.
        token_ids: of the completion.
    """
    sampling, protected = prompt.sampling, 0
    if sampling.stop and sampling.min_tokens:
        skip = sampling.skip_special_tokens or not isinstance(whole, str)
        protected = len(tokenizer.decode(token_ids[: sampling.min_tokens], skip_special_tokens=skip))
    if isinstance(whole, str):
        return _parse_plain(whole, sampling, protected)
    assert prompt.reader is not None, "it has read the answer"
    return _parse_chat(whole, prompt.reader, sampling.stop, protected, keep=sampling.include_stop_str_in_output)


def _parse_plain(whole: str, sampling: SamplingParams, protected: int) -> Content:
    """A text up to its first stop string."""
    if not sampling.stop:
        return Content(whole)
    text = cut_at_stop(whole, sampling.stop, protected)
    if text == whole:
        return Content(whole)
    if sampling.include_stop_str_in_output:
        text = cut_at_stop(whole, sampling.stop, protected, keep=True)
    return Content(text, cut=True)


def _parse_chat(whole: ChatText, reader: ChatReader, stop: Sequence[str], protected: int, *, keep: bool) -> Content:
    """An answer up to its first stop string, which may be in the reasoning."""
    reasoning = whole.reasoning or ""
    if cut_at_stop(reasoning, stop, protected) != reasoning:
        return Content("", cut_at_stop(reasoning, stop, protected, keep=keep).strip() or None, (), True)
    protected = max(0, protected - len(reasoning))
    cut = cut_at_stop(whole.rest, stop, protected) != whole.rest
    parsed = reader.parse(cut_at_stop(whole.rest, stop, protected, keep=keep), thought=whole.reasoning_tokens > 0)
    return Content(parsed.content, whole.reasoning, parsed.calls, cut)


def _scored(
    token_id: int, logprob: float | None, top: Iterable[tuple[int, float]], tokenizer: Tokenizer
) -> ScoredToken:
    likeliest = tuple(ScoredToken(other, tokenizer.token_bytes(other), value) for other, value in top)
    return ScoredToken(
        token_id, tokenizer.token_bytes(token_id), logprob, likeliest, special=tokenizer.is_special(token_id)
    )
