"""From the completions of a row to its answer: texts cut at stop strings, log-probabilities by token."""

from collections.abc import Iterable
from typing import Any

from rosebatch.errors import unexpected
from rosebatch.io.results import Answer, Choice, ScoredToken, Shape
from rosebatch.io.rows import FailedRow
from rosebatch.job.prepare import PreparedPrompt
from rosebatch.job.serve import ServedRow
from rosebatch.request import Completion
from rosebatch.text.tokenizer import Tokenizer, cut_at_stop


def answer_or_failure(
    served: ServedRow, tokenizer: Tokenizer | None, shape: Shape, *, return_token_ids: bool
) -> tuple[Answer, dict[str, Any]] | FailedRow:
    """The answer and its output line; a failed row if its completions cannot be told."""
    try:
        found = answer(served, tokenizer, return_token_ids=return_token_ids)
        return found, shape.result(found)
    except Exception as error:
        return served.prepared.failed(unexpected("telling the answer", error))


def answer(served: ServedRow, tokenizer: Tokenizer | None, *, return_token_ids: bool) -> Answer:
    """What an output line says of a row."""
    row, n = served.prepared.row, served.prepared.row.sampling.n
    # The first completion of each prompt has what concerns the prompt.
    firsts = served.completions[::n]
    embeddings = [done.embedding for done in served.completions if done.embedding is not None]
    return Answer(
        index=row.index,
        metadata=row.metadata,
        choices=[]
        if embeddings
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
        embeddings=embeddings,
    )


def _choice(
    prompt: PreparedPrompt,
    completion: Completion,
    whole: str | None,
    first: Completion,
    tokenizer: Tokenizer | None,
    *,
    return_token_ids: bool,
) -> Choice:
    token_ids, sampling = list(completion.token_ids), prompt.sampling
    text, finish_reason, logprobs, prompt_logprobs = None, completion.finish_reason, None, None
    if tokenizer is not None and whole is not None:
        protected = 0
        if sampling.stop and sampling.min_tokens:
            protected = len(tokenizer.decode(token_ids[: sampling.min_tokens]))
        text = cut_at_stop(whole, sampling.stop, protected)
        # Only the whole text shows a stop string in the last characters of a completion that reached its length.
        finish_reason = "stop" if len(text) < len(whole) else finish_reason
        text = prompt.echo + text
        if sampling.logprobs is not None:
            logprobs = [_scored(*scored, tokenizer) for scored in completion.logprobs]
        if sampling.prompt_logprobs is not None:
            prompt_logprobs = [_scored(prompt.token_ids[0], None, (), tokenizer)]
            prompt_logprobs += [_scored(*scored, tokenizer) for scored in first.prompt_logprobs]
    return Choice(
        text=text,
        finish_reason=finish_reason,
        token_ids=token_ids if return_token_ids else None,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=bool(prompt.echo),
    )


def _scored(
    token_id: int, logprob: float | None, top: Iterable[tuple[int, float]], tokenizer: Tokenizer
) -> ScoredToken:
    likeliest = tuple(ScoredToken(other, tokenizer.token_bytes(other), value) for other, value in top)
    return ScoredToken(
        token_id, tokenizer.token_bytes(token_id), logprob, likeliest, special=tokenizer.is_special(token_id)
    )
