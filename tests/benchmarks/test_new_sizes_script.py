"""``python -m benchmarks.new_sizes``: what it times, without a GPU."""

from benchmarks import new_sizes
from benchmarks.new_sizes import Watch
from rosebatch.engine.triton_runner.graphs import StepGraphs


def test_each_part_is_timed_once(monkeypatch):
    """A capture runs the body as well, which is no first step; the wait belongs to what it waits for."""
    now, waits = [0.0], []
    monkeypatch.setattr(new_sizes.time, "perf_counter", lambda: now[0])
    costs = {"body": 3.0, "capture": 5.0, "replay": 0.25}

    def spend(name, result):
        now[0] += costs[name]
        return result

    graphs = StepGraphs(lambda kind: spend("body", kind), enabled=True)
    graphs._capture = lambda kind: spend("capture", ("graph", graphs.body(kind)))
    graphs.replay = lambda graph: spend("replay", None)
    watch = Watch(graphs, lambda: waits.append(now[0]))
    graphs.run(8, steps=4)
    assert watch.times == {"first": [3000.0], "capture": [8000.0], "replay": [250.0] * 3}
    assert watch.take() == {"first": 3000.0, "capture": 8000.0, "replay": 250.0}
    assert len(waits) == 10
    graphs.run(8, steps=2)
    assert watch.take() == {"replay": 250.0}
    graphs.run(16)
    assert watch.take() == {"first": 3000.0}
