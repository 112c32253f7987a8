"""From rows to requests: prompts as token ids, seeds, compiled grammars.

Texts are encoded on another thread, a group at a time. All that is Python happens where the rows are asked for,
between the engine's steps: a second thread that computes in Python only takes turns with the first.
"""

from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat

from rosebatch.errors import RowError
from rosebatch.io.reader import Row
from rosebatch.io.rows import FailedRow, PromptRow
from rosebatch.job.seeds import row_seed
from rosebatch.report.stopwatch import Stopwatch
from rosebatch.request import Request
from rosebatch.text.grammar import Grammar, Grammars
from rosebatch.text.tokenizer import Tokenizer

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


def prepare(
    rows: Iterable[Row],
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
    pool: Executor,
    seed: int | None = None,
    seconds: defaultdict[str, float] | None = None,
) -> Iterator[Prepared]:
    """Turn rows into requests, a group at a time; those that cannot be served whatever the engine are failed rows.

    Args:
        rows: of the input.
        tokenizer: None for a model that works on token ids.
        grammars: compiles what completions have to match; None for such a model.
        pool: encodes texts.
        seed: of the job.
        seconds: what it takes is added there.
    """
    source = iter(rows)
    seconds = defaultdict(float) if seconds is None else seconds

    def next_group() -> tuple[list[Row], _Texts] | None:
        with Stopwatch(seconds, "reading"):
            group = list(islice(source, _GROUP))
        rows = [row for row in group if isinstance(row, PromptRow)]
        if not any(row.messages is not None for row in rows):
            return (group, _Texts(rows, tokenizer)) if group else None
        with Stopwatch(seconds, "rendering chats"):
            return group, _Texts(rows, tokenizer)

    def encode(texts: _Texts) -> list[list[_Encoded]]:
        with Stopwatch(seconds, "tokenizing"):
            return texts.encode()

    ahead: deque[tuple[list[Row], Future[list[list[_Encoded]]]]] = deque()
    while True:
        while len(ahead) < _GROUPS_AHEAD and (read := next_group()) is not None:
            ahead.append((read[0], pool.submit(encode, read[1])))
        if not ahead:
            return
        group, encoded = ahead.popleft()
        prompts = iter(encoded.result())
        for row in group:
            if isinstance(row, FailedRow):
                yield row
            else:
                yield _prepared(row, next(prompts), tokenizer, grammars, seed, seconds)


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
        with Stopwatch(seconds, "compiling grammars"):
            return PreparedRow(requests, grammars.compile(row.sampling.grammar))
    except RowError as error:
        return FailedRow(index=row.index, where=row.where, metadata=row.metadata, error=error)


def by_prefix(items: Iterator[Prepared], window: int) -> Iterator[Prepared]:
    """A window of rows at a time, such with the same beginning one behind the other.

    So its blocks are computed once and are still there for the next, however little the KV cache holds. For each row
    handed out one of the next window is read: the device would have nothing to do while a whole window is.
    """
    group = list(islice(items, window))
    while group:
        failed = [item for item in group if isinstance(item, FailedRow)]
        served = sorted((item for item in group if isinstance(item, PreparedRow)), key=_prefix_order)
        group = []
        for item in chain[Prepared](failed, served):
            yield item
            group += islice(items, 1)


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
    reports = sampling.logprobs is not None or sampling.prompt_logprobs is not None
    if tokenizer is None and (sampling.stop or options.echo or sampling.grammar or reports):
        raise RowError("no_tokenizer", "stop strings, echo, logprobs and grammars need a model with a tokenizer")
    requests = []
    for number, (prompt, text) in enumerate(prompts):
        if isinstance(prompt, RowError):
            raise prompt
        prompt = tuple(prompt[-options.truncate_prompt_tokens :])
        if not row.has_seed and not sampling.greedy:
            sampling = replace(sampling, seed=row_seed(seed, row.index, row.id, prompt, number))
        echo = ""
        if options.echo and tokenizer is not None:
            echo = text if text and not options.truncate_prompt_tokens else _decoded(prompt, tokenizer)
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
                prompt_only=row.prompt_only,
            )
        )
    return requests


def _decoded(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    try:
        return tokenizer.decode(token_ids)
    except OverflowError:
        # No token ids of any model: the engine refuses them.
        return ""
