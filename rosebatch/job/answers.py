"""From completions to result rows: texts, stop strings, log-probabilities by token."""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from itertools import islice

from rosebatch.errors import RowError
from rosebatch.io.output import Output
from rosebatch.io.results import Answer, Choice, ScoredToken, Shape
from rosebatch.io.rows import FailedRow
from rosebatch.report.progress import Progress
from rosebatch.report.stopwatch import Stopwatch
from rosebatch.report.tally import Tally
from rosebatch.request import Completion, Request
from rosebatch.text.tokenizer import Tokenizer, cut_at_stop

# Rows that are taken in, and rows that are written, between two steps, where more are there: about what a window of
# decode steps finishes.
ROWS_A_STEP = 32


class Answers:
    """Completions on their way to the output: whole rows of them, a few at a time while the device computes.

    Args:
        tokenizer: None for a model that works on token ids.
        output: where they go.
        progress: told of every row.
        shape: of the result rows.
        return_token_ids: whether they have ``token_ids``.
        tally: where they are counted.
        pool: decodes texts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        output: Output,
        progress: Progress,
        shape: Shape,
        return_token_ids: bool,
        tally: Tally,
        pool: Executor,
    ) -> None:
        self._tokenizer = tokenizer
        self._output = output
        self._progress = progress
        self._shape = shape
        self._return_token_ids = return_token_ids
        self._tally = tally
        self._pool = pool
        self._decoded: tuple[list[list[Completion]], Future[Sequence[str | None]]] | None = None
        self._parts: dict[int, list[Completion]] = defaultdict(list)
        self._whole: deque[list[Completion]] = deque()

    def take(self, completions: Iterable[Completion]) -> None:
        """Take what a step has finished."""
        for completion in completions:
            request = completion.request
            if request.prompt_only:
                completion = replace(completion, token_ids=(), logprobs=(), finish_reason="length")
            if request.num_choices == 1:
                self._whole.append([completion])
                continue
            parts = self._parts[request.index]
            parts.append(completion)
            if len(parts) == request.num_choices:
                parts.sort(key=lambda done: done.request.choice)
                self._whole.append(self._parts.pop(request.index))

    def fail(self, row: FailedRow) -> None:
        """Write a row that was not served."""
        self._output.add(row.index, self._shape.failure(row), failed=True)
        self._tally.add_error(row.error)
        self._progress.advance(failed=True)

    def write_some(self) -> None:
        """Write rows whose texts are there, and have those of some more decoded: so many that few are left waiting."""
        self._write_decoded()
        self._decode(max(ROWS_A_STEP, len(self._whole) // 4))
        with Stopwatch(self._tally.host_seconds, "writing"):
            self._output.flush()

    def finish(self) -> None:
        """Write the rest; the output is whole then."""
        self._write_decoded()
        self._decode(len(self._whole))
        self._write_decoded()
        with Stopwatch(self._tally.host_seconds, "writing"):
            self._output.finish()

    def _decode(self, most: int) -> None:
        rows = [self._whole.popleft() for _ in range(min(most, len(self._whole)))]
        token_ids = [completion.token_ids for completions in rows for completion in completions]
        self._decoded = (rows, self._pool.submit(self._texts, token_ids)) if rows else None

    def _texts(self, token_ids: Sequence[Sequence[int]]) -> Sequence[str | None]:
        if self._tokenizer is None:
            return [None] * len(token_ids)
        with Stopwatch(self._tally.host_seconds, "detokenizing"):
            return self._tokenizer.decode_batch(token_ids)

    def _write_decoded(self) -> None:
        if self._decoded is None:
            return
        rows, decoded = self._decoded
        self._decoded = None
        texts = iter(decoded.result())
        with Stopwatch(self._tally.host_seconds, "writing"):
            for completions in rows:
                self._write(completions, list(islice(texts, len(completions))))

    def _write(self, completions: list[Completion], texts: Sequence[str | None]) -> None:
        error = next((done.error for done in completions if done.error), None)
        if error is not None:
            self.fail(failed_row(completions[0].request, RowError("grammar_failed", error)))
            return
        answer = _answer(completions, texts, self._tokenizer, self._return_token_ids)
        self._output.add(answer.index, self._shape.result(answer), failed=False)
        self._tally.add_row(completions, [choice.finish_reason for choice in answer.choices])
        self._progress.advance(output_tokens=answer.completion_tokens)


def failed_row(request: Request, error: RowError) -> FailedRow:
    """The row of a request that could not be served."""
    return FailedRow(index=request.index, where=request.where, metadata=request.metadata, error=error)


def _answer(
    completions: Sequence[Completion],
    texts: Sequence[str | None],
    tokenizer: Tokenizer | None,
    return_token_ids: bool,
) -> Answer:
    """Of all completions of a row, in order, and the texts of all their tokens."""
    first = completions[0].request
    prompts = [done for done in completions if done.request.choice % first.sampling.n == 0]
    return Answer(
        index=first.index,
        metadata=first.metadata,
        choices=[
            _choice(completion, whole, prompts[number // first.sampling.n], tokenizer, return_token_ids)
            for number, (completion, whole) in enumerate(zip(completions, texts, strict=True))
        ],
        prompt_tokens=sum(len(done.request.prompt_token_ids) for done in prompts),
        completion_tokens=sum(len(done.token_ids) for done in completions),
        cached_tokens=sum(done.cached_tokens for done in prompts),
    )


def _choice(
    completion: Completion, whole: str | None, first: Completion, tokenizer: Tokenizer | None, return_token_ids: bool
) -> Choice:
    """One completion; ``first`` is that of its prompt that has the prompt's log-probabilities."""
    request, token_ids = completion.request, list(completion.token_ids)
    sampling = request.sampling
    text, finish_reason, logprobs, prompt_logprobs = None, completion.finish_reason, None, None
    if tokenizer is not None and whole is not None:
        protected = 0
        if sampling.stop and sampling.min_tokens:
            protected = len(tokenizer.decode(token_ids[: sampling.min_tokens]))
        text = cut_at_stop(whole, sampling.stop, protected)
        # A stop string in the last characters of a completion that reached its length: only the whole text shows it.
        finish_reason = "stop" if len(text) < len(whole) else finish_reason
        text = request.echo + text
        if sampling.logprobs is not None:
            logprobs = [_scored(*scored, tokenizer) for scored in completion.logprobs]
        if first.request.sampling.prompt_logprobs is not None:
            prompt_logprobs = [_scored(request.prompt_token_ids[0], None, (), tokenizer)]
            prompt_logprobs += [_scored(*scored, tokenizer) for scored in first.prompt_logprobs]
    return Choice(
        text=text,
        finish_reason=finish_reason,
        token_ids=token_ids if return_token_ids else None,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=bool(request.echo),
    )


def _scored(
    token_id: int, logprob: float | None, top: Iterable[tuple[int, float]], tokenizer: Tokenizer
) -> ScoredToken:
    likeliest = tuple(ScoredToken(other, tokenizer.token_bytes(other), value) for other, value in top)
    return ScoredToken(
        token_id, tokenizer.token_bytes(token_id), logprob, likeliest, special=tokenizer.is_special(token_id)
    )
