"""A grammar that takes too much costs its own row: neither the job, nor the rows beside it."""

import json
import os
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from rosebatch.core.errors import FlagError, RowError
from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.host.threads import DaemonPool
from rosebatch.job.await_grammars import with_grammars
from rosebatch.job.check import check_rows
from rosebatch.job.prepare import prepare
from rosebatch.job.sampling_defaults import check_sampling
from rosebatch.text.grammar.check import GrammarLimits, Tried, check_grammar, processes, try_grammar
from rosebatch.text.grammar.compiled import TokenConstraint
from rosebatch.text.grammar.grammars import Grammars
from tests.helpers.byte_tokenizer import EOS
from tests.job.fake_model import launch_fake, make_engine
from tests.job.fuzz_lines import PATTERNS
from tests.job.lines import codes

EXPLOSION = GrammarSpec("json_schema", json.dumps(PATTERNS))
QUICK = GrammarLimits(seconds=0.2)
SMALL = GrammarLimits(seconds=600, memory=16 << 20)


@pytest.fixture
def grammars(tokenizer):
    return lambda limits: Grammars(tokenizer, 257, [EOS], limits)


@pytest.mark.parametrize(
    ("limits", "message"), [(QUICK, r"more than 0\.2 s \(--grammar-timeout\)"), (SMALL, r"GiB \(--grammar-memory\)")]
)
def test_a_grammar_beyond_the_limits_fails_alone(grammars, limits, message):
    """A schema of 1 kB took 158 s, then 14 GB, and the process aborted."""
    own = grammars(limits)
    for _ in range(2):
        with pytest.raises(RowError, match=f"the JSON schema cannot be used: compiling it takes .*{message}") as caught:
            own.compile(EXPLOSION)
        assert caught.value.code == "grammar_too_large"
    assert own.compile(GrammarSpec("regex", "a+")).start().feed(ord("a")) is False


def test_short_lists_of_choices_are_not_tried(grammars, monkeypatch):
    """With a list of its own for each row, trials and compiling took all of a job's time: 155 rows a second."""
    own, tried = grammars(None), []
    monkeypatch.setattr(
        "rosebatch.text.grammar.grammars.try_grammar", lambda spec, *_: tried.append(spec.kind) or Tried()
    )
    monkeypatch.setattr("rosebatch.text.grammar.grammars.start_process", lambda _: tried.append("process"))
    constraint = own.compile(GrammarSpec("choice", '["ab", "c"]')).start()
    assert (constraint.feed(ord("a")), constraint.feed(ord("b"))) == (False, True) and tried == []
    with pytest.raises(RowError, match=r"the list of choices cannot be used: .*at least one"):
        own.compile(GrammarSpec("choice", "[]"))
    own.compile(GrammarSpec("regex", "a")), own.compile(GrammarSpec("choice", json.dumps(["x" * 2000])))
    assert tried == ["process", "regex", "choice"]


def test_a_grammar_compiles_while_others_are_tried(grammars, monkeypatch):
    """A row whose turn it was waited for the trials of all rows that were read ahead."""
    own, go, first = grammars(None), threading.Event(), GrammarSpec("regex", "a")
    own.ready(first).result()
    monkeypatch.setattr("rosebatch.text.grammar.grammars.try_grammar", lambda *_: go.wait() and Tried())
    others = [own.begin(GrammarSpec("regex", f"b{number}")) for number in range(9)]
    try:
        assert own.compiled(first, Tried()).result(60).start().feed(ord("a"))
    finally:
        go.set()
    assert all(each.result(60) == Tried() for each in others)


def test_a_row_whose_grammar_is_too_large(job):
    """The rows around it are served, and the error names the flag."""
    job.settings = {"grammar_timeout": 0.2}
    lines = [{"prompt": f"row {i}", "max_tokens": 3} for i in range(4)]
    lines[1]["response_format"] = {"type": "json_schema", "json_schema": {"name": "any", "schema": PATTERNS}}
    lines[2]["structured_outputs"] = {"choice": ["yes"]}
    rows = job.results(lines)
    assert codes(rows) == [None, "grammar_too_large", None, None]
    assert "--grammar-timeout" in rows[1]["error"]["message"]
    assert rows[2]["text"] == "yes"


def test_a_check_finds_it_too(job, tokenizer):
    """``rosebatch check`` and ``--strict`` have the same limits."""
    failed = []
    line = {"prompt": "x", "structured_outputs": {"json": PATTERNS}}
    config = launch_fake(make_engine(None), tokenizer).plan.source.config
    checked = check_rows(job.rows([line, {"prompt": "x"}]), tokenizer, config, failed.append, QUICK)
    assert (checked.num_good, [row.error.code for row in failed]) == (1, ["grammar_too_large"])


def test_a_flag_has_the_limits():
    """``--json-schema`` hung before the run, where no signal ends it."""
    with pytest.raises(FlagError, match="--grammar-timeout"):
        check_sampling({"structured_outputs": {"json": PATTERNS}}, None, QUICK)
    check_grammar(GrammarSpec("regex", "a+"))
    with pytest.raises(RowError) as caught:
        check_grammar(GrammarSpec("regex", "("))
    assert caught.value.code == "invalid_grammar"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_process_that_dies(grammars, number):
    """The library may crash; a new process takes its place."""
    own = grammars(QUICK)
    own.compile(GrammarSpec("regex", "a+"))
    for process in processes.waiting:
        os.kill(process.pid, number)
        process._process.wait()
    with pytest.raises(RowError, match="the regex cannot be used") as caught:
        own.compile(GrammarSpec("regex", "b+"))
    assert caught.value.code == "grammar_too_large"
    processes.end_all()
    own.compile(GrammarSpec("regex", "c+"))


def test_no_process_can_be_started(monkeypatch):
    """This is the row's error, not the end of the job."""
    processes.end_all()
    monkeypatch.setattr("sys.executable", "/nonexistent")
    assert "no process" in try_grammar(GrammarSpec("regex", "a"), QUICK).message


def test_a_deeply_nested_schema():
    """Its parse error must come back from the process as the row's error."""
    tried = try_grammar(GrammarSpec("json_schema", '{"not":' * 100_000 + "{}" + "}" * 100_000), GrammarLimits())
    assert tried.code == "invalid_grammar"
    assert try_grammar(GrammarSpec("regex", "\ud800"), GrammarLimits()).code == "invalid_grammar"


class SlowGrammars:
    """Grammars of which a test says when they are tried."""

    def __init__(self, grammars):
        self.grammars = grammars
        self.pool = DaemonPool(1, "slow")
        self.ready, self.compiled = grammars.ready, grammars.compiled
        self.go = threading.Event()

    def begin(self, spec):
        if spec.source == "slow":
            return self.pool.submit(lambda: self.go.wait() and Tried())
        return self.grammars.begin(spec)


@pytest.fixture
def slow(grammars):
    """No thread waits any more after a test that failed."""
    found = SlowGrammars(grammars(None))
    yield found
    found.go.set()


def test_rows_overtake_one_whose_grammar_is_slow(job, tokenizer, slow, monkeypatch):
    """Rows without a grammar stood still for minutes. Quick grammars keep the order of the file."""
    now = 0.0

    def check():
        # The slow row's time is over with the first look at it. Then the clock stands still for the quick one.
        nonlocal now
        now = 1000.0

    # The wait for the process that tries grammars looks too, where its start takes long.
    slow.ready(GrammarSpec("regex", "slow")).result()
    monkeypatch.setattr("rosebatch.job.await_grammars.time", SimpleNamespace(monotonic=lambda: now))
    kinds = [{}, {"structured_outputs": {"regex": "slow"}}, {"structured_outputs": {"regex": "quick"}}, {}]
    rows = job.rows([{"prompt": f"row {i}", **kind} for i, kind in enumerate(kinds)])
    items = with_grammars(prepare(rows, tokenizer, slow, DaemonPool(1, "text")), slow, check)
    assert [next(items).row.index for _ in range(3)] == [0, 2, 3]
    assert next(items) is None, "the loop goes on with what it has"
    slow.go.set()
    left = [item for item in items if item is not None]
    assert [item.row.index for item in left] == [1]
    assert left[0].grammar is not None


def test_a_check_that_raises_ends_the_wait(job, tokenizer, slow):
    """A signal ends the run, whatever compiles."""

    def check():
        raise InterruptedError

    rows = job.rows([{"prompt": "x", "structured_outputs": {"regex": "slow"}}])
    with pytest.raises(InterruptedError):
        list(with_grammars(prepare(rows, tokenizer, slow, DaemonPool(1, "text")), slow, check))


def test_matchers_are_renewed_when_memory_grows(grammars, monkeypatch):
    """64 regexes took 5 GiB by the states that they found. New matchers go on where the old ones were."""
    peak = 0
    monkeypatch.setattr("rosebatch.text.grammar.compiled._peak_memory", lambda: peak)
    own = grammars(GrammarLimits(memory=1 << 30))
    specs = [GrammarSpec("regex", f"{letter}[0-9]{{3}}z") for letter in "abc"]
    constraints = [own.compile(spec).start() for spec in specs]
    masks = np.zeros((3, 9), np.int32)
    expected = [[ord(letter)] for letter in "abc"], [list(range(48, 58))] * 3, [list(range(48, 58))] * 3
    before = [constraint._matcher for constraint in constraints]
    for step, allowed in enumerate(expected):
        peak = [0, 1 << 31, (1 << 31) + 1][step]
        TokenConstraint.fill_all(constraints, masks)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        assert [np.flatnonzero(row).tolist() for row in bits] == allowed
        renewed = [new is not old for new, old in zip((c._matcher for c in constraints), before, strict=True)]
        assert renewed == [step > 0] * 3
        for constraint, ids in zip(constraints, allowed, strict=True):
            constraint.feed(ids[0])
    assert own._renewals.count == 1, "memory that something else takes does not renew them at every step"


def test_grammars_without_completions_are_renewed_too(grammars, monkeypatch):
    """They are remembered for later rows. 32 regexes kept 500 MiB of states after their last row."""
    peaks = iter((0, 1 << 31))
    monkeypatch.setattr("rosebatch.text.grammar.compiled._peak_memory", lambda: next(peaks))
    own = grammars(GrammarLimits(memory=1 << 30))
    idle, busy = (own.compile(GrammarSpec("regex", pattern)) for pattern in ("a+", "b+"))
    idle.start()
    constraint, before = busy.start(), idle._matchers[True][0]
    masks = np.zeros((1, 9), np.int32)
    for _ in range(2):
        TokenConstraint.fill_all([constraint], masks)
    assert idle._matchers == {True: [], False: []}
    assert idle.start()._matcher is not before
