"""Where sequences with states share a beginning: which chunks end for a snapshot, and who begins behind it."""

import numpy as np
import pytest
from msgspec import structs

from rosebatch.core.images import PromptImage
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.token_ids import TokenIds
from rosebatch.engine.scheduling.sequence import SequenceState
from rosebatch.engine.scheduling.step_planner import MIXED, SeparateDecodes
from tests.engine.fake_runner import fake_completion, make_sequence
from tests.engine.schedulers import add, chunks, drain, make_scheduler, next_chunks, step

# Two blocks and a half.
BEGINNING = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def with_states(*sequences, snapshots=4, **options):
    return make_scheduler(*sequences, snapshots=snapshots, **options)


def rows(*prompts, **options):
    return [make_sequence(prompt, max_tokens=3, id=number, **options) for number, prompt in enumerate(prompts)]


def computed(plans):
    """Tokens of prompts and of samples but the last, each time that they are computed."""
    return sum(plan.num_tokens for plan in plans)


@pytest.mark.parametrize("policy", [MIXED, SeparateDecodes(2)])
def test_a_beginning_goes_first(policy, fake_runner):
    """One that begins otherwise shares its step: rows that wait for a snapshot must not hold up the others."""
    scheduler = with_states(*rows([*BEGINNING, 11], [*BEGINNING, 12, 13], [14, 15], [*BEGINNING, 16]), policy=policy)
    first, _ = step(scheduler, fake_runner)
    assert sorted(chunks(first)) == [(0, 0, 8, 0), (2, 0, 2, 1)]
    ((sequence_id, slot),) = first.state_saves
    assert sequence_id == 0 and not first.state_loads
    second, _ = step(scheduler, fake_runner)
    begun = [chunk for chunk in chunks(second) if chunk[0] != 2]
    assert begun == [(0, 8, 3, 1), (1, 8, 4, 1), (3, 8, 3, 1)]
    assert second.state_loads == ((slot, 1), (slot, 3)) and not second.state_saves
    done, _ = drain(scheduler, fake_runner)
    assert done[3] == fake_completion([*BEGINNING, 16], 3)


def test_groups_inside_of_groups(fake_runner):
    """Each beginning is computed once: the shorter one by the first row, though the next ones share a longer one."""
    longer = [*BEGINNING, 11, 12]
    scheduler = with_states(*rows([*longer, 1], [*longer, 2], [*BEGINNING, 3], [*BEGINNING, 4]))
    found = next_chunks(scheduler, fake_runner, 3)
    assert found[0] == [(0, 0, 8, 0)]
    assert sorted(found[1]) == [(0, 8, 4, 0), (2, 8, 3, 1), (3, 8, 3, 1)]
    assert sorted(each for each in found[2] if each[0] < 2) == [(0, 12, 1, 1), (1, 12, 1, 1)]


@pytest.mark.parametrize("budget", [64, 5])
def test_completions_begin_behind_the_last_token_but_one(budget, fake_runner):
    """In the middle of a block, which each of them copies when it writes."""
    first, *forks = (make_sequence([1, 2, 3, 4, 5, 6, 7], max_tokens=3, id=i, sample=i) for i in range(3))
    first.forks = forks
    scheduler = with_states(first, budget=budget, prefix_cache=False)
    plans = []
    while not any(plan.state_loads for plan in plans):
        plans.append(step(scheduler, fake_runner)[0])
    assert chunks(plans[-1]) == [(0, 6, 1, 1), (1, 6, 1, 1), (2, 6, 1, 1)]
    assert computed(plans) == 9 and {copy[1] for copy in plans[-1].copies} == {1}
    done, _ = drain(scheduler, fake_runner)
    assert done[2] == fake_completion([1, 2, 3, 4, 5, 6, 7], 3, seed=forks[1].sampling.seed)


@pytest.mark.parametrize("snapshots", [1, 2])
def test_prompts_wait_for_slots_of_their_completions(snapshots, fake_runner):
    """Each would be computed by all of its completions where another's states have the only slot."""
    sequences = rows(*([number] * 6 for number in range(8)))
    for number, sequence in enumerate(sequences):
        sequence.forks = [make_sequence([number] * 6, max_tokens=3, id=8 + number, sample=1)]
    done, plans = drain(with_states(*sequences, snapshots=snapshots, prefix_cache=False, seqs=16), fake_runner)
    assert len(done) == 16 and computed(plans) == 8 * (6 + 1 + 2 * 2)


def test_chunks_end_where_bits_are_those_of_a_whole_prompt(fake_runner):
    """Of the next multiple, a kernel adds up a state in another order."""
    first, fork = (make_sequence(range(19), max_tokens=3, id=i, sample=i) for i in range(2))
    first.forks = [fork]
    others = [make_sequence([*range(15), 18 + i, 0], max_tokens=3, id=2 + i) for i in range(2)]
    scheduler = with_states(first, *others, replays=True, exact_prefixes=True, chunk_unit=8)
    found = next_chunks(scheduler, fake_runner, 3)
    assert found[0] == [(0, 0, 8, 0)]
    assert sorted(found[1]) == [(0, 8, 8, 0), (2, 8, 9, 1), (3, 8, 9, 1)]
    assert (0, 16, 3, 1) in found[2] and (1, 16, 3, 1) in found[2]


def test_what_nobody_saw_ahead(fake_runner):
    """Rows come one by one. The second finds blocks, and no states: it leaves them where the third goes on."""
    scheduler = with_states()
    begun = []
    for number in range(4):
        add(scheduler, make_sequence([*BEGINNING, 11 + number], max_tokens=1, id=number))
        _, plans = drain(scheduler, fake_runner)
        begun.append([chunk[1:3] for plan in plans for chunk in chunks(plan)])
    assert begun == [[(0, 11)], [(0, 8), (8, 3)], [(8, 3)], [(8, 3)]]


def test_blocks_that_are_handed_out_take_their_snapshot_along(fake_runner):
    """Others' keys are in the block: states found by it would be of tokens that are not the prompt's."""
    scheduler = with_states(*rows([*BEGINNING, 11], [*BEGINNING, 12]), num_blocks=8)
    drain(scheduler, fake_runner)
    add(scheduler, make_sequence(range(30), max_tokens=1, id=2))
    drain(scheduler, fake_runner)
    add(scheduler, *(make_sequence([*BEGINNING, 11], max_tokens=1, id=3 + i) for i in range(2)))
    _, plans = drain(scheduler, fake_runner)
    assert chunks(plans[0]) == [(3, 0, 8, 0)] and not plans[0].state_loads


def test_the_least_recently_used_goes(fake_runner):
    """With two slots, the third beginning takes that of the second: the first was used after it."""
    scheduler, number = with_states(snapshots=2, num_blocks=100), 0
    begun = {}
    for beginning in (1, 2, 1, 3, 1, 2):
        pair = [make_sequence([beginning] * 8 + [number + i], max_tokens=1, id=number + i) for i in range(2)]
        number += 2
        add(scheduler, *pair)
        _, plans = drain(scheduler, fake_runner)
        begun.setdefault(beginning, []).append(min(chunk[1] for plan in plans for chunk in chunks(plan)))
    assert begun == {1: [0, 8, 8], 2: [0, 0], 3: [0]}


def test_an_abort_forgets_all(fake_runner):
    """Perhaps the step that would have saved the states was not computed."""
    scheduler = with_states(*rows([*BEGINNING, 11], [*BEGINNING, 12]))
    step(scheduler, fake_runner)
    scheduler.abort()
    add(scheduler, make_sequence([*BEGINNING, 13], max_tokens=1, id=9))
    _, plans = drain(scheduler, fake_runner)
    assert not any(plan.state_loads for plan in plans)


def test_rows_that_need_all_of_their_prompt(fake_runner):
    """Log-probabilities of a prompt come of all its tokens: a snapshot for it would be made for nobody."""
    scheduler = with_states(*rows([*BEGINNING, 11], [*BEGINNING, 12], prompt_logprobs=0))
    plan = scheduler.schedule()
    assert chunks(plan) == [(0, 0, 11, 1), (1, 0, 11, 1)] and not plan.state_saves


@pytest.mark.parametrize(("digests", "end"), [(b"aa", 8), (b"ab", 4)])
def test_images_have_equal_tokens(digests, end):
    """States behind one are those of its pixels: rows with others part in front of it."""
    sequences = []
    for number, digest in enumerate(digests):
        image = PromptImage(5, np.ones(3, bool), (1, 3), bytes([digest]) * 32, np.zeros(1, np.uint8))
        prompt = TokenIds.of([*BEGINNING, 11 + number])
        request = Request(number, prompt, SamplingParams(max_tokens=1), images=(image,))
        sequences.append(SequenceState.start(request, id=number, max_model_len=99))
    scheduler = with_states(*sequences)
    assert chunks(scheduler.schedule()) == [(0, 0, end, 0)]


def test_adapters_make_states_of_their_own():
    """Equal tokens of two adapters are no beginning that their rows could share."""
    sequences = rows([*BEGINNING, 11], [*BEGINNING, 12])
    sequences[1].restart(structs.replace(sequences[1].spec, salt=b"other"))
    assert len(chunks(with_states(*sequences).schedule())) == 2
