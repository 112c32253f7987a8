"""Plans that run ahead of their results: windows of decode steps, late tokens, preemption in between."""

import random

import pytest

from rosebatch.engine.engine import Engine
from rosebatch.engine.plan import StepResult
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.request import Request
from rosebatch.sampling_params import SamplingParams

VOCAB = 20
END = 3


def next_token(token_ids, seed=0):
    return hash((*token_ids, seed)) % VOCAB


class AheadRunner:
    """Like a device: it keeps each sequence's last tokens itself, and its results are read later."""

    def __init__(self):
        self.tokens = {}
        self.windows = []

    def launch(self, plan):
        if plan.decode_steps:
            self.windows.append(plan.decode_steps)
            assert max(chunk.length for chunk in plan.chunks) <= plan.decode_steps
        out = []
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.length
            if not plan.decode_steps:
                # A prompt's tokens, or those of a resumed sequence: all of them are known.
                assert end <= len(sequence.token_ids)
                self.tokens[sequence] = list(sequence.token_ids[:end])
            if not chunk.samples:
                continue
            held = self.tokens[sequence]

            def ended(sequence=sequence, held=held):
                return bool(sequence.stop_ids) and held[-1] == END and len(held) > sequence.num_prompt_tokens

            assert ended() or len(held) == (chunk.start + 1 if plan.decode_steps else end), "a token was left out"
            sampled = []
            for _ in range(chunk.length if plan.decode_steps else 1):
                if ended():
                    break
                held.append(next_token(held, sequence.request.sampling.seed))
                sampled.append(held[-1])
            out.append(sampled)
        return lambda: StepResult(out)


def expected(prompt, limit, ends, seed):
    tokens = list(prompt)
    for _ in range(limit):
        tokens.append(next_token(tokens, seed))
        if ends and tokens[-1] == END:
            break
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("seed", range(60))
def test_tokens_do_not_depend_on_how_far_plans_run_ahead(seed, lookahead):
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4, 16])
    pool = BlockPool(max(2, rng.choice([24, 48, 200]) // size), size)
    scheduler = Scheduler(
        pool,
        max_num_seqs=rng.choice([1, 3, 16]),
        max_num_batched_tokens=rng.choice([4, 16, 64]),
        prefix_cache=rng.random() < 0.6,
        decode_window=rng.choice([1, 4, 8]),
    )
    runner = AheadRunner()
    engine = Engine(scheduler, runner, vocab_size=VOCAB, max_model_len=24, eos_token_ids=[END], lookahead=lookahead)
    trunk = [rng.randrange(VOCAB) for _ in range(12)]
    wanted = {}
    for index in range(rng.randint(1, 12)):
        prompt = trunk[: rng.randint(1, 12)]
        limit, ends = rng.randint(1, 24 - len(prompt)), rng.random() < 0.5
        sampling = SamplingParams(max_tokens=limit, ignore_eos=not ends, n=rng.choice([1, 1, 3]))
        request = Request(index=index, prompt_token_ids=tuple(prompt), sampling=sampling)
        engine.add(request)
        limit = min(limit, engine.max_model_len - len(prompt))
        for sample in map(request.sample, range(sampling.n)):
            wanted[index, sample.choice] = expected(prompt, limit, ends, sample.sampling.seed)
    got = {}
    while engine.has_unfinished:
        got |= {(done.request.index, done.request.choice): done.token_ids for done in engine.step()}
        scheduler.check_integrity()
    assert got == wanted
    assert pool.num_free == pool.num_blocks
    assert max(runner.windows, default=0) <= scheduler.decode_window


def test_the_device_always_has_a_plan_behind_the_one_that_is_waited_for():
    """Sequences that all end at once kept their seats until their last tokens were known, and the device stood idle."""
    launched, waited = [], []

    class Watched(AheadRunner):
        def launch(self, plan):
            wait, number = super().launch(plan), len(launched)
            launched.append(plan)

            def watched():
                waited.append(len(launched) - 1 - number)
                return wait()

            return watched

    scheduler = Scheduler(BlockPool(64, 4), max_num_seqs=4, max_num_batched_tokens=64, decode_window=4)
    engine = Engine(scheduler, Watched(), vocab_size=VOCAB, max_model_len=24, lookahead=1)
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    done = list(engine.run(Request(index=i, prompt_token_ids=(i, 1, 2), sampling=sampling) for i in range(12)))
    assert [len(completion.token_ids) for completion in done] == [9] * 12
    assert [bool(plan.decode_steps) for plan in launched] == [False, True, True] * 3
    assert waited == [1] * 8 + [0]
