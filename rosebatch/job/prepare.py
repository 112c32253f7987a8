"""From rows to prompts that the engine can take: token ids, seeds, compiled grammars.

Texts are encoded on another thread, a group at a time. All Python work happens where the rows are asked for, between
the engine's steps: a second thread that computes in Python only takes turns with the first.
"""

from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat

from rosebatch.errors import RowError, unexpected
from rosebatch.io.reader import Row
from rosebatch.io.rows import FailedRow, PromptRow
from rosebatch.job.seeds import row_seed
from rosebatch.report.stopwatch import Stopwatch
from rosebatch.sampling_params import SamplingParams
from rosebatch.text.grammar import Grammar, Grammars
from rosebatch.text.tokenizer import Tokenizer

# Rows that are encoded in one call, and such groups under way.
_GROUP = 64
_GROUPS_AHEAD = 4


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt of a row.

    Attributes:
        token_ids: at least one, if the engine is to take it.
        sampling: with a seed if it samples.
        text: as given or rendered; None if it was given as token ids.
        echo: what the completion's text begins with.
    """

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    text: str | None = None
    echo: str = ""


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row that can be served, as far as that is known without an engine.

    Attributes:
        row: as it was read.
        prompts: usually one.
        grammar: what its completions have to match.
    """

    row: PromptRow
    prompts: tuple[PreparedPrompt, ...]
    grammar: Grammar | None = None

    @property
    def num_completions(self) -> int:
        """Of all prompts together."""
        return len(self.prompts) * self.row.sampling.n

    def failed(self, error: RowError) -> FailedRow:
        """The row as one that could not be served."""
        return FailedRow(index=self.row.index, where=self.row.where, metadata=self.row.metadata, error=error)


Prepared = PreparedRow | FailedRow
# A text or token ids, or why there is no prompt; then the token ids, with the text if there is one.
_Prompt = str | Sequence[int] | RowError
_Encoded = tuple[Sequence[int] | RowError, str | None]


def prepare(
    rows: Iterable[Row | None],
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
    pool: Executor,
    seed: int | None = None,
    seconds: defaultdict[str, float] | None = None,
) -> Iterator[Prepared | None]:
    """Prepare rows, a group at a time. Those that no engine could serve become failed rows.

    Args:
        rows: of the input; None says that there is none at the moment, and is handed on.
        tokenizer: None for a model that works on token ids.
        grammars: compiles what completions have to match; None for such a model.
        pool: encodes texts.
        seed: of the job.
        seconds: host time by kind of work is added there.
    """
    source = iter(rows)
    seconds = defaultdict(float) if seconds is None else seconds

    def encode(texts: _Texts) -> list[list[_Encoded]]:
        with Stopwatch(seconds, "tokenizing"):
            return texts.encode()

    ahead: deque[tuple[list[Row], Future[list[list[_Encoded]]]]] = deque()
    ended = False
    while True:
        idle = False
        while not (ended or idle) and len(ahead) < _GROUPS_AHEAD:
            with Stopwatch(seconds, "reading"):
                group, ended, idle = _next_group(source)
            if group:
                ahead.append((group, pool.submit(encode, _rendered(group, tokenizer, seconds))))
        if ahead:
            group, encoded = ahead.popleft()
            prompts = iter(encoded.result())
            for row in group:
                if isinstance(row, FailedRow):
                    yield row
                else:
                    yield _prepared(row, next(prompts), tokenizer, grammars, seed, seconds)
        elif ended:
            return
        else:
            yield None


def _next_group(source: Iterator[Row | None]) -> tuple[list[Row], bool, bool]:
    """Some rows; whether the source ended; whether it has nothing at the moment."""
    group: list[Row] = []
    for row in source:
        if row is None:
            return group, False, True
        group.append(row)
        if len(group) == _GROUP:
            return group, False, False
    return group, True, False


def _rendered(group: Sequence[Row], tokenizer: Tokenizer | None, seconds: defaultdict[str, float]) -> "_Texts":
    rows = [row for row in group if isinstance(row, PromptRow)]
    if all(row.messages is None for row in rows):
        return _Texts(rows, tokenizer)
    with Stopwatch(seconds, "rendering chats"):
        return _Texts(rows, tokenizer)


def _prepared(
    row: PromptRow,
    encoded: Sequence[_Encoded],
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
    seed: int | None,
    seconds: defaultdict[str, float],
) -> Prepared:
    try:
        prompts = _prompts_of(row, encoded, tokenizer, seed)
        if row.sampling.grammar is None or grammars is None:
            return PreparedRow(row, prompts)
        with Stopwatch(seconds, "compiling grammars"):
            return PreparedRow(row, prompts, grammars.compile(row.sampling.grammar))
    except RowError as error:
        return FailedRow(index=row.index, where=row.where, metadata=row.metadata, error=error)
    except Exception as error:
        failure = unexpected("preparing the row", error)
        return FailedRow(index=row.index, where=row.where, metadata=row.metadata, error=failure)


def by_prefix(items: Iterator[Prepared | None], window: int) -> Iterator[Prepared]:
    """Reorder a window of rows at a time, so that prompts with the same beginning follow each other.

    Its blocks are then computed once and are still there for the next prompt, however small the KV cache is. For each
    row handed out, one row of the next window is read: reading a whole window at once would keep the device waiting.
    """

    def must_come() -> Iterator[Prepared]:
        for item in items:
            assert item is not None, "a window cannot wait for rows that may not come"
            yield item

    rows = must_come()
    group = list(islice(rows, window))
    while group:
        failed = [item for item in group if isinstance(item, FailedRow)]
        served = sorted((item for item in group if isinstance(item, PreparedRow)), key=_prefix_order)
        group = []
        for item in chain[Prepared](failed, served):
            yield item
            group += islice(rows, 1)


def _prefix_order(row: PreparedRow) -> bytes:
    """Bytes compare quickly; which order of tokens they stand for does not matter."""
    try:
        return array("q", row.prompts[0].token_ids).tobytes()
    except OverflowError:
        # No token ids of any model: the engine refuses them.
        return b""


class _Texts:
    """The prompts of some rows with chats rendered, to be encoded in one call and on any thread."""

    def __init__(self, rows: Sequence[PromptRow], tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._prompts = [_plain_prompts(row, tokenizer) for row in rows]
        self._chats: list[str | RowError] = []
        self._is_chat = [row.messages is not None for row in rows]
        if tokenizer is not None:
            chats = [row for row in rows if row.messages is not None]
            self._chats = tokenizer.render([r.messages or [] for r in chats], [r.options.template for r in chats])

    def encode(self) -> list[list[_Encoded]]:
        """For each row, its prompts as token ids, and their texts if they have any."""
        texts = [prompt for prompts in self._prompts for prompt in prompts if isinstance(prompt, str)]
        if self._tokenizer is None:
            refusal = RowError("no_tokenizer", "the model has no tokenizer: give prompt_token_ids")
            encoded: Iterator[Sequence[int] | RowError] = repeat(refusal)
            chats: Iterator[tuple[Sequence[int] | RowError, str | None]] = repeat((refusal, None))
        else:
            encoded = iter(self._tokenizer.encode(texts))
            rendered = (chat if isinstance(chat, str) else None for chat in self._chats)
            chats = zip(self._tokenizer.encode_rendered(self._chats), rendered, strict=True)

        def of_row(prompts: Iterable[_Prompt], is_chat: bool) -> Iterator[_Encoded]:
            if is_chat:
                yield next(chats)
            for prompt in prompts:
                yield (next(encoded), prompt) if isinstance(prompt, str) else (prompt, None)

        return [list(of_row(*row)) for row in zip(self._prompts, self._is_chat, strict=True)]


def _plain_prompts(row: PromptRow, tokenizer: Tokenizer | None) -> list[_Prompt]:
    """The prompts of a row, except a chat."""
    if row.prompts:
        return list(row.prompts)
    if row.prompt_token_ids is not None:
        return [row.prompt_token_ids]
    if row.prompt is None:
        return []
    if row.options.suffix and tokenizer is not None:
        return [tokenizer.fill_in_middle(row.prompt, row.options.suffix)]
    return [row.prompt]


def _prompts_of(
    row: PromptRow, encoded: Sequence[_Encoded], tokenizer: Tokenizer | None, seed: int | None
) -> tuple[PreparedPrompt, ...]:
    """Each prompt with its own seed.

    Raises:
        RowError: one of them cannot be served.
    """
    sampling, options = row.sampling, row.options
    reports = sampling.logprobs is not None or sampling.prompt_logprobs is not None
    if tokenizer is None and (sampling.stop or options.echo or sampling.grammar or reports):
        raise RowError("no_tokenizer", "stop strings, echo, logprobs and grammars need a model with a tokenizer")
    prompts = []
    for number, (prompt, text) in enumerate(encoded):
        if isinstance(prompt, RowError):
            raise prompt
        prompt = tuple(prompt[-options.truncate_prompt_tokens :])
        own = sampling
        if sampling.seed is None and not sampling.greedy:
            own = replace(sampling, seed=row_seed(seed, row.index, row.id, prompt, number))
        echo = ""
        if options.echo and tokenizer is not None:
            echo = text if text and not options.truncate_prompt_tokens else _decoded(prompt, tokenizer)
        prompts.append(PreparedPrompt(prompt, own, text, echo))
    return tuple(prompts)


def _decoded(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    try:
        return tokenizer.decode(token_ids)
    except OverflowError:
        # No token ids of any model: the engine refuses them.
        return ""
