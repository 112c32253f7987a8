"""``LLM(data_parallel_size=N)``: the objects of one process, from several."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rosebatch import LLM, GrammarSpec, SamplingParams, run_file
from tests.helpers.forked_jobs import fork_children
from tests.helpers.json_lines import write_lines
from tests.helpers.waiting import PATIENCE_SECONDS

KINDS = [
    SamplingParams(max_tokens=6),
    SamplingParams(max_tokens=20, temperature=1.0, n=2),
    SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=9, grammar=GrammarSpec("regex", "[ab]{3}")),
    SamplingParams(max_tokens=12, temperature=0.9, stop=("e",)),
]
PROMPTS = ["red", [5, 6, 7], {"prompt": "the rose " * 9}, "", {"prompt_token_ids": [9]}, "x" * 30] * 5
PARAMS = [KINDS[number % len(KINDS)] for number in range(len(PROMPTS))]
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def several(folder):
    """The model of ``llm`` in two processes."""
    with pytest.MonkeyPatch.context() as patch:
        fork_children(patch)
        with LLM(folder, max_num_seqs=8, data_parallel_size=2, device="cpu") as llm:
            yield llm


def plain(outputs):
    """Outputs without what a clock, a cache or an earlier call decides."""
    return [
        replace(
            output,
            request_id="",
            num_cached_tokens=0,
            metrics=None,
            error=output.error,
            outputs=[replace(each, token_times=()) for each in output.outputs],
        )
        for output in outputs
    ]


def pids(llm):
    return [worker.process._process.pid for worker in llm._backend._pool.workers]


def test_the_objects_of_one_process(llm, several, tmp_path):
    """Results came in another order, with other random numbers, or not at all at the second call."""
    expected = plain(llm.generate(PROMPTS, PARAMS, seed=1, on_error="return"))
    before = pids(several)
    for call in range(2):
        outputs = several.generate(PROMPTS, PARAMS, seed=1, on_error="return")
        assert [int(output.request_id) for output in outputs] == [call * 30 + number for number in range(30)]
        assert plain(outputs) == expected
    chat = [{"role": "user", "content": "Hi"}]
    assert plain(several.chat([chat] * 3, SHORT)) == plain(llm.chat([chat] * 3, SHORT))
    with pytest.raises(ValueError, match=r"prompt \d+: prompt is empty"):
        several.generate(PROMPTS, PARAMS)
    assert several.get_tokenizer().eos_token_id == llm.get_tokenizer().eos_token_id
    with pytest.raises(RuntimeError, match="worker processes"):
        _ = several.plan

    # What a call leaves behind must not reach the next one.
    long = SamplingParams(max_tokens=2000, ignore_eos=True)
    stream = several.stream(["a"] * 21, [SHORT] + [long] * 20)
    next(stream)
    with pytest.raises(RuntimeError, match="busy"):
        several.generate("b", SHORT)
    stream.close()
    expected = plain(llm.generate(["b"] * 5, SHORT))
    assert plain(several.generate(["b"] * 5, SHORT)) == expected
    # Calls of threads take turns, those of coroutines are one stream.
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: several.generate(["b"] * 5, SHORT), range(3)))

    async def main():
        return await asyncio.gather(*(several.agenerate(["b"] * 5, SHORT) for _ in range(3)))

    assert [plain(outputs) for outputs in [*found, *asyncio.run(main())]] == [expected] * 6

    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p {i}"} for i in range(20)])
    for name, model in (("one", llm), ("two", several)):
        result = run_file(source, tmp_path / name, model=model, sampling={"max_tokens": 5}, strict=True)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert sum(worker["requests"] for worker in result.report["workers"]) == 20
    assert pids(several) == before


def test_a_stream_without_end(several):
    """A stream waited for a whole group of prompts, or gave them all to the first worker."""
    ready = threading.Semaphore(2)

    def prompts():
        for number in range(10**9):
            ready.acquire()
            yield f"prompt {number}"

    stream, seen = several.stream(prompts(), SHORT), []
    for _ in range(12):
        seen.append(next(stream).prompt)
        ready.release()
    stream.close()
    assert len(set(seen)) == 12


def test_a_share_for_each(several):
    """A short list went to the first worker alone, since nobody knew how short it was."""
    # Another test may have killed one.
    several._backend._pool.load_all()
    several.generate(["a"] * 8, SHORT)
    accounts = several._backend.task.served().workers
    assert [worker["requests"] for worker in accounts] == [4, 4]


def test_workers_that_die(llm, several):
    """A worker that dies between two calls, or in one, is replaced, and no prompt is lost."""
    os.kill(pids(several)[0], signal.SIGKILL)
    outputs = [model.generate(PROMPTS, PARAMS, seed=1, on_error="return") for model in (several, llm)]
    assert plain(outputs[0]) == plain(outputs[1])


@pytest.mark.thorough
def test_the_end_of_all(folder):
    """Workers outlived the model that they belong to; the parent imported PyTorch."""
    script = (
        "import sys; from rosebatch import LLM, SamplingParams\n"
        f"llm = LLM({str(folder)!r}, data_parallel_size=2, device='cpu')\n"
        "llm.generate(['a', 'b'], SamplingParams(max_tokens=2))\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
        "processes = [worker.process._process for worker in llm._backend._pool.workers]\n"
        "del llm\n"
        "import gc; gc.collect()\n"
        "assert all(process.wait() for process in processes)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_SECONDS)


def test_settings_that_are_impossible():
    """They ended in a traceback of a worker, or were taken for what they are not."""
    for value in (0, "none", 1.5):
        with pytest.raises(ValueError, match="data_parallel_size"):
            LLM(data_parallel_size=value)
    # Each worker would be taken for dead.
    for seconds in (0, -1, 0.5, float("nan")):
        with pytest.raises(ValueError, match="worker_timeout must be >= 3"):
            LLM(data_parallel_size=2, worker_timeout=seconds)


def test_embeddings_of_one_process(several, folder):
    """Vectors cross the pipe; a worker that completed the prompts in their place would send texts."""
    prompts = ["red", [5, 6, 7], "the rose " * 9, ""] * 3
    with LLM(folder, max_num_seqs=8, device="cpu") as one:
        expected = [output.outputs for output in one.embed(prompts, on_error="return")]
    assert [output.outputs for output in several.embed(prompts, on_error="return")] == expected


def test_a_report_of_all_caches(several):
    """The blocks in use were those of all workers, the blocks that there are of one: 200 % were used."""
    several._backend._pool.load_all()
    several.generate(["a"] * 4, SHORT)
    served, workers = several._backend.task.served(), several._backend._pool.workers
    assert served.description["kv_cache_blocks"] == sum(each.ready.description["kv_cache_blocks"] for each in workers)
    assert served.stats.max_blocks_used <= served.description["kv_cache_blocks"]


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_stream_after_the_end(folder, size, monkeypatch):
    """Whoever read on got rows: from processes that nobody would end, or from a model that seemed to be gone."""
    fork_children(monkeypatch)
    with LLM(folder, max_num_seqs=8, data_parallel_size=size, device="cpu") as other:
        outputs = other.stream((["a"] * 400), SHORT)
        next(outputs)
        backend = other._backend
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        list(outputs)
    if size > 1:
        assert [worker.restarts for worker in backend._pool.workers] == [0, 0]
        assert all(worker.process._process.poll() is not None for worker in backend._pool.workers)


@pytest.mark.thorough
def test_an_input_that_breaks_again_and_again(several):
    """The second one ended workers that had not heard the end of the first."""

    def broken():
        yield "a"
        raise OSError("the input is gone")

    before = pids(several)
    for _ in range(20):
        with pytest.raises(OSError, match="gone"):
            list(several.stream(broken(), SHORT))
    assert len(several.generate(["a"] * 4, SHORT)) == 4
    assert pids(several) == before


def test_the_first_of_two_bad_prompts_is_named(several):
    """It was the one that some worker came to first, once others had run."""
    for _ in range(3):
        with pytest.raises(ValueError, match=r"^prompt 1: prompt is empty$"):
            several.generate(["a", "", "b", {"prompt": ""}, "c"] * 4, SHORT)
