"""Calls of several threads and of coroutines share one model: their prompts run together."""

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from unittest.mock import Mock

import pytest

from rosebatch import LLM, SamplingParams
from rosebatch.job.report.progress import Progress
from rosebatch.llm.awaited import AwaitedCalls
from rosebatch.llm.call import Call
from rosebatch.llm.call_queue import CallQueue
from tests.helpers.checkout import ROOT, environment
from tests.helpers.interrupts import Interrupt
from tests.helpers.waiting import PATIENCE_SECONDS, until
from tests.job.fake_model import FakeModel, launch_fake, make_engine

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
LONG = SamplingParams(max_tokens=60, ignore_eos=True)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def most_running(llm):
    with llm.exclusive() as launched:
        return launched.engine.stats.max_running


@pytest.fixture
def fresh(llm):
    """A model whose counts begin now."""
    with llm.exclusive() as launched:
        launched.engine.restart_stats()
    return llm


def in_threads(calls):
    """All calls at once; their results, or what they raised."""
    barrier = threading.Barrier(len(calls))

    def run(call):
        barrier.wait(PATIENCE_SECONDS)
        try:
            return call()
        except Exception as error:
            return error

    found = [None] * len(calls)

    def keep(place):
        found[place] = run(calls[place])

    # Those that wait for ever end with the process.
    threads = [threading.Thread(target=keep, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    return found


@pytest.fixture
def hold(fresh, monkeypatch):
    """Has the next step of the engine wait until something is so; counts begin then."""

    def call(until_done):
        with fresh.exclusive() as launched:
            engine, step = launched.engine, launched.engine.step

        def held():
            until(until_done)
            monkeypatch.setattr(engine, "step", step)
            return step()

        engine.restart_stats()
        monkeypatch.setattr(engine, "step", held)

    return call


def test_threads_run_together(fresh, hold):
    """A second thread was told that the model is busy."""
    prompts = [f"rose {number}" for number in range(6)]
    alone = [tokens(fresh.generate(prompt, LONG)) for prompt in prompts]
    hold(lambda: len(fresh._calls._open) == len(prompts))
    outputs = in_threads([lambda prompt=prompt: fresh.generate(prompt, LONG) for prompt in prompts])
    assert [[output.prompt for output in each] for each in outputs] == [[prompt] for prompt in prompts]
    assert [tokens(each) for each in outputs] == alone
    assert most_running(fresh) == len(prompts)


def test_kinds_of_calls_run_together(llm):
    """Completions, chats, streams and vectors, each with outputs of its own kind."""
    chat = [{"role": "user", "content": "Hi"}]
    completed, answered, streamed, embedded = in_threads(
        [
            lambda: llm.generate(["a", "b"], SHORT),
            lambda: llm.chat(chat, SHORT),
            lambda: list(llm.stream(iter(["c", "d"]), SHORT)),
            lambda: llm.embed(["e", "f"]),
        ]
    )
    assert [output.prompt for output in completed] == ["a", "b"]
    assert answered[0].outputs[0].message["role"] == "assistant"
    assert sorted(output.prompt for output in streamed) == ["c", "d"]
    assert [output.outputs.hidden_size for output in embedded] == [32, 32]


def test_a_bad_call_costs_itself(llm):
    """It raises in its own thread, with the prompt's place in its own call."""
    good, bad = in_threads([lambda: llm.generate(["a"] * 4, SHORT), lambda: llm.generate(["b", ""], SHORT)])
    assert len(good) == 4
    assert str(bad).startswith("prompt 1: ")


def test_base_seeds_wait_for_their_turn(llm):
    """A call with another base seed runs after those under way, and gets what it gets alone."""
    sampled = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    alone = [tokens(llm.generate(["a", "b"], sampled, seed=seed)) for seed in range(3)]
    calls = [lambda seed=seed: llm.generate(["a", "b"], sampled, seed=seed) for seed in range(3)]
    assert [tokens(each) for each in in_threads(calls)] == alone


def test_exclusive_use_among_other_calls(llm):
    """It waits for those under way, and those after it wait for its end."""

    def alone():
        with llm.exclusive() as launched:
            return launched.engine.has_unfinished

    calls = [lambda seed=seed: len(llm.generate(["a", "b"], SHORT, seed=seed)) for seed in range(3)]
    assert in_threads([*calls, alone, alone, alone]) == [2, 2, 2, False, False, False]


def test_exclusive_use_that_another_thread_lets_begin(llm):
    """Its own thread was not woken, and all slept for ever."""
    calls, alone = CallQueue(llm._backend), Call(alone=True)
    calls._waiting.append(alone)
    calls._asleep[alone] = None
    calls._admit()
    assert [*calls._open] == [alone] and not calls._asleep
    assert not alone.wake.empty()


def test_a_call_inside_of_a_stream(llm):
    """It was refused. What cannot run beside the stream of its own thread still is: it would wait for ever."""
    stream = llm.stream(iter(["a", "b", "c"]), SHORT)
    first = next(stream)
    (inner,) = llm.generate("inner", SHORT)
    assert inner.prompt == "inner"
    with pytest.raises(RuntimeError, match="busy"):
        llm.generate("c", SHORT, seed=1)
    with pytest.raises(RuntimeError, match="busy"), llm.exclusive():
        pass
    assert {output.prompt for output in [first, *stream]} == {"a", "b", "c"}
    assert llm.generate("c", SHORT, seed=1)


@pytest.mark.parametrize("seed", [None, 1])
def test_a_coroutine_inside_of_a_stream(llm, seed):
    """Beside a stream with a seed it waited for ever: its rows are drawn on another thread than the stream's."""

    async def inner():
        stream = llm.stream(iter(["a", "b", "c"]), SHORT, seed=seed)
        first = next(stream)
        if seed is None:
            assert [output.prompt for output in await llm.agenerate("inner", SHORT)] == ["inner"]
        else:
            with pytest.raises(RuntimeError, match="busy"):
                await llm.agenerate("inner", SHORT)
        return [first, *stream]

    assert {output.prompt for output in asyncio.run(inner())} == {"a", "b", "c"}


def test_a_reader_that_is_away_holds_nobody_up(llm):
    """The thread of an open stream may do other things; calls of others go on, and the stream's results wait."""
    stream = llm.stream((f"rose {number}" for number in range(20)), SHORT)
    first = next(stream)
    ((other,),) = in_threads([lambda: llm.generate("other", LONG)])
    assert other.prompt == "other"
    assert len([first, *stream]) == 20


def test_closing_a_stream_leaves_others_alone(llm):
    """Results of a stream that was closed are nobody's."""
    stream = llm.stream((f"rose {number}" for number in range(20)), LONG)
    next(stream)
    other = llm.stream(iter(["a", "b"]), SHORT)
    next(other)
    stream.close()
    assert len(list(other)) == 1
    with llm.exclusive() as launched:
        assert not launched.engine.has_unfinished


def test_an_engine_that_fails_fails_for_all(monkeypatch):
    """Nobody waits for results that will never come."""
    engine = make_engine(FakeModel(), vocab_size=256)
    llm = LLM.of(launch_fake(engine, None))
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    found = in_threads([lambda: llm.generate([[1, 2]], SHORT)] * 3)
    assert all(isinstance(error, ZeroDivisionError) for error in found)


def test_progress_looks_at_the_engine_between_steps(monkeypatch):
    """A call that joined looked at the queues while another thread's step changed them."""
    engine, inside = make_engine(FakeModel(), vocab_size=257), threading.Event()
    llm, step, outlook = LLM.of(launch_fake(engine, None)), engine.step, engine.outlook
    joined, looks = threading.Event(), []

    def slow_step():
        inside.set()
        joined.wait(PATIENCE_SECONDS)
        found = step()
        inside.clear()
        return found

    def look():
        looks.append(inside.is_set())
        return outlook()

    monkeypatch.setattr(engine, "step", slow_step)
    monkeypatch.setattr(engine, "outlook", look)
    admit = llm._calls._admit

    def admitting():
        admit()
        if len(llm._calls._open) == 2:
            joined.set()

    monkeypatch.setattr(llm._calls, "_admit", admitting)

    def other():
        assert inside.wait(PATIENCE_SECONDS)
        return llm.generate([[3, 4]], SHORT, use_tqdm=True)

    in_threads([lambda: llm.generate([[1, 2]], SHORT), other])
    assert looks and not any(looks)


def test_a_call_that_is_interrupted(monkeypatch):
    """Ctrl-C ends the calls under way, in the main thread as what it is, and the model goes on."""
    engine = make_engine(FakeModel(), vocab_size=257)
    llm, step = LLM.of(launch_fake(engine, None)), engine.step
    stream = llm.stream(iter([[1, 2], [3, 4]]), SamplingParams(max_tokens=40, ignore_eos=True))
    monkeypatch.setattr(engine, "step", Mock(side_effect=[[], KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6]], SHORT)
    monkeypatch.setattr(engine, "step", step)
    assert len(llm.generate([[5, 6]], SHORT)) == 1
    assert len(list(stream)) == 2, "it had not begun"
    other = llm.stream(iter([[1, 2], [3, 4]]), iter([SHORT, LONG]))
    next(other)
    monkeypatch.setattr(engine, "step", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6]], SHORT)
    with pytest.raises(RuntimeError, match="interrupted"):
        list(other)


@pytest.mark.parametrize(
    ("files", "every"),
    [
        (("llm/call_queue.py", "llm/call.py"), 13),
        pytest.param(("llm/call_queue.py", "llm/call.py", "host/threads.py"), 3, marks=pytest.mark.thorough),
        (("scheduling/block_pool.py", "scheduling/block_tables.py", "scheduling/prefix_cache.py"), 97),
        pytest.param(("engine/engine.py", "scheduling/block_tables.py", "queues.py"), 11, marks=pytest.mark.thorough),
    ],
)
def test_an_interrupt_at_any_moment(files, every):
    """Others waited for ever, the next call failed, or blocks were lost: the model goes on as if nothing had been."""
    prompts = [[1, 2, 3 + number] * 9 for number in range(9)]
    alone = tokens(LLM.of(launch_fake(make_engine(FakeModel(), vocab_size=257), None)).generate(prompts, SHORT))
    for number in count(0, every):
        engine = make_engine(FakeModel(), vocab_size=257)
        llm = LLM.of(launch_fake(engine, None))
        stream = llm.stream(iter(prompts), SHORT)
        first = next(stream)
        # What the last call left behind: Python drops an interrupt that comes while it is cleared away.
        gc.collect()
        interrupt = Interrupt(number, files)
        with suppress(KeyboardInterrupt), interrupt():
            assert tokens(llm.generate(prompts, SHORT)) == alone
        with suppress(RuntimeError):
            assert len([first, *stream]) == 9
        (again,) = in_threads([lambda llm=llm: tokens(llm.generate(prompts, SHORT))])
        assert again == alone
        engine.scheduler.check_integrity()
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
        if not interrupt.raised:
            break
    assert number > 5 * every


def test_an_interrupt_belongs_to_the_thread_that_steps():
    """It was raised in the thread whose row was just read, and the one that was to end went on."""

    class Rows:
        def __iter__(self):
            return self

        def __next__(self):
            raise KeyboardInterrupt

    call = Call(Rows())
    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
        pool.submit(call.draw).result()
    assert not call.done
    assert call.draw() is None and call.done
    with pytest.raises(KeyboardInterrupt):
        list(call.take())


def test_progress_that_cannot_be_shown(monkeypatch):
    """With stderr closed, the call failed, and so did all later ones: its rows were still in the engine."""
    llm = LLM.of(launch_fake(make_engine(FakeModel(), vocab_size=257), None))
    monkeypatch.setattr(Progress, "tick", Mock(side_effect=[None, OSError("closed")]))
    with pytest.raises(OSError, match="closed"):
        llm.generate([[1, 2]] * 20, LONG, use_tqdm=True)
    monkeypatch.undo()
    assert len(llm.generate([[1, 2]] * 20, SHORT)) == 20


def test_coroutines_run_together(fresh, hold):
    """``asyncio`` has as many calls under way as it likes."""
    prompts = [f"rose {number}" for number in range(30)]
    alone = tokens(fresh.generate(prompts, SHORT))
    sent = threading.Event()
    hold(sent.is_set)

    async def main():
        calls = [asyncio.create_task(fresh.agenerate(prompt, SHORT)) for prompt in prompts]
        await asyncio.sleep(0)
        sent.set()
        return await asyncio.gather(*calls)

    found = asyncio.run(main())
    assert [tokens(each)[0] for each in found] == alone
    assert most_running(fresh) == 8


def test_a_failure_between_the_rows_of_a_coroutine():
    """With no result outstanding just then, it waited for ever."""

    sent = threading.Event()

    class Failing:
        others_wait = False

        def require_no_wait_for(self, thread):
            pass

        def outputs(self, call):
            sent.wait(PATIENCE_SECONDS)
            yield from ([found] for found in zip(range(2), call.rows, strict=False))
            raise ZeroDivisionError

    async def both():
        calls = AwaitedCalls(Failing(), None, lambda: None)
        found = asyncio.gather(calls.outputs(["a"]), calls.outputs(["b", "c"]), return_exceptions=True)
        await asyncio.sleep(0)
        sent.set()
        return await asyncio.wait_for(found, PATIENCE_SECONDS)

    first, error = asyncio.run(both())
    assert first == ["a"] and isinstance(error, ZeroDivisionError)


def test_a_model_that_is_closed_under_a_coroutine():
    """It waited for ever, and the end of the process was an abort."""
    engine = make_engine(FakeModel(), vocab_size=257)
    llm, step = LLM.of(launch_fake(engine, None)), engine.step
    begun, closed = threading.Event(), threading.Event()

    def first_step():
        begun.set()
        closed.wait(PATIENCE_SECONDS)
        engine.step = step
        return step()

    engine.step = first_step

    async def main():
        call = asyncio.create_task(llm.agenerate([[1, 2]], LONG))
        await asyncio.to_thread(begun.wait, PATIENCE_SECONDS)
        llm.close()
        closed.set()
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            await asyncio.wait_for(call, PATIENCE_SECONDS)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["agenerate", "aembed"])
def test_python_ends_under_a_coroutine(kind):
    """After Ctrl-C in ``asyncio.run``, a thread went on computing: PyTorch then aborted the process."""
    begun, ended = threading.Event(), threading.Event()

    def step(plan):
        begun.set()
        ended.wait(PATIENCE_SECONDS)

    llm = LLM.of(launch_fake(make_engine(FakeModel(before_step=step)), None))

    async def main():
        # More than one step has room for.
        call = asyncio.create_task(getattr(llm, kind)([[1, 2] * 30, [3, 4] * 30]))
        await asyncio.to_thread(begun.wait, PATIENCE_SECONDS)
        (awaited,) = llm._awaited.values()
        thread = awaited._thread
        end = threading.Thread(target=awaited.end)
        end.start()
        until(lambda: awaited.ending)
        ended.set()
        end.join()
        assert not thread.is_alive()
        with pytest.raises(RuntimeError, match="Python ends"):
            await call

    asyncio.run(main())


# Its steps never end.
INTERRUPTED = """
import asyncio, os, signal, sys, threading
from rosebatch import LLM
from rosebatch.llm import awaited
from tests.job.fake_model import FakeModel, launch_fake, make_engine

awaited._END_SECONDS = 0.01

def step(plan):
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()

llm = LLM.of(launch_fake(make_engine(FakeModel(before_step=step)), None))
asyncio.run(getattr(llm, sys.argv[1])([[1, 2]]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["agenerate", "aembed"])
def test_an_interrupt_of_asyncio_run(kind):
    """``aembed`` was computed to its end first."""
    command = [sys.executable, "-c", INTERRUPTED, kind]
    ended = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr.endswith("\nKeyboardInterrupt\n")


def test_rows_of_a_coroutine_that_is_cancelled_are_not_begun():
    """After Ctrl-C in a notebook, the model computed all of them."""
    begun, cancelled, started = threading.Event(), threading.Event(), []

    def step(plan):
        started.extend(plan.started)
        begun.set()
        cancelled.wait(PATIENCE_SECONDS)

    llm = LLM.of(launch_fake(make_engine(FakeModel(before_step=step)), None))

    async def main():
        call = asyncio.create_task(llm.agenerate([[1, 2]] * 2000, SHORT))
        await asyncio.to_thread(begun.wait, PATIENCE_SECONDS)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        cancelled.set()
        return await llm.agenerate([[3, 4]], SHORT)

    assert len(asyncio.run(main())) == 1
    # Some were read ahead.
    assert len(started) < 1000


def test_coroutines_of_each_kind(llm):
    """Chats, vectors, scores, errors and empty calls."""

    async def main():
        chats = llm.achat([{"role": "user", "content": "Hi"}], SHORT, add_generation_prompt=False)
        return await asyncio.gather(
            chats,
            llm.aembed("a"),
            llm.agenerate([]),
            llm.agenerate(["a", ""], SHORT, on_error="return"),
            llm.agenerate(["a", ""], SHORT),
            llm.agenerate("a", lora_request=1),
            llm.ascore(["a", "b"], ["c", "d"]),
            llm.aclassify("a"),
            return_exceptions=True,
        )

    chat, vector, nothing, some, bad, refused, scores, no_head = asyncio.run(main())
    assert [each.scores for each in scores] == [each.scores for each in llm.score(["a", "b"], ["c", "d"])]
    assert str(no_head).startswith("prompt 0: the model has no classification head: ")
    assert chat[0].prompt == "<|user|>Hi<|end|>"
    assert vector[0].outputs.hidden_size == 32
    assert nothing == []
    assert [output.error_code for output in some] == [None, "empty_prompt"]
    assert str(bad).startswith("prompt 1: ")
    assert str(refused) == "lora_request must be a LoRARequest, got int"


def test_a_coroutine_that_is_cancelled(llm):
    """The others get their results."""

    async def main():
        gone = asyncio.create_task(llm.agenerate("a", LONG))
        kept = asyncio.create_task(llm.agenerate("b", LONG))
        await asyncio.sleep(0)
        gone.cancel()
        return await kept

    assert asyncio.run(main())[0].prompt == "b"


def test_coroutines_and_threads_take_turns(llm):
    """A call that cannot join waits for coroutines under way, not for those that come later."""
    sampled = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    alone = tokens(llm.generate("a", sampled, seed=3))

    async def main():
        stop = asyncio.Event()

        async def again():
            while not stop.is_set():
                await llm.agenerate("b", SHORT)

        tasks = [asyncio.create_task(again()) for _ in range(3)]
        await asyncio.sleep(0)
        found = await asyncio.wait_for(asyncio.to_thread(llm.generate, "a", sampled, seed=3), PATIENCE_SECONDS)
        stop.set()
        await asyncio.gather(*tasks)
        return found

    assert tokens(asyncio.run(main())) == alone
