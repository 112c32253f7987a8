"""Preempted sequences whose K and V wait in the host's memory: nothing is computed twice, and no bit changes."""

import pickle
from dataclasses import replace

import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.build import LoadedModel, build_engine
from rosebatch.engine.cache.host_store import HostStore
from rosebatch.engine.plan import DecodeWindow, PackedStep
from rosebatch.engine.scheduling.step_planner import MIXED, SeparateDecodes
from rosebatch.engine.staging import Staging
from rosebatch.ops.select import select
from tests.engine.fake_runner import fake_completion, make_sequence
from tests.engine.schedulers import add, chunks, drain, make_scheduler, step
from tests.engine.small_models import MODELS, build, device_engine, plain_engine
from tests.helpers import running
from tests.helpers.marks import needs_interpreter


def until_preempted(scheduler, runner):
    """The plan that preempts."""
    plan, _ = step(scheduler, runner)
    while not plan.num_preempted:
        plan, _ = step(scheduler, runner)
    return plan


def two(fake_runner, host_blocks, **options):
    """Two sequences and room for one and a half, after the plan that preempts the second."""
    scheduler = make_scheduler(num_blocks=6, block_size=2, prefix_cache=False, host_blocks=host_blocks, **options)
    a, b = add(scheduler, *(make_sequence([i, i], max_tokens=7, id=i) for i in range(2)))
    return scheduler, a, b, until_preempted(scheduler, fake_runner)


def test_blocks_are_saved_and_come_back(fake_runner):
    scheduler, a, b, plan = two(fake_runner, host_blocks=5)
    assert plan.saves == ((1, 0), (3, 1), (5, 2))
    assert (b.num_saved_tokens, b.saved_blocks, b.tables) == (6, [0, 1, 2], [])
    while a.finish_reason is None:
        step(scheduler, fake_runner)
    plan, _ = step(scheduler, fake_runner)
    # Its seventh token alone is computed, in a fourth block.
    assert chunks(plan) == [(b.id, 6, 1, 1)]
    assert plan.restores == tuple(zip(b.block_ids[:3], [0, 1, 2], strict=True))
    drain(scheduler, fake_runner)
    assert b.output_token_ids == fake_completion([1, 1], 7)


@pytest.mark.parametrize("replays", [True, False])
def test_decode_steps_go_on_where_they_are_separate(replays, fake_runner):
    """A token that was generated has other bits of K and V once it is computed as a prompt."""
    scheduler, a, b, _ = two(fake_runner, host_blocks=5, policy=SeparateDecodes(2), replays=replays)
    known = tuple(b.output_token_ids)
    assert b.num_saved_tokens == 2 + len(known) - 1 and not b.replayed
    while a.finish_reason is None:
        step(scheduler, fake_runner)
    plan, _ = step(scheduler, fake_runner)
    (row,) = plan.rows
    assert (row.id, row.start, row.resumed) == (b.id, b.num_prompt_tokens + len(known) - 1, known)
    assert len(plan.restores) == 3 and plan.started == (b.spec,)
    drain(scheduler, fake_runner)
    assert b.output_token_ids == fake_completion([1, 1], 7)


def test_prompts_and_saved_sequences_begin_in_plans_of_their_own(fake_runner):
    """A packed step would start a sequence of which it computes nothing: the runner hears of no block."""
    scheduler, a, b, _ = two(fake_runner, host_blocks=5, policy=SeparateDecodes(2))
    (c,) = add(scheduler, make_sequence([2, 2], max_tokens=2, id=2))
    while a.finish_reason is None:
        step(scheduler, fake_runner)
    started = []
    while scheduler.has_unfinished:
        plan, _ = step(scheduler, fake_runner)
        started += [(type(plan), spec.id) for spec in plan.started]
    assert started == [(DecodeWindow, b.id), (PackedStep, c.id)]
    assert c.output_token_ids == fake_completion([2, 2], 2)


def test_what_does_not_fit_the_host_is_computed_again(fake_runner):
    """Half of a sequence would be of no use."""
    scheduler, _, b, plan = two(fake_runner, host_blocks=2)
    assert (plan.saves, b.saved_blocks) == ((), [])
    done, plans = drain(scheduler, fake_runner)
    assert sum(plan.num_tokens for plan in plans) > 7
    assert done[b.id] == fake_completion([1, 1], 7)


def test_a_prompt_half_computed_is_not_saved(fake_runner):
    scheduler = make_scheduler(num_blocks=4, block_size=2, prefix_cache=False, host_blocks=9, budget=3)
    add(scheduler, make_sequence([0], max_tokens=6, id=0), make_sequence([1] * 7, max_tokens=1, id=1))
    plans = [step(scheduler, fake_runner)[0] for _ in range(3)]
    assert not any(plan.saves for plan in plans)
    drain(scheduler, fake_runner)


def test_a_prefix_that_is_still_cached_is_shared_not_restored(fake_runner):
    """Restored, it would take blocks twice."""
    scheduler = make_scheduler(num_blocks=6, block_size=2, seqs=2, host_blocks=9)
    a, b = add(scheduler, make_sequence([0, 0], max_tokens=6, id=0), make_sequence([1, 1], max_tokens=7, id=1))
    plan = until_preempted(scheduler, fake_runner)
    assert (len(plan.saves), a.finish_reason) == (3, "length")
    plan, _ = step(scheduler, fake_runner)
    # The first took the third block: the two before it are still the second's.
    assert (chunks(plan), len(plan.restores)) == ([(b.id, 6, 1, 1)], 1)
    drain(scheduler, fake_runner)
    assert b.output_token_ids == fake_completion([1, 1], 7)


def test_a_restored_prefix_is_shared_again(fake_runner):
    """The cache had lost it: another row with that prompt would compute what is there."""
    scheduler = make_scheduler(num_blocks=6, block_size=2, host_blocks=9)
    prompt = [1, 2, 3, 4]
    a, b = add(scheduler, make_sequence([0, 0], max_tokens=9, id=0), make_sequence(prompt, max_tokens=5, id=1))
    assert until_preempted(scheduler, fake_runner).saves
    while a.finish_reason is None:
        step(scheduler, fake_runner)
    (c,) = add(scheduler, make_sequence([*prompt, 5], max_tokens=1, id=2))
    plan, _ = step(scheduler, fake_runner)
    # The prompt's second block comes from the host, for both.
    assert (len(plan.restores), [chunk[:3] for chunk in chunks(plan)]) == (2, [(b.id, 6, 1), (c.id, 4, 1)])
    drain(scheduler, fake_runner)


@pytest.mark.parametrize("policy", [MIXED, SeparateDecodes(4)])
def test_an_abort_frees_the_host(policy, fake_runner):
    scheduler, _, b, _ = two(fake_runner, host_blocks=5, policy=policy)
    assert b.saved_blocks
    scheduler.abort()
    scheduler.check_integrity()
    add(scheduler, *(make_sequence([i, i], max_tokens=7, id=i) for i in range(2, 4)))
    assert len(until_preempted(scheduler, fake_runner).saves) == 3
    drain(scheduler, fake_runner)


PROMPTS = [2], [4, 8], [5, 9, 9, 3, 1], [7] * 6, [11, 12, 13]


def requests():
    """Greedy and sampled, with a penalty, and with log-probabilities."""
    options = [{}, {"temperature": 0.8, "seed": 5}, {"logprobs": 2}, {"presence_penalty": 0.5}, {}]
    pairs = enumerate(zip(PROMPTS, options, strict=True))
    return [Request(i, tuple(p), SamplingParams(max_tokens=20, ignore_eos=True, **o)) for i, (p, o) in pairs]


def run(engine):
    return {key: done.token_ids for key, done in running.run(engine, requests()).items()}


def swaps(cramped, roomy):
    """Equal tokens, and as many computed as with room for all."""
    assert run(cramped) == run(roomy)
    assert cramped.stats.preemptions > 3 and cramped.stats.restored_blocks > 3
    assert cramped.stats.computed_tokens == roomy.stats.computed_tokens


@pytest.mark.parametrize("name", ["gpt2", "hp1", "e4m3"])
def test_nothing_is_computed_twice(name):
    """With planes of each kind: K and V, codes, and bytes with scales."""
    swaps(plain_engine(name, blocks=9, host_blocks=60), plain_engine(name))


def test_a_rank_swaps_by_the_plans_alone():
    """It has a host of its own, and knows no scheduler."""
    engine, rank = plain_engine("gpt2", blocks=9, host_blocks=60), plain_engine("gpt2", blocks=9).runner
    own, compared = engine.runner.launch, []

    def launch(plan, masks):
        sent = pickle.loads(pickle.dumps(plan))
        wait = own(plan, masks)
        compared.append(rank.launch(sent, masks)().token_ids == wait().token_ids)
        return wait

    engine.runner.launch = launch
    run(engine)
    assert engine.stats.preemptions > 3 and all(compared)


@pytest.mark.thorough
@needs_interpreter
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_nothing_is_computed_twice_on_the_device_path():
    """With plans that run ahead of their results."""
    swaps(device_engine("gpt2", blocks=9, host_blocks=60), plain_engine("gpt2"))


@pytest.mark.thorough
@needs_interpreter
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_a_penalty_counts_the_tokens_from_before():
    """A row that comes back is told of them: it has another slot."""
    sampling = SamplingParams(max_tokens=20, frequency_penalty=1.5, logit_bias={7: 2.0}, ignore_eos=True)

    def tokens(engine):
        rows = [Request(i, tuple(prompt), sampling) for i, prompt in enumerate(PROMPTS)]
        return {i: done.token_ids for i, done in running.run(engine, rows).items()}

    cramped = device_engine("gpt2", blocks=9, host_blocks=60)
    assert tokens(cramped) == tokens(plain_engine("gpt2"))
    assert cramped.stats.restored_blocks > 3


@pytest.mark.parametrize("swap", [True, False])
def test_the_switch_decides(swap):
    """At load, where the memory plan allows as many blocks as a cache of 64 KiB has."""
    switches = replace(Switches.resolve({}, "cpu"), swap=swap)
    ops, cpu = select(switches), torch.device("cpu")
    limits = RunConfig(device="cpu", max_num_seqs=4, block_size=4, kv_cache_memory=1 << 16)
    model = LoadedModel(build("gpt2", ops), MODELS["gpt2"], ops, torch.float32, cpu)
    loaded = build_engine(model, limits, switches)
    assert loaded.engine.scheduler.planner.host_blocks.num_blocks == (loaded.num_blocks if swap else 0)


def test_the_host_holds_each_plane_of_a_block():
    """K and V, in layers of two shapes; a block is kept until it is saved anew."""
    cpu = torch.device("cpu")
    tensors = [torch.rand(2, 2, 5, 3, 4, 8), torch.randint(255, (1, 1, 5, 2, 4, 6), dtype=torch.uint8)]
    before = [data.clone() for data in tensors]
    store, staging = HostStore(tensors, cpu), Staging(cpu)
    store.save([(4, 7), (1, 0)], staging)
    for data in tensors:
        data.zero_()
    store.restore([(0, 7), (3, 0), (2, 7)], staging)
    for data, old in zip(tensors, before, strict=True):
        assert torch.equal(data[:, :, [0, 3, 2]], old[:, :, [4, 1, 4]])
        assert not data[:, :, [1, 4]].any()
