"""A trace of kernels -> where the time went. Tracing needs a GPU, but splitting and adding up does not."""

from unittest.mock import Mock

import pytest

from rosebatch.bench import attribution
from rosebatch.bench.attribution import attribute, by_key, take_parts, usual_step
from rosebatch.bench.kernel_trace import Calls, api_calls, kernel_times, read_steps, split_steps
from rosebatch.bench.parts import PARTS
from rosebatch.launch.launch import launch

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
    prompts = (PROMPT, (1, 2, 3, 4, 5, 6)), (("_norm", "_prefill", "_advance"), (7, 7, 7))
    decodes = (DECODE, (1, 2, 3, 4, 5)), (("_norm", "_decode", "_advance"), (8, 8, 8))
    steps = split_steps(kernel_times(trace(*prompts, *decodes)))
    assert [durations(step) for step in steps.prompts] == [[1, 2, 3, 4, 5, 6], [7, 7, 7]]
    assert [durations(step) for step in steps.decodes] == [[1, 2, 3, 4, 5], [8, 8, 8]]


def test_a_step_with_drafts_ends_where_they_are_verified():
    """Two of them would be one step, or a part of the next."""
    drafts = (("_propose", "_norm", "_decode", "_choose", "_verify"), (1, 2, 3, 4, 5))
    steps = split_steps(kernel_times(trace(drafts, drafts, (DECODE, (6, 6, 6, 6, 6)))))
    assert [durations(step) for step in steps.decodes] == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [6, 6, 6, 6, 6]]


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
    decodes = [(DECODE, durations) for durations in ((2, 5, 3, 1, 1), (2, 5, 300, 1, 1), (2, 4, 3, 1, 1))]
    events = trace(((COPY, *DECODE), (1, 2, 5, 3, 1, 1)), *decodes)
    steps = split_steps(kernel_times(reversed(events)))
    assert durations(usual_step(steps.decodes)) == [2, 5, 3, 1, 1]
    # One step of each kind: the host's further kernels are not part of the usual step.
    assert len(usual_step(steps.decodes[:2])) == len(DECODE)


def test_overlapping_kernels_add_up_to_the_step():
    """If a kernel begins before the last one has ended, only the time that it adds counts."""
    kernels = [("_norm", 100, 10), ("_decode", 105, 10), (PRODUCT, 107, 2), ("_advance", 120, 1)]
    events = [{"cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in kernels]
    (step,) = split_steps(kernel_times(events)).decodes
    assert [time.advances for time in step] == [10, 5, 0, 6]
    expected = {"norms": (1, 10, 10), "feedback": (1, 6, 1), "attention": (1, 5, 10), "matrix products": (1, 0, 2)}
    assert by_key(step, "part") == expected
    assert by_key(step, "name")["Kernel2"] == (1, 0, 2)


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("attention", ["_decode", "_prefill", "_gated_decode", "_gated_prefill"]),
        ("norms", ["_norm", "_whole_norm", "_uclip"]),
        ("KV and rotary", ["_prepare", "_append", "_copy_blocks"]),
        ("activations", ["_activation", "_activation_mul", "_bias_residual"]),
        ("matrix products", ["_product", "nvjet_tst_128x8", "sm90_xmma_gemm_bf16"]),
        ("matrix products", ["gemv2T", PRODUCT, "cublasSplitKParams"]),
        ("logits", ["_scale_and_cap"]),
        ("sampling", ["_summarise", "_choose", "_sum_segments", "_report"]),
        ("drafts", ["_propose"]),
        ("feedback", ["_advance", "_verify"]),
        ("the rest", [COPY, "void at::native::vectorized_gather_kernel<16>(char*)"]),
    ],
)
def test_parts(part, names):
    """A kernel of ours that no pattern matches would count as PyTorch's."""
    assert [time.part for time in kernel_times(trace((names, [1] * len(names))))] == [part] * len(names)


HOST = {
    "qkv projection": PRODUCT,
    "attention": "_gated_decode",
    "out projection": PRODUCT,
    "gate, up projection": PRODUCT,
    "down projection": PRODUCT,
    "logits": PRODUCT,
    "sampling": "void at::native::reduce_kernel<int>(int*)",
}


def launched_in_ranges(parts=HOST, step="decode step"):
    """A step as the host launches it: one kernel in each range, 5 µs late, all in the range of the step."""
    events, now = [], 100.0
    for number, (part, name) in enumerate(parts.items()):
        args = {"correlation": number}
        events += [
            {"cat": "user_annotation", "name": part, "ts": now, "dur": 10.0},
            {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": now + 2, "dur": 3.0, "args": args},
            {"cat": "kernel", "name": name, "ts": now + 7, "dur": 4.0, "args": args},
        ]
        now += 20
    return [{"cat": "user_annotation", "name": step, "ts": 95.0, "dur": now - 95.0}, *events]


def test_products_by_the_range_that_launched_them():
    """All products have one name: without ranges qkv, out, MLP and logits were a single row."""
    (step,) = read_steps(launched_in_ranges()).decodes
    assert [time.part for time in step] == list(HOST)
    # The GPU waits 16 µs for each kernel that the host launches: nobody's time.
    assert [time.advances for time in step] == [4.0] * len(HOST)
    assert not any(time.replayed for time in step)


def test_what_a_range_says_of_kernels_by_pytorch():
    """A switch that is off leaves PyTorch's kernels, whose names say nothing; ours say more than their range."""
    kernels = {"norms": COPY, "gate, up projection": "void at::native::gelu_kernel(float*)", "attention": "_prepare"}
    (step,) = read_steps(launched_in_ranges(kernels)).decodes
    assert [time.part for time in step] == ["norms", "activations", "KV and rotary"]


def test_the_innermost_range_counts():
    """The operators of a projection that lies in a range of its own within attention are the projection's."""
    events = launched_in_ranges({"KV and rotary": COPY})
    events.append({"cat": "user_annotation", "name": "attention", "ts": 98.0, "dur": 15.0})
    (step,) = read_steps(events).decodes
    assert [time.part for time in step] == ["KV and rotary"]


def test_steps_without_a_feedback_kernel():
    """The PyTorch runner has none: its ranges split the steps, and what no step launched is dropped."""
    prompt = launched_in_ranges(step="prompt step")
    late = [{**event, "ts": event["ts"] + 1000} for event in prompt if "args" in event]
    late = [{**event, "args": {"correlation": event["args"]["correlation"] + 50}} for event in late]
    decode = {"cat": "user_annotation", "name": "decode step", "ts": 1095.0, "dur": 90.0}
    steps = read_steps([*prompt, decode, *late])
    assert [len(step) for step in steps.prompts] == [len(HOST)]
    assert [len(step) for step in steps.decodes] == [5]


def test_graphs_take_the_names_of_launched_steps():
    """A graph's kernels have no ranges. Another kernel for one product, or one more, must not shift the names."""
    (named,) = read_steps(launched_in_ranges()).decodes
    names = list(HOST.values())
    replayed = trace((names, [1] * len(names)))
    taken = take_parts(kernel_times(replayed), named)
    assert [time.part for time in taken] == list(HOST)
    assert [time.duration for time in taken] == [1] * len(names)
    other = trace((["copy", *names[:2], "nvjet_other", *names[3:]], [1] * (len(names) + 1)))
    parts = [time.part for time in take_parts(kernel_times(other), named)]
    assert parts == ["the rest", *list(HOST)[:2], "matrix products", *list(HOST)[3:]]


def test_replays_are_told_from_launches():
    """Waiting for the host within a step counts for no kernel, but idle time inside a graph does."""
    events = trace((DECODE, (1, 2, 3, 4, 5)))
    for number, event in enumerate(events[1:]):
        event["args"] = {"correlation": 1 if number < 3 else number}
        if number >= 3:
            event["ts"] += 50
    events.append({"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 1, "args": {"correlation": 1}})
    for number in (3, 4):
        args = {"correlation": number}
        events.append({"cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": number, "dur": 1, "args": args})
    (step,) = read_steps(events).decodes
    assert [time.replayed for time in step] == [True] * 3 + [False] * 2
    assert [time.advances - time.duration for time in step] == [0, 1, 1, 51, 1]


def test_calls_of_cuda():
    """The profiler's own wait at the end would be the longest call of all."""
    calls = [("GraphLaunch", 5), ("EventSynchronize", 90), ("GraphLaunch", 6), ("DeviceSynchronize", 900)]
    events = [{"cat": "cuda_runtime", "name": f"cuda{name}", "ts": 0, "dur": dur} for name, dur in calls]
    events.append({"cat": "kernel", "name": "_norm", "ts": 0, "dur": 7})
    assert api_calls(events) == {"cudaEventSynchronize": Calls(1, 90), "cudaGraphLaunch": Calls(2, 11)}
    assert list(api_calls(events)) == ["cudaEventSynchronize", "cudaGraphLaunch"]


@pytest.fixture
def engine(make_case):
    """An engine of the toy model on the CPU, with room for all requests."""
    return launch(make_case().config).engine


def requests_of(case):
    return lambda run: case.workload(run).requests(case.scenario.sampling)


def test_only_the_beginning_of_a_run_is_traced(engine, make_case, monkeypatch):
    """A whole run's trace would not fit into memory, and a run left unfinished would spoil the engine's next one."""
    seen = []

    def fake_record(work, *, cuda, host, path=None):
        work()
        seen.append((cuda, host, engine.stats.decode_steps, engine.has_unfinished))
        steps = trace((PROMPT, (1, 2, 3, 4, 5, 6)), (PROMPT, (1, 2, 3, 4, 5, 6)), (DECODE, (1, 2, 3, 4, 5)))
        launched = {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 8}
        return [*steps, launched]

    monkeypatch.setattr(attribution, "record", fake_record)
    found = attribute(engine, requests_of(make_case(output_len=40)), cuda=True)
    # First with the host's ranges, then without what they cost.
    assert seen == [(True, True, 32, True), (True, False, 32, True)]
    assert not engine.has_unfinished
    assert engine.stats.decode_steps == 39
    # In a decode step the microsecond before each kernel counts, except before the first.
    parts = ("feedback", "sampling", "attention", "KV and rotary", "matrix products", "norms")
    decode = {"feedback": 6.0, "sampling": 5.0, "attention": 4.0, "matrix products": 3.0, "norms": 1.0}
    expected = {"prefill_us": dict(zip(parts, (12.0, 10.0, 8.0, 6.0, 4.0, 2.0), strict=True)), "decode_step_us": decode}
    expected |= {"decode_kernels": 5, "num_layers": 2, "replays": {}, "decode_waiting_us": 0, "api_decode_steps": 1}
    expected |= {"api_us": {"cudaGraphLaunch": {"calls": 1, "us": 8}}}
    assert {name: found[name] for name in expected} == expected
    attention = {"name": "_gated_decode", "part": "attention", "number": 1, "us": 4.0, "duration_us": 3.0}
    assert attention in found["decode_kernel_us"]


def test_a_run_without_decode_steps(engine, make_case, monkeypatch):
    """One token each comes from prefill: there is no decode step to show or to wait for."""

    def fake_record(work, *, cuda, host, path=None):
        work()
        return trace((PROMPT, (1, 2, 3, 4, 5, 6)))

    monkeypatch.setattr(attribution, "record", fake_record)
    found = attribute(engine, requests_of(make_case(output_len=1)), cuda=True)
    assert (found["decode_step_us"], found["decode_kernels"]) == ({}, 0)
    assert sum(found["prefill_us"].values()) == 21


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-hp1"])
def test_a_cpu_has_all_parts(make_case, model):
    """On a CPU the ranges themselves are timed; an operator outside of them would count with the rest."""
    case = make_case(model=model, output_len=4)
    found = attribute(launch(case.config).engine, requests_of(case), cuda=False)
    for name in ("prefill_us", "decode_step_us"):
        assert found[name].keys() == {*PARTS, "the rest"} - {"activations", "router", "experts"}
    assert (found["decode_kernels"], found["replays"], found["api_us"]) == (0, {}, {})


def test_an_error_in_a_traced_run_leaves_the_engine_without_ranges(engine, make_case, monkeypatch):
    """The next run would otherwise open the ranges of a profiler that has gone, and give other times."""
    before = engine.runner.model.ops, engine.runner.ops, engine.runner.model.layers
    monkeypatch.setattr(attribution, "record", Mock(side_effect=RuntimeError))
    with pytest.raises(RuntimeError):
        attribute(engine, requests_of(make_case()), cuda=True)
    assert not engine.has_unfinished
    assert (engine.runner.model.ops, engine.runner.ops, engine.runner.model.layers) == before
