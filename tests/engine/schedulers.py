"""Schedulers with sequences, and their steps with a runner that checks both."""

from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler


def add(scheduler, *sequences):
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


def make_scheduler(*sequences, num_blocks=32, block_size=4, seqs=8, budget=64, **switches):
    """One with these sequences waiting."""
    pool = BlockPool(num_blocks, block_size)
    scheduler = Scheduler(pool, max_num_seqs=seqs, max_num_batched_tokens=budget, **switches)
    add(scheduler, *sequences)
    return scheduler


def serving(*sequences, **options):
    """A scheduler with these sequences waiting, and they themselves."""
    return make_scheduler(*sequences, **options), *sequences


def findable(scheduler):
    """The blocks of the first group that prompts can find."""
    return [block for block, run in enumerate(scheduler.pool.prefixes.runs) if run is not None]


def chunks(plan):
    """Each chunk as (sequence id, start, length, samples)."""
    return [(c.id, c.start, len(c.token_ids), c.sampled) for c in plan.chunks]


def next_chunks(scheduler, runner, steps):
    """The chunks of each of so many steps."""
    return [chunks(step(scheduler, runner)[0]) for _ in range(steps)]


def tables_told(plan):
    """What a plan says of each chunk's block table."""
    return [chunk.blocks for chunk in plan.chunks]


def step(scheduler, runner):
    """One step: the plan and who finished. Scheduler and runner agree before and after the forward pass."""
    plan = scheduler.schedule()
    scheduler.check_integrity()
    result = runner.run(plan)
    runner.check(scheduler)
    finished = scheduler.commit(plan, result).finished
    scheduler.check_integrity()
    return plan, finished


def drain(scheduler, runner):
    """Run to the end; sequence id -> tokens, and the plans."""
    done, plans = {}, []
    while scheduler.has_unfinished:
        plan, finished = step(scheduler, runner)
        assert plan.num_tokens, "a step without progress"
        plans.append(plan)
        done |= {s.id: s.output_token_ids for s in finished}
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    return done, plans
