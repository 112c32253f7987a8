"""The time left is within a factor of two once a tenth of the job is done, in jobs that are simulated step by step."""

import random
from collections import Counter

import pytest

from rosebatch.engine.metrics.outlook import Outlook, bin_of
from rosebatch.job.report.time_left import seconds_left


def simulate(rows, slots, *, a_step, a_token, a_prompt_token):
    """Some moments of a job on an engine that computes prompts first: seconds, rows left, outlook.

    Args:
        rows: of each row, tokens of its prompt, of its answer, and the most that it may have.
        slots: sequences at a time; as many again wait in the engine.
        a_step, a_token, a_prompt_token: seconds that each takes.
    """
    unread, waiting, running = list(rows), [], []
    now, at, finished, moments = 0.0, 0, 0, []
    ended, stopped = Counter(), Counter()
    prompt_tokens = output_tokens = steps = decoded = squares = products = 0
    prefill = decode = 0.0
    while unread or waiting or running:
        waiting += [unread.pop(0) for _ in range(min(len(unread), 2 * slots - len(waiting) - len(running)))]
        if waiting and len(running) < slots:
            row = waiting.pop(0)
            running.append([row, 1])
            now, output_tokens = now + row[0] * a_prompt_token, output_tokens + 1
            # As the engine counts them.
            if row[0] > 1:
                prefill, prompt_tokens = prefill + row[0] * a_prompt_token, prompt_tokens + row[0]
            else:
                decode += row[0] * a_prompt_token
        else:
            seconds = a_step + a_token * len(running)
            decode, now, output_tokens = decode + seconds, now + seconds, output_tokens + len(running)
            steps, decoded = steps + 1, decoded + len(running)
            squares, products = squares + len(running) ** 2, products + len(running) * seconds
            for each in running:
                each[1] += 1
        over = [each for each in running if each[1] >= each[0][1]]
        finished += len(over)
        ended.update(bin_of(row[1]) for row, _ in over)
        stopped.update(bin_of(row[1]) for row, _ in over if row[1] < row[2])
        running = [each for each in running if each[1] < each[0][1]]
        at += 1
        if at % 8 and (unread or waiting or running):
            continue
        generated = Counter()
        for _, done in running:
            generated[bin_of(done)] += done
        outlook = Outlook(
            engines=1,
            requests=len(waiting) + len(running),
            sequences=len(waiting) + len(running),
            begun=Counter(bin_of(done) for _, done in running),
            prompt_left=sum(row[0] for row in waiting),
            generated=generated,
            room=sum(row[2] - done for row, done in running) + sum(row[2] for row in waiting),
            finished=ended.copy(),
            stopped=stopped.copy(),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            prefill_seconds=prefill,
            decode_seconds=decode,
            steps=steps,
            decoded=decoded,
            squares=squares,
            products=products,
            seconds=now,
        )
        moments.append((now, len(rows) - finished, outlook))
    return moments


def mixed(count, seed=0):
    draw = random.Random(seed)
    return [(draw.randrange(20, 400), draw.randrange(2, 400), 512) for _ in range(count)]


def at_random(draw_length, count, longest=1024):
    draw = random.Random(7)
    return [(100, min(longest, max(2, int(draw_length(draw)))), longest) for _ in range(count)]


JOBS = {
    "all finish together": ([(20, 512, 512)] * 400, 400),
    "long prompts, all together": ([(2000, 64, 64)] * 256, 256),
    "waves of equal rows": ([(100, 128, 128)] * 800, 64),
    "answers that end early": (mixed(800), 64),
    "much room, short answers": ([(50, 30 + i % 20, 4096) for i in range(2000)], 128),
    "prompts alone": ([(300, 1, 1)] * 2000, 64),
    "prompts of one token": ([(1, 200, 200)] * 40, 40),
    "one row": ([(10, 200, 200)], 8),
}


# Answers that end at random: few are much longer than the others, and end the job.
RANDOM_JOBS = {
    "at one rate": (at_random(lambda draw: draw.expovariate(1 / 200), 500), 128),
    "at one rate, all at once": (at_random(lambda draw: draw.expovariate(1 / 200), 256), 256),
    "as texts do": (at_random(lambda draw: draw.lognormvariate(5, 0.9), 500), 128),
    "some never": (at_random(lambda draw: 1024 if draw.random() < 0.05 else draw.randrange(20, 120), 1500), 128),
}


def require_within_a_factor_of_two(rows, slots, until):
    moments = simulate(rows, slots, a_step=0.004, a_token=0.00005, a_prompt_token=0.00002)
    end = moments[-1][0]
    later = [moment for moment in moments if 0.1 * end <= moment[0] <= until * end]
    for now, rows_left, outlook in later[:: max(1, len(later) // 50)]:
        told = seconds_left(rows_left, outlook)
        assert (end - now) / 2 <= told <= (end - now) * 2, f"{now / end:.0%} of {end:.1f} s: {told:.1f} s left"


@pytest.mark.parametrize(("rows", "slots"), JOBS.values(), ids=JOBS.keys())
def test_within_a_factor_of_two(rows, slots):
    """By finished rows, nothing was known where all finish together, or far too much was told."""
    require_within_a_factor_of_two(rows, slots, 0.9)


@pytest.mark.parametrize(("rows", "slots"), RANDOM_JOBS.values(), ids=RANDOM_JOBS.keys())
def test_the_last_rows_take_their_time(rows, slots):
    """Tokens alone count little where few sequences are left: a third or less of the time was told."""
    require_within_a_factor_of_two(rows, slots, 0.8)


def test_engines_work_side_by_side():
    """Two engines with a half of the rows each take as long as one of them."""
    moments = simulate(*RANDOM_JOBS["as texts do"], a_step=0.004, a_token=0.00005, a_prompt_token=0.00002)
    end = moments[-1][0]
    now, rows_left, outlook = moments[len(moments) // 2]
    assert (end - now) / 2 <= seconds_left(2 * rows_left, outlook.plus(outlook)) <= (end - now) * 2


def test_an_engine_that_began_later():
    """Its seconds counted as those of the first: up to twice the time was told, also once a worker was replaced."""
    moments = simulate(*JOBS["waves of equal rows"], a_step=0.004, a_token=0.00005, a_prompt_token=0.00002)
    end = moments[-1][0]
    (one, rows_left, first), (other, more, second) = moments[len(moments) // 2], moments[len(moments) // 20]
    told = seconds_left(rows_left + more, first.plus(second))
    assert told == pytest.approx(end - (one + other) / 2, rel=0.1)


def test_what_engines_told_a_while_ago():
    """Workers tell once a second. Until then, the time left grew, to five times as much in a job of seven seconds."""
    moments = simulate(*JOBS["waves of equal rows"], a_step=0.004, a_token=0.00005, a_prompt_token=0.00002)
    _, rows_left, outlook = moments[len(moments) // 2]
    both = outlook.plus(outlook)
    told = seconds_left(2 * rows_left, both)
    assert seconds_left(2 * rows_left, both._replace(age=0.5 + 1.5)) == pytest.approx(told - 1.0)
    assert seconds_left(2 * rows_left, both._replace(age=1000.0)) == 0.0


def test_nothing_is_known_at_the_beginning():
    assert seconds_left(5, Outlook()) is None
    assert seconds_left(5, Outlook(requests=5, sequences=5, prompt_left=50, room=80)) is None
