"""GPUs that hold a model together: how they end, and what is left when one of them dies."""

import gc
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import distributed

from rosebatch.config.run import RunConfig
from rosebatch.core.errors import LostProcessError
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.launch import group
from rosebatch.launch.launch import launch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


# A token with a smaller margin may differ by rounding alone: such rows are left out.
MARGIN = 2e-3


@pytest.fixture
def launch_over(saved_model):
    def launched(ranks, family="Llama", slots=8):
        config = RunConfig(
            model=str(saved_model(family)),
            dtype="float32",
            device="cuda",
            max_num_seqs=slots,
            kv_cache_memory=1 << 27,
            tensor_parallel_size=ranks,
        )
        return launch(config).engine

    return launched


def requests(count, tokens, length=8):
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=2)
    return [Request(i, tuple((i + 7 * k) % 190 for k in range(length)), params) for i in range(count)]


def run(engine, length=8):
    return sorted(engine.run(requests(32, 24, length)), key=lambda completion: completion.request.id)


def tokens(done):
    return [list(completion.token_ids) for completion in done]


def is_clear(completion):
    assert len(completion.logprobs) == len(completion.token_ids)
    return all(first - second > MARGIN for (_, first), (_, second) in (each.top for each in completion.logprobs))


def followers():
    """The child processes that follow."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        # Other processes end meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            is_child = f"PPid:\t{os.getpid()}\n" in (process / "status").read_text()
            if is_child and "rosebatch.launch.tp_worker" in (process / "cmdline").read_text():
                found.append(int(process.name))
    return found


def end(engine):
    engine.abort()
    engine.runner = None  # type: ignore[assignment]
    gc.collect()


@pytest.mark.parametrize("family", ["GPT2", "Llama", "Mistral", "Qwen2", "Qwen3", "HP1", "HP1 options"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gpus_choose_the_tokens_of_one(ranks, family, launch_over):
    """Other families are compared with transformers' in ``test_families_gpu``."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    expected = run(launch_over(1, family))
    engine = launch_over(ranks, family)
    found = run(engine)
    assert engine.stats.graph_replays > 0
    end(engine)
    clear = [i for i, completion in enumerate(expected) if is_clear(completion)]
    assert len(clear) >= 12, "too many rows are decided by rounding"
    assert [tokens(found)[i] for i in clear] == [tokens(expected)[i] for i in clear]


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_large_sums_choose_the_tokens_of_one(family, launch_over):
    """More than two GPUs sum many rows in two shots, few in one: a step of prompts and the next one's tokens."""
    assert 16 * 200 * 48 * torch.float32.itemsize > group._IN_ONE_SHOT, "the narrowest family's prompts are few"
    expected = run(launch_over(1, family, slots=16), length=200)
    engine = launch_over(4, family, slots=16)
    found = run(engine, length=200)
    end(engine)
    clear = [i for i, completion in enumerate(expected) if is_clear(completion)]
    assert len(clear) >= 12, "too many rows are decided by rounding"
    assert [tokens(found)[i] for i in clear] == [tokens(expected)[i] for i in clear]


def test_an_engine_ends_and_another_begins(launch_over):
    """NCCL waits for graphs that hold its kernels: the end of an engine waited for ever."""
    engine = launch_over(2)
    first = run(engine)
    assert engine.stats.graph_replays > 0
    end(engine)
    assert not distributed.is_initialized()
    engine = launch_over(2)
    assert tokens(run(engine)) == tokens(first)
    end(engine)


@pytest.mark.parametrize(("ranks", "length"), [(2, 8), (4, 8), (4, 200)])
def test_a_dead_rank_is_named_and_its_place_can_be_taken(ranks, length, launch_over):
    """The kernels of the other ranks wait for signals of the dead one: the job waited for ever."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    engine = launch_over(ranks, slots=16)
    first = run(engine)
    with pytest.raises(LostProcessError, match=rf"rank \d of {ranks}: died \(SIGKILL"):
        for number, _ in enumerate(engine.run(requests(400, 240 - length, length))):
            if number == 20:
                os.kill(followers()[0], signal.SIGKILL)
    end(engine)
    engine = launch_over(ranks, slots=16)
    assert tokens(run(engine)) == tokens(first)
    end(engine)
