"""The time left is within a factor of two once a tenth of the job is done, in jobs that are simulated step by step."""

import random

import pytest

from rosebatch.engine.metrics.outlook import Outlook
from rosebatch.job.report.time_left import seconds_left


def simulate(rows, slots, *, a_step, a_token, a_prompt_token):
    """Moments of a job on an engine that computes prompts first: seconds, rows left, outlook.

    Args:
        rows: of each row, tokens of its prompt, of its answer, and the most that it may have.
        slots: sequences at a time; as many again wait in the engine.
        a_step, a_token, a_prompt_token: seconds that each takes.
    """
    unread, waiting, running = list(rows), [], []
    now, finished, moments = 0.0, 0, []
    stopped = prompt_tokens = output_tokens = 0
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
            for each in running:
                each[1] += 1
        over = [each for each in running if each[1] >= each[0][1]]
        finished, stopped = finished + len(over), stopped + sum(row[1] < row[2] for row, _ in over)
        running = [each for each in running if each[1] < each[0][1]]
        outlook = Outlook(
            requests=len(waiting) + len(running),
            sequences=len(waiting) + len(running),
            begun=len(running),
            prompt_left=sum(row[0] for row in waiting),
            generated=sum(done for _, done in running),
            room=sum(row[2] - done for row, done in running) + sum(row[2] for row in waiting),
            finished=finished,
            stopped=stopped,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            prefill_seconds=prefill,
            decode_seconds=decode,
        )
        moments.append((now, len(rows) - finished, outlook))
    return moments


def mixed(count, seed=0):
    draw = random.Random(seed)
    return [(draw.randrange(20, 400), draw.randrange(2, 400), 512) for _ in range(count)]


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


@pytest.mark.parametrize(("rows", "slots"), JOBS.values(), ids=JOBS.keys())
def test_within_a_factor_of_two(rows, slots):
    """By finished rows, nothing was known where all finish together, or far too much was told."""
    moments = simulate(rows, slots, a_step=0.004, a_token=0.00005, a_prompt_token=0.00002)
    end = moments[-1][0]
    later = [moment for moment in moments if 0.1 * end <= moment[0] <= 0.9 * end]
    for now, rows_left, outlook in later[:: max(1, len(later) // 50)]:
        told = seconds_left(now, rows_left, outlook)
        assert (end - now) / 2 <= told <= (end - now) * 2, f"{now / end:.0%} of {end:.1f} s: {told:.1f} s left"


def test_nothing_is_known_at_the_beginning():
    assert seconds_left(1.0, 5, Outlook()) is None
    assert seconds_left(1.0, 5, Outlook(requests=5, sequences=5, prompt_left=50, room=80)) is None
