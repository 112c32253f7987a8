"""The loop that the command line and the library share: rows in, the engine in the middle, finished rows out.

Reading, encoding, decoding and the device work beside this loop. Our own Python runs in it, a little at a time
between the engine's steps, while the device computes.
"""

import gc
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice

from rosebatch.core.errors import RowError, unexpected
from rosebatch.core.request import Completion, Constraint, Request
from rosebatch.engine.engine import Engine
from rosebatch.host.threads import DaemonPool, wait_for
from rosebatch.io.parse import Row
from rosebatch.io.rows import FailedRow, PromptRow
from rosebatch.job.await_grammars import with_grammars
from rosebatch.job.order import in_job_order
from rosebatch.job.prepare import (
    DEFAULT_BYTES,
    END,
    End,
    Prepared,
    PreparedPrompt,
    PreparedRow,
    prepare,
    size_of,
)
from rosebatch.job.report.stopwatch import Stopwatch
from rosebatch.text.chat_parsers import ChatReader, ChatText
from rosebatch.text.grammar import Grammar, Grammars
from rosebatch.text.reasoning.constraint import ReasoningConstraint
from rosebatch.text.stop_strings import StopStrings
from rosebatch.text.token_bans import BanConstraint, find_bans
from rosebatch.text.tokenizer import Tokenizer

# Rows that are added, and rows whose texts are decoded, between two steps: about what a decode window finishes. More
# where seats would stay empty, or many rows have finished at once.
_ROWS_A_STEP = 32
# Rows that fail one after the other before the caller hears of them.
_MAX_FAILED = 1024
# New objects before Python looks for garbage cycles, of which this loop makes few. Python's default looks far more
# often, which took 7 % of the host's time.
_GARBAGE_THRESHOLD = 50_000


@dataclass(frozen=True, slots=True)
class ServedRow:
    """A row and all of its completions: ``n`` for each of its prompts, one prompt behind the other.

    Attributes:
        texts: of all tokens of each completion, stop strings included; None without a tokenizer.
    """

    prepared: PreparedRow
    completions: tuple[Completion, ...]
    texts: Sequence[str | ChatText | None]


Served = ServedRow | FailedRow
# A completion's text, or why it has none. None without a tokenizer.
_Text = str | ChatText | RowError | None
# The tokens of a completion, what reads them if it is no plain text, and whether special tokens are left out.
_Unread = tuple[Sequence[int], ChatReader | None, bool]


def serve(
    engine: Engine,
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
    rows: Iterable[Row | None],
    *,
    seed: int | None = None,
    in_order: bool = False,
    seconds: defaultdict[str, float] | None = None,
    paused: Callable[[], bool] = lambda: False,
    check: Callable[[], None] = lambda: None,
    max_inflight_bytes: int = DEFAULT_BYTES,
    tell_apart: bool = True,
) -> Generator[list[Served], None, None]:
    """Complete every row; a row that cannot be served becomes a failed one.

    Closing the iterator early drops what is unfinished, and leaves the engine ready for other work.

    Args:
        engine: with nothing else to do.
        tokenizer: None for a model that works on token ids.
        grammars: compiles what completions have to match; None for such a model.
        rows: the input; None says that there is none at the moment.
        seed: of the job (see ``rosebatch.job.seeds``).
        in_order: take rows as they come, see ``rosebatch.job.order``.
        seconds: host time by kind of work is added there.
        paused: whether the caller wants rows finished before more are begun.
        check: called before every step, and while texts or grammars keep it waiting; what it raises ends the loop.
        max_inflight_bytes: about what rows may take from being read to being handed out. A larger row runs alone.
        tell_apart: whether reasoning and tool calls are taken out of the texts of chats.

    Yields:
        after every step the rows that are finished, perhaps none; they come in any order.
    """
    seconds = defaultdict(float) if seconds is None else seconds
    # Twice what runs at a time: there is always a next sequence, and memory does not grow with the input.
    window = 2 * engine.max_num_seqs
    # Half of the bytes are for the engine. A quarter is for rows that are sorted, and the rest for those around them.
    max_bytes = max_inflight_bytes
    # One encodes while the other decodes; each call uses all cores.
    encoder, decoder = DaemonPool(1, "rosebatch-encode"), DaemonPool(1, "rosebatch-decode")
    with encoder, decoder, _few_collections():
        source = prepare(rows, tokenizer, grammars, encoder, seed, seconds, check, max_bytes, engine.max_model_len)
        if not in_order:
            source = in_job_order(source, engine.max_num_seqs, max_bytes // 4, shares=engine.prefix_cache)
        source = with_grammars(source, grammars, check, seconds, max_bytes // 8)
        tickets = _Tickets(tokenizer, decoder, seconds, max_bytes // 2, check, tell_apart=tell_apart)
        try:
            yield from _steps(engine, source, tickets, tokenizer, window, paused, check)
        except BaseException:
            engine.abort()
            raise
        yield tickets.rest()


def _steps(
    engine: Engine,
    source: Iterator[Prepared | None],
    tickets: "_Tickets",
    tokenizer: Tokenizer | None,
    window: int,
    paused: Callable[[], bool],
    check: Callable[[], None],
) -> Iterator[list[Served]]:
    exhausted = False
    # A row for which there is no room yet.
    kept: PreparedRow | None = None
    while not exhausted or kept is not None or engine.has_unfinished:
        # By numbers alone, never by how far a thread happens to be: a second run takes the same steps. Only a few rows
        # at a time, so that the device does not wait while many are replaced; all of them if seats would stay empty.
        added, failed, failed_bytes = 0, list[Served](), 0
        while kept or not exhausted:
            if engine.num_unfinished >= (window if added < _ROWS_A_STEP else engine.max_num_seqs):
                break
            check()
            if paused() and engine.has_unfinished:
                break
            if len(failed) == _MAX_FAILED or failed_bytes > tickets.max_bytes // 8:
                break
            item, kept = kept or next(source, END), None
            if item is None:
                # Nothing to read at the moment.
                break
            if isinstance(item, End):
                exhausted = True
                break
            if isinstance(item, PreparedRow) and not tickets.has_room(item):
                kept = item
                break
            refused = item if isinstance(item, FailedRow) else tickets.add(engine, item, tokenizer)
            if refused is not None:
                failed.append(refused)
                failed_bytes += size_of(refused)
            added += 1
        # Nothing else may hold on to a row's bytes.
        item = refused = None
        check()
        tickets.take(engine.step() if engine.has_unfinished else ())
        yield failed + tickets.finished()


@dataclass(slots=True)
class _Ticket:
    """A row whose completions are not all there yet, by request id."""

    prepared: PreparedRow
    completions: dict[tuple[int, int], Completion] = field(default_factory=dict)


class _Tickets:
    """Knows which row a request belongs to, and brings whole rows from the engine to their texts.

    Args:
        tokenizer: None for a model that works on token ids.
        pool: decodes texts.
        seconds: host time by kind of work is added there.
        max_bytes: of rows that were added and not handed out yet.
        check: called while waiting.
        tell_apart: see ``serve``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        pool: Executor,
        seconds: defaultdict[str, float],
        max_bytes: int,
        check: Callable[[], None],
        *,
        tell_apart: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._tell_apart = tell_apart
        self._pool = pool
        self._seconds = seconds
        self.max_bytes = max_bytes
        self._check = check
        self._bytes = 0
        self._num_rows: Counter[Grammar] = Counter()
        self._ids = count()
        self._open: dict[int, _Ticket] = {}
        self._whole: deque[_Ticket] = deque()
        self._decoding: tuple[list[_Ticket], Future[Sequence[_Text]]] | None = None

    def has_room(self, row: PreparedRow) -> bool:
        """Whether a row may be added now. Rows that share a grammar count it once; one that is too large runs alone."""
        size = row.size
        if row.grammar is not None and row.grammar not in self._num_rows:
            size += row.grammar.memory
        return not self._bytes or self._bytes + size <= self.max_bytes

    def _account(self, row: PreparedRow, sign: int) -> None:
        """Count a row's bytes when it comes, with 1, and when it goes, with -1."""
        self._bytes += sign * row.size
        if row.grammar is None:
            return
        self._num_rows[row.grammar] += sign
        if self._num_rows[row.grammar] == max(0, sign):
            self._bytes += sign * row.grammar.memory
        if not self._num_rows[row.grammar]:
            del self._num_rows[row.grammar]

    def add(self, engine: Engine, row: PreparedRow, tokenizer: Tokenizer | None) -> FailedRow | None:
        """Queue all of a row; if the engine refuses any part, nothing, and the row has failed."""
        sampling = row.row.sampling
        matcher = None
        if sampling.stop and tokenizer:
            # Texts that are told apart have no special tokens.
            skip = sampling.skip_special_tokens or self._reader(row) is not None
            matcher = partial(StopStrings, tokenizer, sampling.stop, sampling.min_tokens, skip_special_tokens=skip)
        requests = [
            Request(next(self._ids), prompt.token_ids, prompt.sampling, row.row.pooling) for prompt in row.prompts
        ]
        try:
            for request in requests[1:]:
                engine.require_servable(request)
            for request, prompt in zip(requests, row.prompts, strict=True):
                constraint = _constraint(engine, tokenizer, row, prompt)
                engine.add(request, stop_matcher=matcher, constraint=constraint)
        except RowError as error:
            return row.failed(error)
        self._account(row, 1)
        ticket = _Ticket(row)
        self._open.update((request.id, ticket) for request in requests)
        return None

    def take(self, completions: Iterable[Completion]) -> None:
        """Take what a step has finished."""
        for completion in completions:
            ticket = self._open[completion.request.id]
            row = ticket.prepared
            if row.row.prompt_only:
                completion = replace(completion, token_ids=(), logprobs=(), finish_reason="length")
            ticket.completions[completion.request.id, completion.sample] = completion
            if len(ticket.completions) == row.num_completions:
                for request_id, _ in ticket.completions:
                    self._open.pop(request_id, None)
                self._whole.append(ticket)

    def finished(self) -> list[Served]:
        """Rows whose texts were sent to be decoded last time; then some more are sent, so that few wait."""
        done = self._decoded()
        self._decode(max(_ROWS_A_STEP, len(self._whole) // 4))
        return done

    def rest(self) -> list[Served]:
        """All rows that are left."""
        done = self._decoded()
        self._decode(len(self._whole))
        return done + self._decoded()

    def _decode(self, limit: int) -> None:
        tickets = [self._whole.popleft() for _ in range(min(limit, len(self._whole)))]
        unread = [
            (done.token_ids, self._reader(ticket.prepared), done.request.sampling.skip_special_tokens)
            for ticket in tickets
            for done in _ordered(ticket)
        ]
        self._decoding = (tickets, self._pool.submit(self._texts, unread)) if tickets else None

    def _reader(self, row: PreparedRow) -> ChatReader | None:
        """A chat is a row's only prompt."""
        return row.prompts[0].reader if self._tell_apart else None

    def _texts(self, unread: Sequence[_Unread]) -> Sequence[_Text]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return [None] * len(unread)
        with Stopwatch(self._seconds, "detokenizing"):
            plain = {
                skip: iter(
                    tokenizer.decode_batch(
                        [token_ids for token_ids, reader, skips in unread if reader is None and skips is skip],
                        skip_special_tokens=skip,
                    )
                )
                for skip in {skips for _, _, skips in unread}
            }
            return [
                next(plain[skips]) if reader is None else _read(reader, token_ids)
                for token_ids, reader, skips in unread
            ]

    def _decoded(self) -> list[Served]:
        if self._decoding is None:
            return []
        tickets, decoded = self._decoding
        self._decoding = None
        found = wait_for(decoded, self._check)
        texts = iter(found)
        for ticket in tickets:
            self._account(ticket.prepared, -1)
        return [_served(ticket.prepared, _ordered(ticket), texts) for ticket in tickets]


def _constraint(
    engine: Engine, tokenizer: Tokenizer | None, row: PreparedRow, prompt: PreparedPrompt
) -> Callable[[], Constraint] | None:
    """What keeps the completions of a prompt to its grammar, its budget of reasoning and its bans; None for none.

    Raises:
        RowError: an allowed token is outside of the model's vocabulary.
    """
    inner, sampling = _grammar_constraint(engine, tokenizer, row, prompt), prompt.sampling
    if not sampling.bans:
        return inner
    if max(sampling.allowed_token_ids, default=0) >= engine.vocab_size:
        raise RowError(
            "invalid_token_id", f"allowed_token_ids must be below {engine.vocab_size}, the model's vocabulary"
        )
    bans = find_bans(tokenizer, sampling.bad_words, sampling.allowed_token_ids, engine.vocab_size, engine.eos_token_ids)
    return partial(BanConstraint, bans, inner)


def _grammar_constraint(
    engine: Engine, tokenizer: Tokenizer | None, row: PreparedRow, prompt: PreparedPrompt
) -> Callable[[], Constraint] | None:
    """What keeps the completions of a prompt to a grammar and to a budget of reasoning; None for neither.

    With a grammar, reasoning takes at most half of the tokens, so that an answer follows. One that only says what a
    call looks like needs none.
    """
    grammar = None if row.grammar is None else row.grammar.start
    form = None if tokenizer is None else tokenizer.parsers.reasoning
    budget = prompt.sampling.max_reasoning_tokens
    thinks = form is not None and not form.has_ended(prompt.token_ids)
    if form is None or not thinks or (budget is None and (grammar is None or row.row.messages is None)):
        return grammar
    if grammar is not None and not _may_be_text(row.row):
        room = min(prompt.sampling.max_tokens, engine.max_model_len - len(prompt.token_ids)) // 2
        budget = room if budget is None else min(budget, room)
    return partial(
        ReasoningConstraint,
        form,
        prompt.token_ids,
        budget,
        grammar,
        calls=row.row.tool_use is not None and row.row.tool_use.choice == "required",
        vocab_size=engine.vocab_size,
        end_ids=(*engine.eos_token_ids, *prompt.sampling.stop_token_ids),
    )


def _may_be_text(row: PromptRow) -> bool:
    """Whether the grammar is one that only says what calls look like."""
    grammar = row.sampling.grammar
    return row.tool_use is not None and row.tool_use.is_strict and grammar is not None and grammar.kind == "lark"


def _read(reader: ChatReader, token_ids: Sequence[int]) -> ChatText | RowError:
    try:
        return reader.read(token_ids)
    except Exception as error:
        return unexpected("decoding the answer", error)


def _ordered(ticket: _Ticket) -> tuple[Completion, ...]:
    """By prompt, then by sample: request ids of a row are in the order of its prompts."""
    return tuple(ticket.completions[key] for key in sorted(ticket.completions))


def _served(prepared: PreparedRow, completions: tuple[Completion, ...], texts: Iterator[_Text]) -> Served:
    decoded = list(islice(texts, len(completions)))
    error = next((done.error for done in completions if done.error), None)
    if error is not None:
        return prepared.failed(error)
    own: list[str | ChatText | None] = []
    for text in decoded:
        if isinstance(text, RowError):
            return prepared.failed(text)
        own.append(text)
    return ServedRow(prepared, completions, own)


@contextmanager
def _few_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _GARBAGE_THRESHOLD), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
