"""Waits for the device are counted where they happen: the report's ``syncs`` is a count, not an assumption."""

import re
import threading

import pytest
import torch

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch_kernels.common import host_waits
from tests.engine.small_models import device_engine, plain_engine
from tests.helpers.checkout import ROOT
from tests.helpers.host_reads import HostReads
from tests.helpers.launches import note_launches

ROWS = [
    ([1, 2, 3, 4, 5], {"logprobs": 2, "repetition_penalty": 1.3}),
    ([1, 2, 3, 4], {"temperature": 0.9, "top_k": 5, "top_p": 0.9, "n": 3}),
    ([7] * 14, {"prompt_logprobs": 1, "temperature": 0.8}),
    ([8, 9], {"logit_bias": ((3, 2.0),), "min_p": 0.1, "temperature": 1.0}),
]
REQUESTS = [
    Request(i, tuple(prompt), SamplingParams(max_tokens=6, ignore_eos=True, seed=i, **kind))
    for i, (prompt, kind) in enumerate(ROWS)
]
GREEDY = [Request(i, tuple(range(i + 1)), SamplingParams(max_tokens=9, ignore_eos=True)) for i in range(3)]


@pytest.mark.parametrize("batched", [True, False])
def test_every_read_is_counted(batched):
    """``syncs`` was 1 for each plan with tokens, whatever was read: 20 where 480 values were fetched."""
    engine = plain_engine("llama")
    engine.runner.batched_sampling = batched
    with HostReads() as reads:
        assert len(list(engine.run(REQUESTS))) == 6
    assert engine.stats.syncs == len(reads.reads) > engine.stats.steps


def test_one_wait_a_step_or_one_a_row():
    """What article S3 is about: each row's token was fetched alone; batched, one call brings the tokens of a step."""
    waits = {}
    for batched in (True, False):
        engine = plain_engine("llama")
        engine.runner.batched_sampling = batched
        assert sum(len(completion.token_ids) for completion in engine.run(GREEDY)) == 27
        waits[batched] = engine.stats.syncs
        assert engine.stats.steps == 9
    assert waits == {True: 9, False: 9 + 27}


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU in this process")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("few_programs")
def test_one_wait_a_window(monkeypatch):
    """The tokens of all steps of a window are read at once."""
    engine, plans = device_engine("llama"), []
    launch = engine.runner.launch
    monkeypatch.setattr(engine.runner, "launch", lambda plan, masks: plans.append(plan) or launch(plan, masks))
    list(engine.run(GREEDY))
    assert engine.stats.syncs == len([plan for plan in plans if plan.sampled_ids]) < engine.stats.steps


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU in this process")
@pytest.mark.parametrize("off", [(), ("fused_sampler",), ("fused_sampler", "batched_sampling"), ("late_results",)])
def test_the_gpus_runner_waits_for_results_alone(off, monkeypatch):
    """Copies of blocks and sampling parameters were built on the device, which waits for it.

    PyTorch's own sampling reads tensors, and rows that are sampled alone are read alone: all of it is counted.
    """
    note_launches(monkeypatch, lambda *launch: None)
    engine = device_engine("llama", off, blocks=9)
    again = [Request(i + 4, (1, 2, 3, 4), SamplingParams(max_tokens=9, ignore_eos=True)) for i in range(4)]
    with HostReads() as host:
        for request in [*REQUESTS, *again]:
            engine.add(request)
        while engine.has_unfinished:
            engine.step()
    assert engine.stats.copied_blocks > 0 and engine.stats.preemptions > 0
    assert host.uploads == []
    assert len(host.reads) == engine.stats.syncs
    assert ({"numpy"} == set(host.reads)) == ("fused_sampler" not in off)


def test_threads_count_for_themselves():
    """A second engine on another thread would add to the first one's count."""
    before, others = host_waits.count(), []

    def work():
        host_waits.to_list(torch.zeros(2))
        others.append(host_waits.count())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (host_waits.count(), others) == (before, [1])


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda: host_waits.to_list(torch.tensor([3, 4])), [3, 4]),
        (lambda: host_waits.to_int(torch.tensor([5])), 5),
        (lambda: host_waits.to_numpy(torch.tensor([6.5])).tolist(), [6.5]),
        (lambda: host_waits.places_of(torch.tensor([True, False, True])).tolist(), [0, 2]),
    ],
)
def test_each_way_to_read(read, expected):
    before = host_waits.count()
    assert (read(), host_waits.count()) == (expected, before + 1)


def test_nothing_is_read_past_the_counter():
    """A read that is not counted would make the report wrong again.

    References, benches and their helpers are no part of a run. ``tolist`` of numpy's arrays looks the same, so the
    files with such calls are named.
    """
    reads = re.compile(r"\.(item|cpu|nonzero|synchronize)\(|\.tolist\(\)")
    of_numpy = {
        "decoder.py",
        "drafter.py",
        "images.py",
        "logprobs.py",
        "runner.py",
        "prefix_groups.py",
        "prefix_tiles.py",
        "results.py",
    }
    exempt = {"reference.py", "bench_inputs.py", "timing.py", "each_sequence.py", "host_waits.py"}
    found = []
    for folder in ("rosebatch/engine", "rosebatch/model", "kernels/rosebatch_kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name not in exempt and not path.name.endswith("bench.py"):
                names = {match[0] for match in reads.finditer(path.read_text())}
                names -= {".tolist()"} if path.name in of_numpy else set()
                found += [(path.name, name) for name in sorted(names)]
    assert found == []
