"""A trace of kernels -> where a step's time went. What is traced needs a GPU; how it is added up does not."""

import pytest

from rosebatch.bench.decode_profile import Subject, by_key, kernel_times

_NAMES = ("_norm", "_decode", "void cutlass::Kernel2<(int)3>(Params)", "_advance")


def trace(*steps):
    """Kernels one behind the other, one µs apart; each step is the durations of the names above."""
    events, now = [{"cat": "gpu_memcpy", "name": "copy", "ts": 0, "dur": 1000}], 0.0
    for durations in steps:
        for name, duration in zip(_NAMES, durations, strict=False):
            events.append({"cat": "kernel", "name": name, "ts": now, "dur": duration})
            now += duration + 1
    return events


def test_the_step_in_the_middle():
    """Neither the first, which may have begun before, nor one that the profiler slowed down."""
    steps = trace((99, 9, 9, 9), (2, 5, 3, 1), (2, 5, 300, 1), (2, 4, 3, 1), (7,))
    times = kernel_times(reversed(steps))
    assert [time.duration for time in times] == [2, 5, 3, 1]


def test_overlapping_kernels_add_up_to_the_step():
    """Of a kernel that begins before the one in front has ended, only what it adds counts."""
    events = trace((1, 1, 1, 1))
    starts = [(100, 10), (105, 10), (107, 2), (120, 1)]
    events += [
        {"cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, (ts, dur) in zip(_NAMES, starts, strict=True)
    ]
    times = kernel_times(events)
    assert [time.advances for time in times] == [10, 5, 0, 6]
    assert by_key(times, "part") == {
        "norms": (1, 10, 10),
        "feedback": (1, 6, 1),
        "attention, with what it appends": (1, 5, 10),
        "matrix products": (1, 0, 2),
    }
    assert by_key(times, "name")["Kernel2"] == (1, 0, 2)


def test_subjects():
    """What follows the tokens is one word, or the mistake would be profiled as greedy."""
    assert Subject.parse("gpt2:float16:256:550:sampled") == Subject("gpt2", "float16", 256, 550, True)
    with pytest.raises(ValueError, match="sampled"):
        Subject.parse("gpt2:float16:256:550:sample")
