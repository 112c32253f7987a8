"""A worker in an actor and what stands for it in the parent, without Ray."""

import pickle
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from rosebatch.core.version import __version__
from rosebatch.job.workers import actor
from rosebatch.job.workers import messages as m
from rosebatch.job.workers.ray_cluster import _RayWorker
from tests.helpers.waiting import no_thread_left, until


@pytest.mark.parametrize("error", [None, ValueError("odd")])
def test_work_that_has_ended(monkeypatch, error):
    """An actor whose model had lost a rank lived on: it was replaced after ten minutes, or never."""

    def serve(link):
        link.send(m.Lost("rank 1: SIGKILL"))
        if error is not None:
            raise error

    monkeypatch.setattr(actor, "serve_parent", serve)
    worker = actor.WorkerActor()
    worker.start({}, str(Path.cwd()))
    heard = pickle.loads(worker.receive())
    assert [type(message) for message in heard] == [m.Lost]
    with pytest.raises(RuntimeError, match="odd" if error else "the work has ended"):
        worker.receive()


def test_an_answer_behind_the_end():
    """The hash of the weights came after the end of the work: the end was sent as if it were a message."""
    worker = actor.WorkerActor()
    for message in (m.Lost("rank 1"), EOFError("the work has ended"), m.Answer("hash", 1)):
        worker._link.send(message)
    assert [type(message) for message in pickle.loads(worker.receive())] == [m.Lost]
    with pytest.raises(RuntimeError, match="the work has ended"):
        worker.receive()


def test_no_thread_is_left():
    """Each actor that was replaced left a thread that waited for messages."""

    class RayError(Exception):
        pass

    dead = threading.Event()

    def get(reference):
        if reference != "receive":
            return "node", [], __version__
        dead.wait()
        raise RayError("the actor died")

    ray = SimpleNamespace(
        exceptions=SimpleNamespace(RayError=RayError),
        wait=lambda references, timeout: (references, []),
        nodes=lambda: [{"Alive": True}],
        get=get,
        kill=lambda actor, no_restart: dead.set(),
    )
    methods = {name: SimpleNamespace(remote=lambda *_, name=name: name) for name in ("start", "receive", "send")}
    heard = []
    places = []
    with no_thread_left():
        worker = _RayWorker(
            ray, SimpleNamespace(**methods), {}, heard.append, place=lambda *at: places.append(at), is_late=lambda: None
        )
        until(lambda: places)
        worker.kill()
        until(lambda: heard == [None])
    assert worker.how_it_ended() == "the actor died"
