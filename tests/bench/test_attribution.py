"""A trace of kernels -> where the time went. Tracing needs a GPU, but splitting and adding up does not."""

import pytest

from rosebatch.bench import attribution
from rosebatch.bench.attribution import attribute, by_key, kernel_times, split_steps, usual_step
from rosebatch.launch import launch

PRODUCT = "void cutlass::Kernel2<(int)3>(Params)"
COPY = "void at::native::index_copy_kernel<int>(int*)"
PROMPT = ("_uclip", PRODUCT, "_prepare", "_gated_prefill", "_choose", "_advance")
DECODE = ("_uclip", PRODUCT, "_gated_decode", "_choose", "_advance")


def trace(*steps):
    """Kernels one after the other, with 1 µs between them, and a copy by the host that is not a kernel.

    Each step is names and their durations.
    """
    events, now = [{"cat": "gpu_memcpy", "name": "copy", "ts": 0, "dur": 1000}], 0.0
    for names, durations in steps:
        for name, duration in zip(names, durations, strict=True):
            events.append({"cat": "kernel", "name": name, "ts": now, "dur": duration})
            now += duration + 1
    return events


def durations(step):
    return [time.duration for time in step]


def test_prompts_and_decodes():
    """Both kinds of steps end with the feedback kernel: only the attention kernel tells them apart."""
    softmax = ("_norm", "_decode", "_advance")
    steps = split_steps(
        kernel_times(
            trace(
                (PROMPT, (1, 2, 3, 4, 5, 6)),
                (("_norm", "_prefill", "_advance"), (7, 7, 7)),
                (DECODE, (1, 2, 3, 4, 5)),
                (softmax, (8, 8, 8)),
            )
        )
    )
    assert [durations(step) for step in steps.prompts] == [[1, 2, 3, 4, 5, 6], [7, 7, 7]]
    assert [durations(step) for step in steps.decodes] == [[1, 2, 3, 4, 5], [8, 8, 8]]


def test_a_chunk_of_a_prompt_that_feeds_nothing_back():
    """Its time is prefill too; kernels after the last feedback belong to a step that was cut off."""
    chunk = (PROMPT[:4], (9, 9, 9, 9))
    steps = split_steps(kernel_times(trace(chunk, (PROMPT, (1, 1, 1, 1, 1, 1)), (DECODE[:3], (5, 5, 5)))))
    assert [durations(step) for step in steps.prompts] == [[9, 9, 9, 9, 1, 1, 1, 1, 1, 1]]
    assert steps.decodes == []


def test_waiting_for_a_step_is_no_time_of_it():
    """Between two steps the GPU may wait for the host or the profiler."""
    events = trace((DECODE, (1, 1, 1, 1, 1)))
    events += [{**event, "ts": event["ts"] + 5000} for event in trace((DECODE, (2, 2, 2, 2, 2)))]
    _, (first, second) = split_steps(kernel_times(events))
    assert [time.advances for time in first] == [1, 2, 2, 2, 2]
    assert [time.advances for time in second] == [2, 3, 3, 3, 3]


def test_waiting_within_a_prompt_step_is_nobodys():
    """The host launches these kernels one by one: its 20 ms before a copy counted as the copy's."""
    events = trace((("_norm", COPY, "_prefill", "_advance"), (1, 2, 3, 4)))
    for event in events[2:]:
        event["ts"] += 20000
    (step,) = split_steps(kernel_times(events)).prompts
    assert [time.advances for time in step] == [1, 2, 3, 4]


def test_the_usual_step():
    """A step that the profiler slowed down must not be taken, nor one with further kernels of the host."""
    steps = split_steps(
        kernel_times(
            reversed(
                trace(
                    ((COPY, *DECODE), (1, 2, 5, 3, 1, 1)),
                    (DECODE, (2, 5, 3, 1, 1)),
                    (DECODE, (2, 5, 300, 1, 1)),
                    (DECODE, (2, 4, 3, 1, 1)),
                )
            )
        )
    )
    assert durations(usual_step(steps.decodes)) == [2, 5, 3, 1, 1]
    # One step of each kind: the host's further kernels are not part of the usual step.
    assert len(usual_step(steps.decodes[:2])) == len(DECODE)


def test_overlapping_kernels_add_up_to_the_step():
    """If a kernel begins before the last one has ended, only the time that it adds counts."""
    names = ("_norm", "_decode", PRODUCT, "_advance")
    starts = [(100, 10), (105, 10), (107, 2), (120, 1)]
    events = [
        {"cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, (ts, dur) in zip(names, starts, strict=True)
    ]
    (step,) = split_steps(kernel_times(events)).decodes
    assert [time.advances for time in step] == [10, 5, 0, 6]
    assert by_key(step, "part") == {
        "norms": (1, 10, 10),
        "feedback": (1, 6, 1),
        "attention": (1, 5, 10),
        "matrix products": (1, 0, 2),
    }
    assert by_key(step, "name")["Kernel2"] == (1, 0, 2)


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("attention", ["_decode", "_prefill", "_gated_decode", "_gated_prefill"]),
        ("norms", ["_norm", "_uclip"]),
        ("KV and rotary", ["_prepare", "_append", "_copy_blocks"]),
        ("activations", ["_activation", "_activation_mul", "_bias_residual"]),
        ("matrix products", ["_product", "nvjet_tst_128x8", "sm90_xmma_gemm_bf16", PRODUCT, "cublasSplitKParams"]),
        ("sampling", ["_summarise", "_choose"]),
        ("feedback", ["_advance"]),
        ("the rest", [COPY, "void at::native::vectorized_gather_kernel<16>(char*)"]),
    ],
)
def test_parts(part, names):
    """A kernel of ours that no pattern matches would count as PyTorch's."""
    assert [time.part for time in kernel_times(trace((names, [1] * len(names))))] == [part] * len(names)


@pytest.fixture
def engine(make_case):
    """An engine of the toy model on the CPU, with room for all requests."""
    return launch(make_case().config).engine


def test_only_the_beginning_of_a_run_is_traced(engine, make_case, monkeypatch):
    """A whole run's trace would not fit into memory, and a run left unfinished would spoil the engine's next one."""
    seen = []

    def fake_trace(work):
        work()
        seen.append((engine.stats.decode_steps, engine.has_unfinished))
        return kernel_times(
            trace((PROMPT, (1, 2, 3, 4, 5, 6)), (PROMPT, (1, 2, 3, 4, 5, 6)), (DECODE, (1, 2, 3, 4, 5)))
        )

    monkeypatch.setattr(attribution, "trace", fake_trace)
    case = make_case(output_len=8)
    found = attribute(engine, case.workload().requests(case.scenario.sampling))
    assert seen == [(2, True)]
    assert not engine.has_unfinished
    assert engine.stats.decode_steps == 7
    # In a decode step the microsecond before each kernel counts, except before the first.
    assert found == {
        "prefill_us": {
            "feedback": 12.0,
            "sampling": 10.0,
            "attention": 8.0,
            "KV and rotary": 6.0,
            "matrix products": 4.0,
            "norms": 2.0,
        },
        "decode_step_us": {
            "feedback": 6.0,
            "sampling": 5.0,
            "attention": 4.0,
            "matrix products": 3.0,
            "norms": 1.0,
        },
        "decode_kernels": 5,
    }


def test_a_run_without_decode_steps(engine, make_case, monkeypatch):
    """One token each comes from prefill: there is no decode step to show or to wait for."""

    def fake_trace(work):
        work()
        return kernel_times(trace((PROMPT, (1, 2, 3, 4, 5, 6))))

    monkeypatch.setattr(attribution, "trace", fake_trace)
    case = make_case(output_len=1)
    found = attribute(engine, case.workload().requests(case.scenario.sampling))
    assert (found["decode_step_us"], found["decode_kernels"]) == ({}, 0)
    assert sum(found["prefill_us"].values()) == 21
