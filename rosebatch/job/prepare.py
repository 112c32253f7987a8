"""From rows to prompts that the engine can take: token ids and seeds. Grammars are tried meanwhile.

Texts are encoded on another thread, a group at a time. All Python work happens where the rows are asked for, between
the engine's steps: a second thread that computes in Python only takes turns with the first.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import nullcontext
from functools import partial

import msgspec

from rosebatch.core.errors import RowError, unexpected
from rosebatch.core.token_ids import TokenIds, packed
from rosebatch.host.threads import wait_for
from rosebatch.io.row_adapters import NO_ADAPTERS, RowAdapters
from rosebatch.io.rows import FailedRow, Row
from rosebatch.job.chat_rows import for_model
from rosebatch.job.memory_estimate import ROW, prompt_bytes, row_bytes
from rosebatch.job.prepared import DEFAULT_BYTES, Prepared, PreparedPrompt
from rosebatch.job.report.stopwatch import Stopwatch
from rosebatch.job.scored_prompts import scored_prompts
from rosebatch.job.seeds import row_seed
from rosebatch.job.texts import Encoded, Texts
from rosebatch.model.vision.vision import TEXT_ALONE, Sight, Vision
from rosebatch.text.chat_parsers import ChatReader
from rosebatch.text.grammar.check import Tried
from rosebatch.text.grammar.grammars import Grammars
from rosebatch.text.tokenizer import Tokenizer

# Rows that are encoded in one call, and such groups under way. With 64, a job of short texts took 3 % longer: for each
# group, threads take turns twice. More rows under way would be computed after a call was cancelled.
_GROUP = 256
_GROUPS_AHEAD = 3
# A group ends early if its rows have so many bytes to encode.
_GROUP_BYTES = 1 << 19
# While a text is encoded, each of its bytes takes so many, where every byte becomes a token. The objects of a row count
# for as many bytes as take that.
_ENCODING_BYTES = 200
_OBJECTS = ROW // _ENCODING_BYTES


def prepare(
    rows: Iterable[Row | FailedRow | None],
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
    pool: Executor,
    seed: int | None = None,
    seconds: defaultdict[str, float] | None = None,
    check: Callable[[], None] = lambda: None,
    max_bytes: int = DEFAULT_BYTES,
    max_model_len: int = 1 << 20,
    sight: Sight = TEXT_ALONE,
    adapters: RowAdapters = NO_ADAPTERS,
) -> Iterator[Prepared | FailedRow | None]:
    """Prepare rows, a group at a time. Those that no engine could serve become failed rows.

    Args:
        rows: of the input; None says that there is none at the moment, and is handed on.
        tokenizer: None for a model that works on token ids.
        grammars: tries what completions have to match; None for such a model.
        pool: encodes texts. One thread is enough, for a call uses all cores; two would encode two large texts at once.
        seed: of the job.
        seconds: host time by kind of work is added there.
        check: called before each group is read, and while waiting; what it raises ends the preparation.
        max_bytes: of rows under way in the whole job.
        max_model_len: most tokens of prompt and completion together.
        sight: how the model sees, or why it does not.
        adapters: of the run.
    """
    source = iter(rows)
    group_bytes = min(_GROUP_BYTES, max_bytes // 16 // _ENCODING_BYTES)
    seconds = defaultdict(float) if seconds is None else seconds
    in_text = sight.in_text if isinstance(sight, Vision) else None

    def encode(texts: Texts) -> list[list[Encoded]]:
        with Stopwatch(seconds, "tokenizing"):
            return texts.encode()

    def begin(texts: Texts) -> Callable[[], list[list[Encoded]]]:
        # Another thread takes its turn with this one: longer than token ids do.
        return partial(wait_for, pool.submit(encode, texts), check) if texts.takes_time else texts.encode

    ahead: deque[tuple[list[_Read], Callable[[], list[list[Encoded]]]]] = deque()
    bytes_ahead = 0
    ended = False
    while True:
        idle = False
        # Of large rows, one encodes while another is served; of very large ones, there is one.
        while not (ended or idle) and len(ahead) < (
            _GROUPS_AHEAD if bytes_ahead < 2 * group_bytes else 2 if bytes_ahead < max_bytes // 16 else 1
        ):
            check()
            with Stopwatch(seconds, "reading"):
                group, ended, idle = _next_group(source, tokenizer, grammars, group_bytes, sight, adapters)
            if group:
                read = [each.row for each in group if isinstance(each.row, Row)]
                with Stopwatch(seconds, "rendering chats") if any(row.messages for row in read) else nullcontext():
                    texts = Texts(read, tokenizer, max_model_len, max_bytes // _ENCODING_BYTES, in_text)
                del read
                ahead.append((group, begin(texts)))
                bytes_ahead += sum([each.encoded for each in group])
                del texts
        if ahead:
            group, encoded = ahead.popleft()
            bytes_ahead -= sum([each.encoded for each in group])
            prompts = iter(encoded())
            del encoded
            group.reverse()
            # A row that was handed out must not be here while the next one is parsed.
            while group:
                yield _prepared(group.pop(), prompts, tokenizer, seed, max_model_len)
        elif ended:
            return
        else:
            yield None


class _Read(msgspec.Struct):
    """A row, its bytes, how many there are to encode, and what becomes of its grammar."""

    row: Row | FailedRow
    size: int
    encoded: int
    tried: Future[Tried] | None


def _next_group(
    source: Iterator[Row | FailedRow | None],
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
    max_bytes: int,
    sight: Sight,
    adapters: RowAdapters,
) -> tuple[list[_Read], bool, bool]:
    """Some rows; whether the source ended; whether it has nothing at the moment."""
    group: list[_Read] = []
    total = 0
    for read in source:
        if read is None:
            return group, False, True
        row, tried = adapters.chosen(read) if isinstance(read, Row) else read, None
        row = for_model(row, tokenizer, sight)
        if grammars is not None and isinstance(row, Row) and row.sampling.grammar is not None:
            tried = grammars.begin(row.sampling.grammar)
        size = row_bytes(row)
        encoded = size - ROW + _OBJECTS
        group.append(_Read(row, size, encoded, tried))
        total += encoded
        if len(group) == _GROUP or total >= max_bytes:
            return group, False, False
    return group, True, False


def _prepared(
    read: _Read,
    encoded: Iterator[Sequence[Encoded]],
    tokenizer: Tokenizer | None,
    seed: int | None,
    max_model_len: int,
) -> Prepared | FailedRow:
    row = read.row
    if isinstance(row, FailedRow):
        return row
    try:
        prompts = _prompts_of(row, next(encoded), tokenizer, seed, max_model_len)
    except RowError as error:
        return row.failed(error)
    except Exception as error:
        return row.failed(unexpected("preparing the row", error))
    size = read.size
    for prompt in prompts:
        size += prompt_bytes(prompt.sampling, len(prompt.token_ids), max_model_len)
        # That of a chat, which is rendered from the messages.
        size += len(prompt.text or "") if row.messages is not None else 0
        size += 4 * len(prompt.predicted)
    return Prepared(row, prompts, size, read.tried)


def _prompts_of(
    row: Row, encoded: Sequence[Encoded], tokenizer: Tokenizer | None, seed: int | None, max_model_len: int
) -> tuple[PreparedPrompt, ...]:
    """Each prompt with its own seed.

    Raises:
        RowError: one of them cannot be served.
    """
    sampling, options = row.sampling, row.options
    if tokenizer is None and (sampling.stop or options.echo or sampling.grammar or sampling.bad_words):
        raise RowError("no_tokenizer", "stop strings, bad_words, echo and grammars need a model with a tokenizer")
    if row.continuations is not None:
        return scored_prompts(row, encoded, max_model_len)
    predicted: Sequence[int] = ()
    if row.prediction and tokenizer is not None:
        *encoded, (ids, _) = encoded
        predicted = () if isinstance(ids, RowError) else ids
    prompts = []
    for number, (prompt, text) in enumerate(encoded):
        if isinstance(prompt, RowError):
            raise prompt
        if options.truncate_prompt_tokens and not row.pairs:
            prompt = prompt[-options.kept(max_model_len) :]
        if type(prompt) is not TokenIds:
            prompt = packed(prompt)
        own = sampling
        if sampling.seed is None and not sampling.greedy:
            own = sampling.seeded(row_seed(seed, row.index, row.id, prompt, number))
        echo = ""
        if options.echo and tokenizer is not None:
            echo = text if text and not options.truncate_prompt_tokens else _decoded(prompt, tokenizer)
        reader = None
        if row.messages is not None or sampling.max_reasoning_tokens is not None:
            reader = _reader(row, prompt, tokenizer)
        prompts.append(PreparedPrompt(prompt, own, text, echo, reader, predicted=predicted))
    return tuple(prompts)


def _reader(row: Row, prompt: Sequence[int], tokenizer: Tokenizer | None) -> ChatReader | None:
    """What reads the answers to a prompt.

    Raises:
        RowError: the reasoning has a budget, but is not parsed.
    """
    forms = None if tokenizer is None else tokenizer.parsers
    if row.sampling.max_reasoning_tokens is not None and (forms is None or forms.reasoning is None):
        raise RowError(
            "unsupported_field",
            "max_reasoning_tokens: how this model writes its reasoning is unknown; give --reasoning-parser NAME",
        )
    tools = row.tool_use.schemas if row.tool_use is not None else {}
    if forms is None or row.messages is None or (forms.reasoning is None and not tools):
        return None
    return ChatReader(forms, prompt, tools, parallel=row.tool_use is None or row.tool_use.parallel)


def _decoded(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    try:
        text: str = tokenizer.backend.decode(list(token_ids))
        return text
    except OverflowError:
        # No token ids of any model: the engine refuses them.
        return ""
