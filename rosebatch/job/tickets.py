"""Rows in the engine: which row a request belongs to, and from whole rows to their results."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import msgspec
from msgspec import structs

from rosebatch.core.errors import RowError, unexpected
from rosebatch.core.pooling_params import ModelPooling
from rosebatch.core.request import Completion, Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.engine import Engine
from rosebatch.host.threads import wait_for
from rosebatch.io.results import Result
from rosebatch.io.rows import FailedRow, Row
from rosebatch.io.scored_tokens import TokenTable
from rosebatch.job.constraints import constraint_of
from rosebatch.job.prepared import Prepared, PreparedPrompt
from rosebatch.job.report.stopwatch import Stopwatch
from rosebatch.job.results import result_of
from rosebatch.text.chat_parsers import ChatReader, ChatText
from rosebatch.text.grammar.compiled import Grammar
from rosebatch.text.spans import EncodedText, Spans
from rosebatch.text.stop_strings import StopStrings
from rosebatch.text.tokenizer import Tokenizer

# Of a label's number, and of a token's place.
_NUMBER_BYTES, _SPAN_BYTES = 4, 8
# That are decoded without another thread.
_FEW_TOKENS = 256
# A completion's text, or the places of a prompt's tokens in its text; or why there is none. None without a tokenizer.
_Text = str | ChatText | Spans | RowError | None


class _Ticket(msgspec.Struct, eq=False):
    """A row whose completions are not all there yet.

    Attributes:
        prepared: the row.
        first_id: of its requests, whose ids are in the order of its prompts.
        missing: how many completions are.
        completions: by prompt, then by sample; None for those that are missing.
    """

    prepared: Prepared
    first_id: int
    missing: int
    completions: list[Any]


@dataclass(slots=True)
class Tickets:
    """The rows that were added to the engine and not handed out yet.

    Attributes:
        tokenizer: None for a model that works on token ids.
        pool: decodes texts.
        seconds: host time by kind of work is added there.
        max_bytes: of these rows.
        check: called while waiting.
        return_token_ids, whole_texts: see ``rosebatch.job.serve_options.ServeOptions``.
    """

    tokenizer: Tokenizer | None
    pool: Executor
    seconds: defaultdict[str, float]
    max_bytes: int
    check: Callable[[], None]
    return_token_ids: bool
    whole_texts: bool
    _bytes: int = 0
    _rows_of_grammar: Counter[Grammar] = field(default_factory=Counter)
    _next_id: int = 0
    _open: dict[int, _Ticket] = field(default_factory=dict)
    _complete: deque[_Ticket] = field(default_factory=deque)
    _decoding: tuple[list[_Ticket], Future[Sequence[_Text]] | Sequence[_Text]] | None = None
    _table: TokenTable = field(init=False)

    def __post_init__(self) -> None:
        self._table = TokenTable(self.tokenizer)

    @property
    def full(self) -> bool:
        """Whether no row may be added, of whatever size."""
        return self._bytes >= self.max_bytes

    def has_room(self, row: Prepared) -> bool:
        """Whether a row may be added now. Rows that share a grammar count it once; one that is too large runs alone."""
        size = row.size
        if row.grammar is not None and row.grammar not in self._rows_of_grammar:
            size += row.grammar.memory
        return not self._bytes or self._bytes + size <= self.max_bytes

    def _account(self, row: Prepared, sign: int) -> None:
        """Count a row's bytes when it comes, with 1, and when it goes, with -1."""
        self._bytes += sign * row.size
        if row.grammar is None:
            return
        self._rows_of_grammar[row.grammar] += sign
        if self._rows_of_grammar[row.grammar] == max(0, sign):
            self._bytes += sign * row.grammar.memory
        if not self._rows_of_grammar[row.grammar]:
            del self._rows_of_grammar[row.grammar]

    def add(self, engine: Engine, row: Prepared) -> FailedRow | None:
        """Queue all of a row; if the engine refuses any part, nothing, and the row has failed."""
        tokenizer, sampling, matcher = self.tokenizer, row.row.sampling, None
        if sampling.stop and tokenizer:
            matcher = partial(self._stop_strings, tokenizer, sampling, row.prompts[0].reader)
        first_id, pooling = self._next_id, row.row.pooling
        requests, constraints = [], []
        try:
            for prompt in row.prompts:
                request = Request(
                    self._next_id,
                    prompt.token_ids,
                    prompt.sampling,
                    pooling,
                    prompt.scoring,
                    prompt.images,
                    prompt.predicted,
                    row.row.lora or "",
                )
                self._next_id += 1
                requests.append(request)
                constraints.append(constraint_of(engine, tokenizer, row, request))
            # The engine checks the first one when it is added, before anything else is.
            for request in requests[1:]:
                engine.require_servable(request)
            for request, constraint in zip(requests, constraints, strict=True):
                engine.add(request, stop_matcher=matcher, constraint=constraint)
        except RowError as error:
            return row.failed(error)
        if pooling is not None and (labels := _bytes_of_labels(engine.pooling, row)):
            row = structs.replace(row, size=row.size + labels)
        self._account(row, 1)
        number = len(requests) * sampling.n
        ticket = _Ticket(row, first_id, number, [None] * number)
        for request in requests:
            self._open[request.id] = ticket
        return None

    def _stop_strings(self, tokenizer: Tokenizer, sampling: SamplingParams, reader: ChatReader | None) -> StopStrings:
        # A chat's text without its reasoning has no special tokens.
        skip = sampling.skip_special_tokens or (reader is not None and not self.whole_texts)
        thinking = None if reader is None else reader.follow()
        return StopStrings(tokenizer, sampling.stop, sampling.min_tokens, skip_special_tokens=skip, thinking=thinking)

    def take(self, completions: Iterable[Completion]) -> None:
        """Take what a step has finished."""
        for completion in completions:
            request_id = completion.request.id
            ticket = self._open[request_id]
            row = ticket.prepared.row
            if row.prompt_only:
                # The engine always generates a token, which this row does not want.
                completion = structs.replace(
                    completion, token_ids=(), logprobs=(), finish_reason="length", has_end_token=False
                )
            first = ticket.first_id
            ticket.completions[(request_id - first) * row.sampling.n + completion.sample] = completion
            ticket.missing -= 1
            if not ticket.missing:
                for request_id in range(first, first + len(ticket.prepared.prompts)):
                    del self._open[request_id]
                self._complete.append(ticket)

    def finished(self, at_least: int) -> Iterator[Result | FailedRow]:
        """Rows whose texts were sent to be decoded last time; then some more are sent, so that few wait.

        Each result is made when it is taken: those of all rows would be large, with log-probabilities.
        """
        done = self._collect()
        self._submit(max(at_least, len(self._complete) // 4))
        return done

    def rest(self) -> Iterator[Result | FailedRow]:
        """All rows that are left."""
        yield from self._collect()
        self._submit(len(self._complete))
        yield from self._collect()

    def _submit(self, limit: int) -> None:
        tickets = [self._complete.popleft() for _ in range(min(limit, len(self._complete)))]
        if tickets:
            undecoded = [
                (done, ticket.prepared.prompts[place // ticket.prepared.row.sampling.n], ticket.prepared.row)
                for ticket in tickets
                for place, done in enumerate(ticket.completions)
            ]
            decoded: Future[Sequence[_Text]] | Sequence[_Text] = [None] * len(undecoded)
            if self.tokenizer is not None and any(_has_text(done) for done, _, _ in undecoded):
                # Another thread takes its turn with this one, which takes longer than few tokens.
                few = sum([len(done.token_ids) for done, _, _ in undecoded]) <= _FEW_TOKENS
                decoded = self._decode(undecoded) if few else self.pool.submit(self._decode, undecoded)
            self._decoding = tickets, decoded

    def _decode(self, undecoded: Sequence[tuple[Completion, PreparedPrompt, Row]]) -> Sequence[_Text]:
        """The texts of completions, or where the tokens of their prompts are."""
        tokenizer = self.tokenizer
        assert tokenizer is not None, "there is a text"
        with Stopwatch(self.seconds, "detokenizing"):
            whole: dict[int, str | RowError] = {}
            for skip in (True, False):
                plain = [
                    (number, done.text_token_ids)
                    for number, (done, prompt, _) in enumerate(undecoded)
                    if (prompt.reader is None or self.whole_texts) and done.request.sampling.skip_special_tokens is skip
                ]
                texts = tokenizer.decode_batch([token_ids for _, token_ids in plain], skip_special_tokens=skip)
                whole.update(zip([number for number, _ in plain], texts, strict=True))
                if len(whole) == len(undecoded):
                    # Nearly always.
                    break
            found: list[_Text] = [
                whole[number] if prompt.reader is None else _read(prompt.reader, done.text_token_ids, whole.get(number))
                for number, (done, prompt, _) in enumerate(undecoded)
            ]
            labelled = {
                number: EncodedText(prompt.text, prompt.token_ids, row.messages is not None)
                for number, (done, prompt, row) in enumerate(undecoded)
                if done.request.pooling is not None and done.request.pooling.of_tokens and prompt.text is not None
            }
            for number, spans in zip(labelled, tokenizer.spans([*labelled.values()]), strict=True):
                found[number] = spans
            return found

    def _collect(self) -> Iterator[Result | FailedRow]:
        if self._decoding is None:
            return iter(())
        tickets, decoded = self._decoding
        self._decoding = None
        texts = wait_for(decoded, self.check) if isinstance(decoded, Future) else decoded
        for ticket in tickets:
            self._account(ticket.prepared, -1)
        return self._results(deque(tickets), iter(texts))

    def _results(self, tickets: deque[_Ticket], texts: Iterator[_Text]) -> Iterator[Result | FailedRow]:
        while tickets:
            yield self._result(tickets.popleft(), texts)

    def _result(self, ticket: _Ticket, decoded: Iterator[_Text]) -> Result | FailedRow:
        row, completions = ticket.prepared, ticket.completions
        texts: list[Any] = [*islice(decoded, len(completions))]
        # An error of the engine goes before those of texts.
        for done in completions:
            if done.error is not None:
                return row.failed(done.error)
        for text in texts:
            if isinstance(text, RowError):
                return row.failed(text)
        try:
            return result_of(
                row, completions, texts, self.tokenizer, self._table, return_token_ids=self.return_token_ids
            )
        except Exception as unknown:
            return row.failed(unexpected("telling the answer", unknown))


def _has_text(done: Completion) -> bool:
    """Whether tokens were generated, or those of the prompt have places in its text."""
    request = done.request
    if request.pooling is not None:
        return request.pooling.of_tokens
    return request.scoring is None


def _bytes_of_labels(pooling: ModelPooling, row: Prepared) -> int:
    """What the numbers of a row's tokens take, and their places, if the model classifies tokens."""
    own = pooling.classifier
    if own is None or not own.of_tokens or row.row.pooling is None or row.row.pooling.task == "embed":
        return 0
    return (_NUMBER_BYTES * len(own.labels) + _SPAN_BYTES) * sum(len(prompt.token_ids) for prompt in row.prompts)


def _read(reader: ChatReader, token_ids: Sequence[int], whole: str | RowError | None) -> ChatText | RowError:
    try:
        return whole if isinstance(whole, RowError) else reader.read(token_ids)._replace(whole=whole)
    except Exception as error:
        return unexpected("decoding the answer", error)
