"""The main job: rows in, the engine in the middle, result rows out.

Lines are read and texts encoded on threads of their own, a group at a time, bounded in how far they run ahead. All that
is Python happens in turn with the engine's steps, while the device computes: two threads that both compute in Python
take longer than one.
"""

import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, repeat

from rosebatch.engine.engine import Engine
from rosebatch.errors import RowError
from rosebatch.grammar import Grammar, Grammars
from rosebatch.io.output import Output
from rosebatch.io.reader import Row
from rosebatch.io.rows import Answer, Choice, FailedRow, PromptRow, ScoredToken, Shape
from rosebatch.progress import Progress
from rosebatch.report import Tally
from rosebatch.request import Completion, Request
from rosebatch.seeds import row_seed
from rosebatch.tokenizer import StopStrings, Tokenizer, cut_at_stop

# Rows that are encoded in one call, and such groups under way.
_GROUP = 64
_GROUPS_AHEAD = 4


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row that can be served, as far as that is known without an engine.

    Attributes:
        requests: one for each of its prompts.
        grammar: what its completions have to match.
    """

    requests: list[Request]
    grammar: Grammar | None = None

    @property
    def first(self) -> Request:
        """The request of its first prompt, which has all that concerns the row."""
        return self.requests[0]


Prepared = PreparedRow | FailedRow
# A text or token ids, or why there is no prompt; the latter two, with the text where there is one.
_Prompt = str | Sequence[int] | RowError
_Encoded = tuple[Sequence[int] | RowError, str | None]


def run_job(
    engine: Engine,
    tokenizer: Tokenizer | None,
    rows: Iterable[Row],
    output: Output,
    *,
    progress: Progress,
    shape: Shape,
    seed: int | None = None,
    return_token_ids: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Tally:
    """Generate a completion for every row; a row that cannot be served becomes an error row.

    Args:
        engine: with nothing else to do.
        tokenizer: None for a model that works on token ids.
        rows: the input.
        output: gets one result for each row that it does not have yet, and is finished at the end.
        progress: told of every finished row.
        shape: of the result rows.
        seed: of the job (see ``rosebatch.seeds``).
        return_token_ids: add ``token_ids`` to the results.
        check: called before every step; what it raises ends the job there.

    Returns:
        what was counted.
    """
    tally = Tally()
    seats = engine.scheduler.max_num_seqs
    # Twice what runs at a time: there is always a next sequence, and memory does not grow with the file.
    window = 2 * seats
    missing = (row for row in rows if row.index not in output)
    grammars = None if tokenizer is None else Grammars(tokenizer, engine.vocab_size, engine.eos_token_ids)
    source = prepare(missing, tokenizer, grammars, seed, tally.host_seconds)
    if engine.scheduler.prefix_cache:
        source = _by_prefix(source, window)
    results = _Results(tokenizer, output, progress, shape, return_token_ids, tally)
    exhausted = False
    while not exhausted or engine.has_unfinished:
        # By numbers alone, never as far as threads happen to be: a second run is the same run. A few rows at a time, so
        # that the device does not wait while many are replaced at once; all of them where seats would stay empty.
        added = 0
        while not exhausted and engine.num_unfinished < (window if added < _GROUP else seats):
            check()
            if output.full and engine.has_unfinished:
                break
            item = next(source, None)
            if item is None:
                exhausted = True
                break
            failed = item if isinstance(item, FailedRow) else _add(engine, item, tokenizer)
            if failed is not None:
                results.fail(failed)
            added += 1
        check()
        results.take(engine.step() if engine.has_unfinished else ())
        results.write_some()
    results.finish()
    return tally


class _Results:
    """Completions on their way to the output: whole rows of them, a few at a time while the device computes."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        output: Output,
        progress: Progress,
        shape: Shape,
        return_token_ids: bool,
        tally: Tally,
    ) -> None:
        self._tokenizer = tokenizer
        self._output = output
        self._progress = progress
        self._shape = shape
        self._return_token_ids = return_token_ids
        self._tally = tally
        self._parts: dict[int, list[Completion]] = defaultdict(list)
        self._whole: deque[list[Completion]] = deque()

    def take(self, completions: Iterable[Completion]) -> None:
        """Take what a step has finished."""
        for completion in completions:
            request = completion.request
            parts = self._parts[request.index]
            parts.append(completion)
            if len(parts) == request.num_choices:
                parts.sort(key=lambda done: done.request.choice)
                self._whole.append(self._parts.pop(request.index))

    def fail(self, row: FailedRow) -> None:
        """Write a row that was not served."""
        with _Stopwatch(self._tally.host_seconds, "writing"):
            self._output.add(row.index, self._shape.failure(row), failed=True)
        self._tally.add_error(row.error)
        self._progress.advance(failed=True)

    def write_some(self) -> None:
        """Write some of the rows that are whole: so many that their number stays bounded."""
        for _ in range(min(len(self._whole), max(_GROUP, len(self._whole) // 4))):
            self._write(self._whole.popleft())
        with _Stopwatch(self._tally.host_seconds, "writing"):
            self._output.flush()

    def finish(self) -> None:
        """Write the rest; the output is whole then."""
        while self._whole:
            self._write(self._whole.popleft())
        with _Stopwatch(self._tally.host_seconds, "writing"):
            self._output.finish()

    def _write(self, completions: list[Completion]) -> None:
        error = next((done.error for done in completions if done.error), None)
        if error is not None:
            self.fail(_failed(completions[0].request, RowError("grammar_failed", error)))
            return
        with _Stopwatch(self._tally.host_seconds, "detokenizing"):
            answer = _answer(completions, self._tokenizer, self._return_token_ids)
        with _Stopwatch(self._tally.host_seconds, "writing"):
            self._output.add(answer.index, self._shape.result(answer), failed=False)
        self._tally.add_row(completions, [choice.finish_reason for choice in answer.choices])
        self._progress.advance(output_tokens=answer.completion_tokens)


def _add(engine: Engine, row: PreparedRow, tokenizer: Tokenizer | None) -> FailedRow | None:
    """Queue all of a row, or, where the engine refuses a part of it, nothing."""
    stop, grammar = row.first.sampling.stop, row.grammar
    matcher = partial(StopStrings, tokenizer, stop) if stop and tokenizer else None
    try:
        for request in row.requests[1:]:
            engine.require_servable(request)
        for request in row.requests:
            engine.add(request, stop_matcher=matcher, constraint=None if grammar is None else grammar.start)
    except RowError as error:
        return _failed(row.first, error)
    return None


def _failed(request: Request, error: RowError) -> FailedRow:
    return FailedRow(index=request.index, where=request.where, metadata=request.metadata, error=error)


def prepare(
    rows: Iterable[Row],
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
    seed: int | None = None,
    seconds: defaultdict[str, float] | None = None,
) -> Iterator[Prepared]:
    """Turn rows into requests, a group at a time; those that cannot be served whatever the engine are failed rows.

    Args:
        rows: of the input.
        tokenizer: None for a model that works on token ids.
        grammars: compiles what completions have to match; None for such a model.
        seed: of the job.
        seconds: what it takes is added there.
    """
    source = iter(rows)
    seconds = defaultdict(float) if seconds is None else seconds

    def next_group() -> tuple[list[Row], _Texts] | None:
        with _Stopwatch(seconds, "reading"):
            group = list(islice(source, _GROUP))
        return (group, _Texts([row for row in group if isinstance(row, PromptRow)], tokenizer)) if group else None

    def encode(texts: _Texts) -> list[list[_Encoded]]:
        with _Stopwatch(seconds, "tokenizing"):
            return texts.encode()

    with ThreadPoolExecutor(1, "rosebatch-tokenize") as pool:
        ahead: deque[tuple[list[Row], Future[list[list[_Encoded]]]]] = deque()
        while True:
            while len(ahead) < _GROUPS_AHEAD and (read := next_group()) is not None:
                ahead.append((read[0], pool.submit(encode, read[1])))
            if not ahead:
                return
            group, encoded = ahead.popleft()
            prompts = iter(encoded.result())
            for row in group:
                yield (
                    row
                    if isinstance(row, FailedRow)
                    else _prepared(row, next(prompts), tokenizer, grammars, seed, seconds)
                )


def _prepared(
    row: PromptRow,
    prompts: Sequence[_Encoded],
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
    seed: int | None,
    seconds: defaultdict[str, float],
) -> Prepared:
    try:
        requests = _requests(row, prompts, tokenizer, seed)
        if row.sampling.grammar is None or grammars is None:
            return PreparedRow(requests)
        with _Stopwatch(seconds, "compiling grammars"):
            return PreparedRow(requests, grammars.compile(row.sampling.grammar))
    except RowError as error:
        return FailedRow(index=row.index, where=row.where, metadata=row.metadata, error=error)


def _by_prefix(items: Iterator[Prepared], window: int) -> Iterator[Prepared]:
    """A window of rows at a time, such with the same beginning one behind the other.

    So its blocks are computed once and are still there for the next, however little the KV cache holds.
    """
    while group := list(islice(items, window)):
        yield from (item for item in group if isinstance(item, FailedRow))
        yield from sorted((item for item in group if isinstance(item, PreparedRow)), key=_prefix_order)


def _prefix_order(row: PreparedRow) -> bytes:
    """Bytes compare in no time; which order of tokens they stand for does not matter."""
    try:
        return array("q", row.first.prompt_token_ids).tobytes()
    except OverflowError:
        # No token ids of any model: the engine refuses them.
        return b""


class _Texts:
    """The prompts of some rows, chats rendered, to be encoded in one call and on any thread."""

    def __init__(self, rows: Sequence[PromptRow], tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._prompts = [_prompts(row, tokenizer) for row in rows]
        self._chats: list[str | RowError] = []
        self._is_chat = [row.messages is not None for row in rows]
        if tokenizer is not None:
            chats = [row for row in rows if row.messages is not None]
            self._chats = tokenizer.render([r.messages or [] for r in chats], [r.options.template for r in chats])

    def encode(self) -> list[list[_Encoded]]:
        """Of each row its prompts as token ids, and their texts where they have any."""
        texts = [prompt for prompts in self._prompts for prompt in prompts if isinstance(prompt, str)]
        if self._tokenizer is None:
            refusal = RowError("no_tokenizer", "the model has no tokenizer: give prompt_token_ids")
            encoded: Iterator[Sequence[int] | RowError] = repeat(refusal)
            chats: Iterator[Sequence[int] | RowError] = repeat(refusal)
        else:
            encoded = iter(self._tokenizer.encode(texts))
            chats = iter(self._tokenizer.encode_rendered(self._chats))

        def of_row(prompts: Iterable[_Prompt], is_chat: bool) -> Iterator[_Encoded]:
            if is_chat:
                yield next(chats), None
            for prompt in prompts:
                yield (next(encoded), prompt) if isinstance(prompt, str) else (prompt, None)

        return [list(of_row(*row)) for row in zip(self._prompts, self._is_chat, strict=True)]


def _prompts(row: PromptRow, tokenizer: Tokenizer | None) -> list[_Prompt]:
    """The prompts of a row but for a chat."""
    if row.prompts:
        return list(row.prompts)
    if row.prompt_token_ids is not None:
        return [row.prompt_token_ids]
    if row.prompt is None:
        return []
    if row.options.suffix and tokenizer is not None:
        return [tokenizer.fill_in_middle(row.prompt, row.options.suffix)]
    return [row.prompt]


def _requests(
    row: PromptRow,
    prompts: Sequence[_Encoded],
    tokenizer: Tokenizer | None,
    seed: int | None,
) -> list[Request]:
    """A request for each prompt.

    Raises:
        RowError: one of them cannot be served.
    """
    sampling, options = row.sampling, row.options
    if tokenizer is None and (sampling.stop or options.echo or sampling.grammar or sampling.logprobs is not None):
        raise RowError("no_tokenizer", "stop strings, echo, logprobs and grammars need a model with a tokenizer")
    requests = []
    for number, (prompt, text) in enumerate(prompts):
        if isinstance(prompt, RowError):
            raise prompt
        prompt = tuple(prompt[-options.truncate_prompt_tokens :])
        if not row.has_seed:
            sampling = replace(sampling, seed=row_seed(seed, row.index, row.id, prompt))
        echo = ""
        if options.echo and tokenizer is not None:
            echo = text if text and not options.truncate_prompt_tokens else tokenizer.decode(prompt)
        requests.append(
            Request(
                index=row.index,
                prompt_token_ids=prompt,
                sampling=sampling,
                metadata=row.metadata,
                where=row.where,
                echo=echo,
                choice=number * sampling.n,
                num_choices=len(prompts) * sampling.n,
            )
        )
    return requests


def _answer(completions: Sequence[Completion], tokenizer: Tokenizer | None, return_token_ids: bool) -> Answer:
    """Of all completions of a row, in order."""
    first = completions[0].request
    prompts = [done for done in completions if done.request.choice % first.sampling.n == 0]
    return Answer(
        index=first.index,
        metadata=first.metadata,
        choices=[_choice(completion, tokenizer, return_token_ids) for completion in completions],
        prompt_tokens=sum(len(done.request.prompt_token_ids) for done in prompts),
        completion_tokens=sum(len(done.token_ids) for done in completions),
        cached_tokens=sum(done.cached_tokens for done in prompts),
    )


def _choice(completion: Completion, tokenizer: Tokenizer | None, return_token_ids: bool) -> Choice:
    request, token_ids = completion.request, list(completion.token_ids)
    sampling = request.sampling
    text, finish_reason, logprobs, prompt_logprobs = None, completion.finish_reason, None, None
    if tokenizer is not None:
        whole = tokenizer.decode(token_ids)
        protected = len(tokenizer.decode(token_ids[: sampling.min_tokens])) if sampling.min_tokens else 0
        text = cut_at_stop(whole, sampling.stop, protected)
        # A stop string in the last characters of a completion that reached its length: only the whole text shows it.
        finish_reason = "stop" if len(text) < len(whole) else finish_reason
        text = request.echo + text
        if sampling.logprobs is not None:
            logprobs = [_scored(*scored, tokenizer) for scored in completion.logprobs]
        if sampling.prompt_logprobs is not None:
            prompt_logprobs = [_scored(request.prompt_token_ids[0], None, (), tokenizer)]
            prompt_logprobs += [_scored(*scored, tokenizer) for scored in completion.prompt_logprobs]
    return Choice(
        text=text,
        finish_reason=finish_reason,
        token_ids=token_ids if return_token_ids else None,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _scored(
    token_id: int, logprob: float | None, top: Iterable[tuple[int, float]], tokenizer: Tokenizer
) -> ScoredToken:
    likeliest = tuple(ScoredToken(other, tokenizer.token_bytes(other), value) for other, value in top)
    return ScoredToken(token_id, tokenizer.token_bytes(token_id), logprob, likeliest)


class _Stopwatch:
    """Adds the seconds of a ``with`` block under a name."""

    __slots__ = ("_name", "_seconds", "_started")

    def __init__(self, seconds: defaultdict[str, float], name: str) -> None:
        self._seconds = seconds
        self._name = name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._name] += time.perf_counter() - self._started
