"""Rows under way are bounded by bytes, not only by their number, and still by numbers alone."""

import time
from collections import deque
from operator import attrgetter
from sys import getsizeof
from types import SimpleNamespace
from weakref import WeakSet

import pytest
from msgspec import structs

from rosebatch.core.pooling_params import ModelPooling, PoolingParams
from rosebatch.core.sampling_params import GREEDY, SamplingParams
from rosebatch.core.token_ids import TokenIds
from rosebatch.host.threads import DaemonPool
from rosebatch.io.rows import Row, parse_row
from rosebatch.io.tasks.classify import CLASSIFY
from rosebatch.job import local, texts
from rosebatch.job.memory_estimate import prompt_bytes, row_bytes
from rosebatch.job.order import in_good_order
from rosebatch.job.prepare import prepare
from rosebatch.job.prepared import Prepared, PreparedPrompt
from rosebatch.job.serve import serve
from rosebatch.job.tickets import Tickets
from rosebatch.text.grammar.grammars import Grammars
from rosebatch.text.long_texts import UNBOUND
from tests.helpers.byte_tokenizer import BYTES, EOS
from tests.job.fake_model import FakeModel, make_engine


def prepared(index, size):
    given = Row(index=index, where=f"line {index + 1}", metadata={}, sampling=GREEDY, prompt_token_ids=(index,))
    return Prepared(given, (PreparedPrompt((index,), GREEDY),), size)


def test_a_window_of_large_rows_is_short():
    """Windows of 512 prompts of 1 MB took 5 GB. Once large rows have gone, the window fills up again, row by row."""
    read, sizes = 0, [100] * 30 + [1] * 200

    def rows():
        nonlocal read
        for index, size in enumerate(sizes):
            read += 1
            yield prepared(index, size)

    held, limit = [], []
    for handed, item in enumerate(in_good_order(rows(), 50, 1000), start=1):
        held.append(sum(sizes[:read]) - sum(sizes[:handed]) + item.size)
        limit.append(read - handed)
    assert max(held) <= 1000 + 100
    assert limit[0] == 9
    assert max(limit) == 49
    assert len(held) == len(sizes)


@pytest.mark.parametrize("kind", ["prompt", "metadata"])
def test_large_rows_are_under_way_in_bounded_numbers(job, kind):
    """The engine took 512 rows whatever their size. The output is the same, and so are the steps of a second run."""
    job.settings = {"max_inflight_bytes": "4MiB"}
    text = "x" * 200_000
    line = {"prompt": "short", "doc": text} if kind == "metadata" else {"prompt_token_ids": [1] * 4000}
    lines = [{**line, "max_tokens": 3, "id": i} for i in range(60)]
    running = []
    model = FakeModel(before_step=lambda plan: running.append(plan.num_sequences))
    limits = {"seqs": 64, "blocks": 4000, "block_size": 64, "max_model_len": 5000, "budget": 1 << 20}
    rows, _, engine = job.run(lines, model=model, **limits)
    first = list(running)
    assert [row["id"] for row in rows] == list(range(60))
    assert engine.stats.max_running < 12
    running.clear()
    assert job.results(lines, model=model, **limits) == rows
    assert running == first


def test_numbers_of_tokens_count():
    """A head of many labels gives a prompt of token ids a hundred times its bytes."""
    labels = tuple(map(str, range(1000)))
    classifier = PoolingParams(task="classify", pooling="all", labels=labels, activation="softmax")
    engine = make_engine(FakeModel(), seqs=64)
    engine.pooling = ModelPooling(classifier=classifier)
    tickets = Tickets(None, None, {}, 1 << 20, lambda: None, False, False)
    ids = (1,) * 20
    row = Row(index=0, where="", metadata={}, sampling=GREEDY, prompt_token_ids=ids, pooling=CLASSIFY)
    item = Prepared(row, (PreparedPrompt(ids, GREEDY),), 100)
    count = 0
    while tickets.has_room(item):
        assert tickets.add(engine, item) is None
        count += 1
    assert count == -(-(1 << 20) // (100 + 20 * 4008))


def test_a_row_above_the_bound_runs_alone(job):
    """It must neither hang the job nor fail."""
    job.settings = {"max_inflight_bytes": "1MiB"}
    lines = [{"prompt": "a", "n": 500, "logprobs": 20, "max_tokens": 9}] * 3 + [{"prompt": "b", "max_tokens": 2}] * 3
    rows, _, engine = job.run(lines, model=FakeModel(), seqs=2000, blocks=4000, budget=1 << 16)
    assert [len(row.get("choices", [1])) for row in rows] == [500] * 3 + [1] * 3
    assert engine.stats.max_running == 500


def test_no_row_is_asked_for_while_one_runs_alone(job, tokenizer):
    """The next one was parsed and waited: of lists of 20 MB each, both took 160 MB."""
    asked, seen, rows = [], [], job.rows([{"prompt": "a", "x": "y" * 100_000, "max_tokens": 5}] * 3)

    def source():
        for row in rows:
            asked.append(row.index)
            yield row

    engine = make_engine(FakeModel(before_step=lambda plan: seen.append(len(asked))), max_model_len=50)
    served = serve(engine, tokenizer, None, source(), in_order=True, max_inflight_bytes=100_000)
    assert [row.row.index for batch in served for row in batch] == [0, 1, 2]
    assert seen[0] == 1
    assert sorted(set(seen)) == [1, 2, 3]


class Content:
    """What a row carries."""


class Parsed:
    """Rows of 100 kB; ``held`` says how many are in memory whenever one is parsed."""

    def __init__(self):
        self.held = []
        self._contents = WeakSet()

    def rows(self):
        return map(self._row, range(4))

    def _row(self, index):
        self.held.append(len(self._contents))
        content = Content()
        self._contents.add(content)
        values = {"prompt": "a", "x": content, "y": "y" * 100_000, "max_tokens": 2}
        return parse_row(values, index=index, where="here", defaults={})


def test_no_row_is_held_when_the_next_one_is_parsed(tokenizer):
    """Loops kept the last one until they had the next: of lists of 20 MB each, three took 160 MB."""
    parsed, engine = Parsed(), make_engine(FakeModel(), max_model_len=50)
    grammars = Grammars(tokenizer, BYTES + 1, (EOS,))
    for batch in serve(engine, tokenizer, grammars, parsed.rows(), max_inflight_bytes=100_000):
        deque(batch, maxlen=0)
    assert parsed.held == [0] * 4


def test_a_job_in_this_process_holds_no_row(monkeypatch):
    """A loop over the rows without a result did, too."""
    parsed, service = Parsed(), object.__new__(local.LocalService)
    service._launched = SimpleNamespace(engine=SimpleNamespace(restart_stats=lambda: None))
    service.facts = SimpleNamespace(shares_prefixes=False)
    monkeypatch.setattr(local, "run_rows", lambda rows, *_: rows)
    served = []
    reader = SimpleNamespace(rows=lambda check: parsed.rows())

    def run(rows):
        served.extend(map(attrgetter("index"), rows))

    rest = dict.fromkeys(("check", "serving", "tally", "progress"))
    service.run(SimpleNamespace(reader=reader, output={1}, run=run, **rest))
    assert served == [0, 2, 3]
    assert parsed.held == [0] * 4


def test_a_prompt_that_is_refused_is_not_put_before_continuations(job, tokenizer, monkeypatch):
    """A prompt of 7 MB before each of 1,024 continuations was 7 GB of text."""
    encode, sizes = tokenizer.encode, []

    def noted(given, bounds):
        sizes.append(sum(map(len, given)))
        return encode(given, bounds)

    monkeypatch.setattr(tokenizer, "encode", noted)
    monkeypatch.setattr(texts, "_AT_ONCE", 500)
    long, short = "word " * 60_000, "word " * 20
    wanted = tuple(f" {number}" for number in range(50))
    (row,) = job.rows([{"prompt": "a"}])
    rows = [structs.replace(row, prompt=prompt, continuations=wanted) for prompt in (long, short)]
    refused, served = texts.Texts(rows, tokenizer, 1000, 1 << 20).encode()
    assert [ids.code for ids, _ in refused] == ["prompt_too_long"]
    assert [list(ids) for ids, _ in served] == encode([short, *(short + each for each in wanted)], [UNBOUND] * 51)
    assert sizes[:2] == [len(long), len(short)]
    assert max(sizes[2:]) < 500 + 20


def test_prompts_of_one_row_are_encoded_some_at_a_time(job, tokenizer, monkeypatch):
    """2,000 inputs of 12 kB in a line of a batch file were encoded at once: 2.5 GB."""
    encode, sizes = tokenizer.encode, []

    def noted(given, bounds):
        sizes.append(sum(map(len, given)))
        return encode(given, bounds)

    monkeypatch.setattr(tokenizer, "encode", noted)
    monkeypatch.setattr(texts, "_AT_ONCE", 500)
    prompts = tuple(f"{number} " + "word " * 20 for number in range(30))
    (row,) = job.rows([{"prompt": "a"}])
    rows = [structs.replace(row, prompt=None, prompts=(*prompts, (1, 2))), structs.replace(row, prompt="b")]
    many, single = texts.Texts(rows, tokenizer, 1000, 1 << 20).encode()
    # Token ids are held in 32 bits each.
    assert {type(ids) for ids, _ in many[:30]} == {TokenIds}
    wanted = encode([*prompts, "b"], [UNBOUND] * 31)
    assert [list(ids) for ids, _ in (*many, *single)] == [*wanted[:30], [1, 2], wanted[30]]
    assert [text for _, text in (*many, *single)] == [*prompts, None, "b"]
    assert max(sizes) < 500 + 103 < sum(sizes)


def test_failed_rows_keep_no_prompt(job, tokenizer):
    """The traceback of each error kept the tokens of its prompt: 1,024 of them, 15 MB each."""
    engine = make_engine(FakeModel(), max_model_len=50)
    rows = job.rows([{"prompt": "x" * 100}, {"prompt": ""}, {"prompt": "x", "max_tokens": "many"}])
    failed = [row for batch in serve(engine, tokenizer, None, rows) for row in batch]
    assert {row.error.code for row in failed} == {"prompt_too_long", "empty_prompt", "invalid_field"}
    assert [row.error.__traceback__ for row in failed] == [None] * 3
    # Neither by the error that was being handled, whose traceback has the line.
    assert [row.error.__context__ for row in failed] == [None] * 3


@pytest.mark.parametrize(
    "values", [{"doc": "x" * 10_000}, {"doc": {"deep": [["x" * 5000], {"k": "x" * 5000}]}}, {"x" * 10_000: 1}]
)
def test_what_a_row_carries_counts(job, values):
    """Metadata of 1 MB waited with its row, and nobody counted it."""
    (row,) = job.rows([{"prompt": "p", **values}])
    assert 10_000 < row_bytes(row) < 14_000


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ([1.5] * 1000, 1000 * getsizeof(1.5)),
        (["x", 1] * 1000, 1000 * (getsizeof("x") + getsizeof(1))),
        ([[], 1.5] * 1000, 1000 * (getsizeof([]) + getsizeof(1.5))),
        ([["x"], {}] * 1000, 1000 * (getsizeof([0]) + getsizeof("x") + getsizeof({}))),
    ],
)
def test_many_values_count(job, values, size):
    """A look at each of 5,000,000 numbers took a second; lists in the list must still be looked into."""
    (row,) = job.rows([{"prompt": "p", "x": values}])
    (empty,) = job.rows([{"prompt": "p", "x": []}])
    assert row_bytes(row) - row_bytes(empty) == size + 8 * len(values)


def test_log_probabilities_and_completions_count():
    """20 of them for 1,024 completions took 9 kB a token."""
    plain, more = prompt_bytes(GREEDY, 1000, 4096), prompt_bytes(SamplingParams(n=3, temperature=1), 1000, 4096)
    assert plain == 48_000
    assert more == plain + 2 * 8000
    scored = SamplingParams(n=2, logprobs=20, max_tokens=100, temperature=1)
    assert prompt_bytes(scored, 1000, 4096) == plain + 8000 + 2 * 100 * (21 * 8 + 4)
    assert prompt_bytes(SamplingParams(logprobs=0, max_tokens=10_000), 1000, 1010) == plain + 10 * (8 + 4)


def test_texts_are_encoded_one_group_at_a_time(job, tokenizer, monkeypatch):
    """Two texts of 1 MB were encoded at once, at 150 MB each, and four were read ahead."""
    encode, running, limit, texts_at_once = tokenizer.encode, [], 0, []

    def slowly(texts, bounds):
        nonlocal limit
        running.append(texts)
        limit = max(limit, len(running))
        texts_at_once.append(len(texts))
        time.sleep(0.01)
        running.pop()
        return encode(texts, bounds)

    monkeypatch.setattr(tokenizer, "encode", slowly)
    rows = job.rows([{"prompt": "x" * 900, "max_tokens": 1}] * 40)
    served = serve(make_engine(FakeModel(), blocks=1000), tokenizer, None, rows, max_inflight_bytes=16 << 20)
    assert sum(1 for batch in served for _ in batch) == 40
    assert limit == 1
    assert max(texts_at_once) == 6, "16 MiB / 16 are the encoding of 5 KB"


def test_a_signal_ends_the_run_before_the_next_group(job, tokenizer):
    """Rows of 10 MB were parsed for seconds after it: nobody looked before a whole window was read."""
    read = []

    def rows():
        for row in job.rows([{"prompt": "x" * 900}] * 40):
            read.append(row)
            yield row

    def check():
        if read:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        list(prepare(rows(), tokenizer, None, DaemonPool(1, "text"), check=check, max_bytes=16 << 20))
    assert len(read) == 6, "16 MiB / 16 are the encoding of 5 KB"


@pytest.mark.parametrize("number", [7, 2**32 - 1, -1, 2**60, 0.5])
def test_numbers_of_a_list_are_counted_without_a_look_at_each(number):
    """Those of a prompt, which tables keep, took half of the host's time; what else is in a list still counts."""

    def size(kept):
        return row_bytes(parse_row({"prompt": "x", "kept": kept}, index=0, where="", defaults={}))

    numbers = [number] * 1000
    whole = getsizeof(numbers) - getsizeof([]) + 1000 * getsizeof(number)
    assert whole <= size(numbers) - size([]) <= 1.2 * whole
    assert size([*numbers, "y" * 100_000]) > 0.8 * size(numbers) + 100_000


@pytest.mark.parametrize(
    "values",
    [
        {"stop_token_ids": [7] * 1000},
        {"allowed_token_ids": [7] * 1000},
        {"logit_bias": {str(number): 1.0 for number in range(500)}},
        {"guided_regex": "a" * 50_000},
        {"stop": "a" * 50_000},
        {"bad_words": ["a" * 50_000]},
        {"suffix": "a" * 50_000},
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": "y" * 50_000}},
    ],
)
def test_all_that_a_row_may_give_much_of_counts(values):
    """Eight suffixes of 30 MB were under way at once, and counted as 2 kB each."""
    prompt = {} if "messages" in values else {"prompt": "x"}
    assert 40_000 < row_bytes(parse_row({**prompt, **values}, index=0, where="", defaults={})) < 80_000


def test_of_very_large_rows_one_is_ahead(job, tokenizer):
    """Three of 30 MB were prepared before the first was served."""
    read = []

    def rows():
        for row in job.rows([{"prompt": "x", "doc": "y" * 9000}] * 5):
            read.append(row)
            yield row

    found = prepare(rows(), tokenizer, None, DaemonPool(1, "text"), max_bytes=16 * 9000)
    for number, _ in enumerate(found, start=1):
        assert len(read) == number
