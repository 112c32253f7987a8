"""Driver and workers: every rank computes the same plans with the same masks, whenever these are made."""

import weakref
from array import array
from queue import SimpleQueue
from threading import Event, Thread

import pytest

from rosebatch.core.errors import LostProcessError
from rosebatch.engine.plan import Chunk, PackedStep, StepResult
from rosebatch.launch.driver import DriverRunner, Ranks, _receive
from rosebatch.launch.tp_worker import follow
from tests.helpers.waiting import PATIENCE_SECONDS


def plan(number, *, reset=False):
    return PackedStep(chunks=(Chunk(number, 0, array("I", [1]), sampled=1),), reset=reset)


class LateRunner:
    """Asks for a plan's masks when it is waited for or when the next one is launched, as the runner of a GPU does."""

    def __init__(self):
        self.computed = []
        self._deferred = None

    def launch(self, plan, masks):
        if plan.reset:
            self._deferred = None
        self._run_deferred()
        number = plan.chunks[0].id

        def sample():
            self.computed.append((number, masks()))

        self._deferred = sample

        def wait():
            if self._deferred is sample:
                self._run_deferred()
            return StepResult([[number]])

        return wait

    def _run_deferred(self):
        if self._deferred is not None:
            deferred, self._deferred = self._deferred, None
            deferred()


class StopError(Exception):
    pass


@pytest.fixture
def ranks():
    """A leading runner, the follower's own runner, and a function that waits until the follower has done all."""
    inbox, own, worker = SimpleQueue(), LateRunner(), LateRunner()

    def receive():
        message = inbox.get()
        if message is None:
            raise StopError
        return message

    def run():
        with pytest.raises(StopError):
            follow(worker, receive, async_depth=1)

    def explain(error):
        raise error

    thread = Thread(target=run)
    thread.start()

    def end():
        inbox.put(None)
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()

    return DriverRunner(own, inbox.put, explain, lambda: None), worker, end


@pytest.mark.parametrize("ahead", [0, 1])
def test_masks_reach_the_plan_that_they_are_for(ranks, ahead):
    """The driver makes them before or after it sends the next plan; another plan's masks would allow other tokens."""
    driver, worker, end = ranks
    waits = []
    for number in range(5):
        waits.append(driver.launch(plan(number), lambda number=number: f"masks {number}"))
        while len(waits) > ahead:
            waits.pop(0)()
    for wait in waits:
        wait()
    end()
    assert driver.own.computed == [(number, f"masks {number}") for number in range(5)]
    # Nobody has asked for the results of the last plans yet.
    assert worker.computed == driver.own.computed[: len(worker.computed)]
    assert len(worker.computed) >= 4


@pytest.mark.parametrize("made", [False, True])
def test_masks_of_an_aborted_plan_are_dropped(ranks, made):
    """They would be taken for those of the next plan."""
    driver, worker, end = ranks
    driver.launch(plan(0), lambda: "old")()
    driver.launch(plan(1), lambda: "dropped")
    if made:
        driver.launch(plan(4), lambda: "dropped too")
    driver.launch(plan(2, reset=True), lambda: "new")()
    driver.launch(plan(3), lambda: "last")
    end()
    assert (2, "new") in worker.computed
    assert "dropped too" not in dict(worker.computed).values()


def test_an_error_of_a_collective_is_explained():
    """PyTorch says that a connection was closed; the user has to know which process is gone."""

    class Failing:
        def launch(self, plan, masks):
            raise RuntimeError("Connection closed by peer")

    def explain(error):
        raise LostProcessError("rank 1 of 2: died (SIGKILL)") from error

    with pytest.raises(LostProcessError, match="rank 1 of 2"):
        DriverRunner(Failing(), lambda message: None, explain, lambda: None).launch(plan(0), lambda: None)


def test_other_errors_stay_what_they_are(monkeypatch):
    """If no process is gone, the error is the step's own."""
    monkeypatch.setattr("rosebatch.launch.driver._PATIENCE_SECONDS", 0.01)
    from rosebatch.config.run import RunConfig

    with pytest.raises(ValueError, match="own"):
        Ranks(RunConfig(), "store", "state").explain(ValueError("own"))


def test_results_without_a_rank_are_refused():
    """The kernels that waited for it are let go, with wrong sums: their tokens would be written."""

    class Going:
        def launch(self, plan, masks):
            return lambda: StepResult([[0]])

    def require_all():
        if lost:
            raise LostProcessError("rank 1 of 2: died (SIGKILL)")

    lost = []
    driver = DriverRunner(Going(), lambda message: None, lambda error: None, require_all)
    assert driver.launch(plan(0), lambda: None)().token_ids == [[0]]
    wait = driver.launch(plan(1), lambda: None)
    lost.append(1)
    with pytest.raises(LostProcessError, match="rank 1 of 2"):
        wait()


def test_what_is_freed_at_the_end_comes_in_turn():
    """NCCL ends behind the graphs that hold its kernels: its group was left first, and that waited for ever."""
    from rosebatch.config.run import RunConfig

    ended = []
    ranks = Ranks(RunConfig(), "store", "state")
    ranks.at_end(lambda: ended.append("group"))
    ranks.at_end(lambda: ended.append("graphs"))
    assert ended == []
    del ranks
    assert ended == ["graphs", "group"]


def test_the_end_comes_while_a_loss_is_dealt_with():
    """NCCL is aborted on another thread, and waits for graphs that the end frees. That thread put off the end."""
    from rosebatch.config.run import RunConfig

    begun, freed = Event(), Event()
    ranks = Ranks(RunConfig(), "store", "state")
    ranks.at_end(freed.set)
    ranks.on_loss(lambda: begun.set() or freed.wait(PATIENCE_SECONDS))
    ranks._processes.append(Gone())
    thread = Thread(target=_receive, args=(weakref.ref(ranks), 1, None))
    thread.start()
    assert begun.wait(PATIENCE_SECONDS)
    with pytest.raises(LostProcessError, match=r"rank 1 of 1: died \(SIGKILL"):
        ranks.require_all()
    del ranks
    thread.join(PATIENCE_SECONDS)
    assert freed.is_set()
    assert not thread.is_alive()


class Gone:
    """A process that is no more."""

    def how_it_ended(self):
        return "SIGKILL"

    def kill(self):
        pass
