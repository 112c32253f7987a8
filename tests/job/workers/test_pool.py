"""A pool of workers, without processes."""

import itertools
import time
from dataclasses import replace

import pytest

from rosebatch.config.run import RunConfig
from rosebatch.core.errors import LostProcessError, UserError
from rosebatch.engine.metrics.outlook import Outlook
from rosebatch.engine.metrics.stats import EngineStats
from rosebatch.job.model_info import ModelInfo
from rosebatch.job.serve_options import Parsed
from rosebatch.job.workers import messages as m
from rosebatch.job.workers.child import Link
from rosebatch.job.workers.pool import Pool
from rosebatch.job.workers.row_task import RowTask

READY = m.Ready(4, {}, 0.0)
PLANNED = m.Planned(ModelInfo("fake", {}, {}, True), "state")


class Process:
    """Keeps what it is told."""

    def __init__(self):
        self.told, self.killed = [], False

    def send(self, message):
        self.told.append(type(message))
        self.last = message

    def kill(self):
        self.killed = True

    def how_it_ended(self):
        return "SIGKILL"


class Task:
    """Counts what it hears."""

    message = m.Begin(None, None, None)

    def __init__(self):
        self.joined, self.heard = [], []

    def hear(self, number, outlook):
        self.heard.append((number, outlook))

    def turn(self):
        pass

    def flush(self):
        pass

    def join(self, number):
        self.joined.append(number)

    def died(self, number, how):
        assert number in self.joined


@pytest.fixture
def pool():
    """Two workers, of which the first one is loaded."""
    pool = Pool(RunConfig(device="cpu", data_parallel_size=2, worker_timeout=3.0), quiet=True)
    for number, worker in enumerate(pool.workers):
        worker.process = Process()
        pool._receive(number, PLANNED)
    pool.workers[0].ready = READY
    return pool


def told(pool, number):
    return pool.workers[number].process.told


def look(pool):
    """Look for silent workers, who were all heard long ago."""
    for worker in pool.workers:
        worker.silence = 9
    pool._looked = 0.0
    pool._end_silent()
    return [worker.process.killed for worker in pool.workers]


def test_a_silent_worker_beside_a_busy_one(pool, monkeypatch):
    """It was looked for only while no message came, and so never beside others that work."""
    for worker in pool.workers:
        worker.ready, worker.begun, worker.silence = READY, True, 9
    receive = pool._receive

    def and_again(number, message):
        receive(number, message)
        pool._inbox.put((1, 0, m.Beat()))

    monkeypatch.setattr(pool, "_receive", and_again)
    and_again(1, m.Beat())
    rounds = iter(range(1000))
    pool.wait(lambda: pool.workers[0].process.killed or next(rounds) == 999)
    assert [worker.process.killed for worker in pool.workers] == [True, False]


class Told(Link):
    """Keeps what a worker sends."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def send(self, message):
        self.sent.append(message)


def test_what_a_worker_has_before_it(pool, monkeypatch):
    """Rates of workers counted finished rows alone, so nothing was told for as long as the first ones ran."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    link, outlook = Told(), Outlook(requests=3, sequences=3, output_tokens=40)
    link.check()
    assert link.sent == [m.Beat(None)]
    link = Told()
    link.look = lambda: outlook
    link.check()
    link.check()
    assert link.sent == [m.Beat(outlook)], "once a second"
    pool._task = Task()
    for message in (m.Beat(None), *link.sent):
        pool._receive(1, message)
    assert pool._task.heard == [(1, outlook)]
    task = RowTask(pool, m.Begin(Parsed(), None, None), None)
    for number in range(2):
        monkeypatch.setattr(time, "perf_counter", lambda at=50.0 + number: at)
        task.hear(number, outlook)
    monkeypatch.setattr(time, "perf_counter", lambda: 51.5)
    assert task.outlook() == Outlook(requests=6, sequences=6, output_tokens=80, age=1.5 + 0.5)


def test_a_run_that_was_suspended(pool, monkeypatch):
    """Its workers were suspended with it, and killed as silent ones before a message of theirs was heard."""
    clock = itertools.count(1000, 1000)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    for worker in pool.workers:
        worker.begun, worker.silence = True, 2.5
    pool._inbox.put((0, 0, m.Beat()))
    pool.turn()
    assert [worker.process.killed for worker in pool.workers] == [False, True]
    for _ in range(2):
        pool._end_silent()
    assert not pool.workers[0].process.killed
    pool._end_silent()
    assert pool.workers[0].process.killed


def test_an_idle_worker_is_silent(pool):
    """After ten idle minutes, a question to the workers of a model killed all of them."""
    assert look(pool) == [False, False]
    pool.begin(Task())
    assert look(pool) == [True, False]


def test_a_worker_that_is_ready_after_the_last_row(pool):
    """It began and was never told to end: the next task waited for it without end."""
    task = Task()
    pool.begin(task)
    pool.end()
    pool._receive(1, READY)
    assert (task.joined, told(pool, 0), told(pool, 1)) == ([0], [m.Begin, m.End], [])
    pool._receive(0, m.Done(EngineStats(), {}, None))
    pool.forget()
    following = Task()
    pool.begin(following)
    assert following.joined == [0, 1]


def test_a_model_is_loaded_once(pool):
    """A worker that was told twice took the second for a question, and died."""
    pool.workers[0].ready = None
    pool._receive(0, READY)
    pool.load()
    pool.load()
    assert (told(pool, 0), told(pool, 1)) == ([m.Load], [m.Load])


def replace_process(pool, number, planned):
    """The worker's process died, and another one has found the model."""
    pool.workers[number].process, pool.workers[number].ready = Process(), None
    pool.workers[number].life += 1
    pool.workers[number].planned = pool.workers[number].loads = False
    pool._receive(number, planned)


def test_a_process_that_finds_other_files(pool):
    """A replaced worker loaded what the folder held by then: one output had answers of two models."""
    pool.load()
    replace_process(pool, 1, replace(PLANNED, state="other"))
    assert (told(pool, 0), told(pool, 1)) == ([m.Load, m.Fingerprint], []), "it may be a copy: it waits for the hash"
    pool._receive(0, m.Identified("hash"))
    assert (told(pool, 1), pool.workers[1].process.last) == ([m.Load], m.Load("hash"))
    replace_process(pool, 1, PLANNED)
    assert pool.workers[1].process.last == m.Load()
    assert (pool.fingerprint(), told(pool, 0)) == ("hash", [m.Load, m.Fingerprint])


def test_a_process_that_finds_other_files_when_all_others_are_gone(pool):
    """Nobody can tell what the files were: nothing may be loaded."""
    pool.load()
    pool.workers[0].planned = False
    with pytest.raises(UserError, match=r"^CPU 1: the files of fake changed after the run began$"):
        replace_process(pool, 1, replace(PLANNED, state="other"))


def test_a_process_that_finds_another_model(pool):
    """The manifest names what decides results, such as versions and a tokenizer; nodes may differ."""
    other = replace(PLANNED.facts, identity={"versions": {"torch": "0.1"}})
    with pytest.raises(UserError, match=r"^CPU 1: fake is not the model that the run began with$"):
        replace_process(pool, 1, replace(PLANNED, facts=other))


def test_the_process_that_hashes_dies(pool):
    """Another one with the same files is asked; the run waited for the dead one."""
    pool.identify()
    replace_process(pool, 0, replace(PLANNED))
    pool.identify()
    assert (told(pool, 0), told(pool, 1)) == ([m.Fingerprint], [])
    pool._receive(0, m.Identified("hash"))
    assert pool.fingerprint() == "hash"


def test_the_clock_of_another_machine(pool):
    """The first token of a worker elsewhere came days before the job, or after its end."""
    before = time.perf_counter()
    pool.begin(Task())
    after = time.perf_counter()
    stats = EngineStats(first_token_time=2.5)
    pool._receive(0, m.Done(stats, {}, None))
    assert before <= pool.workers[0].done.stats.first_token_time - 2.5 <= after


def test_a_task_that_ends_before_it_begins(pool):
    """A second end reached workers that wait for a task, and they died of it."""
    pool.begin(Task())
    pool.end(drop=True)
    pool.forget()
    pool._inbox.put((None, 0, lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        # They have not said yet that the first one is done.
        pool.begin(Task())
    pool.end(drop=True)
    assert told(pool, 0) == [m.Begin, m.End]


def test_closed_workers_stay_closed(pool):
    """Their ends were taken for deaths: others took their place, and nothing ended these."""
    pool.begin(Task())
    pool.close()
    for number in range(2):
        pool._inbox.put((number, 0, None))
    with pytest.raises(RuntimeError, match="closed"):
        pool.turn()
    assert [worker.life for worker in pool.workers] == [0, 0]


def test_messages_behind_one_that_raises(pool):
    """They were lost with it: a worker that had said that it was done was waited for without end."""
    pool.begin(Task())
    pool.end()
    pool._inbox.put((None, 0, lambda: 1 / 0))
    pool._inbox.put((0, 0, m.Done(EngineStats(), {}, None)))
    with pytest.raises(ZeroDivisionError):
        pool.turn()
    pool.turn()
    assert not pool.workers[0].begun


def test_a_death_after_the_last_row(pool, monkeypatch):
    """Of a worker that was ready too late to take part: all rows were there, and the job failed all the same."""
    monkeypatch.setattr(pool, "_spawn", lambda number: None)
    pool.begin(Task())
    pool.end()
    pool._receive(1, READY)
    pool._receive(1, None)
    assert [worker.deaths for worker in pool.workers] == [0, 1]


def test_a_worker_that_waited_for_another(pool):
    """It had been silent as long as the one whose hanging end it waited for, and was killed in its place."""
    pool.workers[1].ready = READY
    pool.begin(Task())
    for worker in pool.workers:
        worker.begun, worker.silence = False, 9
    pool.begin(Task())
    pool._looked = 0.0
    pool._end_silent()
    assert [worker.process.killed for worker in pool.workers] == [False, False]


def test_a_process_that_cannot_be_ended(pool, monkeypatch, capsys):
    """A driver holds it: nobody told of its end, and its rows were waited for without end."""
    spawned = []
    monkeypatch.setattr(pool, "_spawn", spawned.append)
    pool.begin(Task())
    pool.workers[0].joined = pool.workers[0].silence = 0.0
    look(pool)
    pool.turn()
    assert (spawned, pool.workers[0].restarts) == ([0], 1)
    assert "the worker process died (no sign of life for 10 s)" in capsys.readouterr().err
    pool._inbox.put((0, 0, None))
    pool.turn()
    assert (spawned, pool.workers[0].restarts) == ([0], 1), "later it has ended after all"


def test_a_run_that_nobody_can_serve(pool, monkeypatch):
    """Another process took the last one's place, and hung while it loaded: the run waited for it for ever."""
    clock = itertools.count(1000, 0.5)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(pool, "_spawn", lambda number: None)
    for worker in pool.workers:
        worker.ready = None
    for _ in range(100):
        pool._end_silent()
    assert pool._stopped == 0.0, "before the first one is ready, a model may be fetched for hours"
    pool.workers[0].started = next(clock)
    pool._receive(0, READY)
    pool._receive(0, None)
    looks, pool._looked = 0, next(clock)
    with pytest.raises(LostProcessError, match="no worker is left: none has come back within 5 s"):
        while looks < 100:
            pool._end_silent()
            looks += 1
    assert looks == 5.0 / 0.5
    pool.workers[0].started = next(clock) - 30
    pool._receive(0, READY)
    pool._end_silent()
    pool._receive(0, None)
    for _ in range(int(10 * 30 / 0.5)):
        pool._end_silent()
    with pytest.raises(LostProcessError, match=r"within 30\d s"):
        for _ in range(25):
            pool._end_silent()
