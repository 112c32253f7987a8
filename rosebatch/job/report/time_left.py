"""How long a job will still take, from what its engine has done and has before it."""

from collections import Counter
from typing import Any

import numpy as np

from rosebatch.engine.metrics.outlook import Outlook, begin_of, bin_of

# Tokens of prompts that take as long as a generated one, until some were generated.
_PROMPT_TOKENS_A_TOKEN = 4
# Steps of different sizes tell what a step takes alone, and what each token adds, if their sizes vary so much.
_LEAST_VARIANCE = 0.01
# Bins behind the longest answers so far that tell at which rate longer ones will end: they double the length.
_LAST_BINS = 4
# Numbers of steps for which the share of sequences is computed that go on longer.
_PLACES = 256

_Numbers = np.ndarray[Any, np.dtype[np.float64]]


def seconds_left(rows_left: int, outlook: Outlook) -> float | None:
    """An estimate; None before anything was computed.

    Sequences that are not in the engine yet are like those that are. A step takes some time alone, and some for each of
    its tokens. So tokens count, and steps: those that all tokens take with all slots in use, and then those of the last
    sequences, until the longest ends.

    Args:
        rows_left: without a result.
        outlook: of all engines.
    """
    spent = outlook.prefill_seconds + outlook.decode_seconds
    if not spent:
        return None
    if not outlook.sequences:
        return 0.0
    running, finished = outlook.begun.total(), outlook.finished.total()
    waiting = outlook.sequences - running
    computed = finished + running
    unread = max(0, rows_left - outlook.requests) * outlook.sequences / outlook.requests
    # Prompts may begin with blocks that are known.
    prompts = min(outlook.prompt_left, waiting * outlook.prompt_tokens / computed) if computed else outlook.prompt_left
    a_prompt = outlook.prompt_tokens / computed if computed else (outlook.prompt_tokens + prompts) / outlook.sequences
    a_prompt_token = outlook.prefill_seconds / max(outlook.prompt_tokens, 1)
    tokens, steps = _tokens_and_steps_left(waiting + unread, outlook)
    a_step, a_token = _seconds_of_a_step(outlook, a_prompt_token)
    left = (prompts + unread * a_prompt) * a_prompt_token + steps * outlook.engines * a_step + tokens * a_token
    return max(0.0, outlook.seconds * left / spent - outlook.age) / outlook.engines


def _seconds_of_a_step(outlook: Outlook, a_prompt_token: float) -> tuple[float, float]:
    """Those that a step takes alone, and those that each of its tokens adds: a line through all steps so far."""
    if not outlook.steps:
        return 0.0, _PROMPT_TOKENS_A_TOKEN * a_prompt_token
    steps, tokens, seconds = outlook.steps, outlook.decoded, outlook.decode_seconds
    variance = steps * outlook.squares - tokens**2
    # Nothing tells them apart where all steps are alike.
    a_token = seconds / tokens / 2
    if variance > _LEAST_VARIANCE * tokens**2:
        slope = (steps * outlook.products - tokens * seconds) / variance
        a_token = min(max(slope, 0.0), seconds / tokens)
    return (seconds - a_token * tokens) / steps, a_token


def _tokens_and_steps_left(waiting: float, outlook: Outlook) -> tuple[float, float]:
    """Tokens of all sequences, and steps of one engine.

    Args:
        waiting: sequences that are not begun.
        outlook: of the engine.
    """
    longest = max((outlook.generated.total() + outlook.room) / outlook.sequences, 1.0)
    lengths, shares = _lengths(outlook, longest)
    running = outlook.begun.total()
    # How many there are of each kind, and how likely each length to come is.
    counts, rests, chances = [waiting], [lengths], [shares]
    for number, count in outlook.begun.items():
        rest = np.maximum(lengths - outlook.generated[number] / max(count, 1), 1.0)
        likely = np.where(np.arange(len(lengths)) > number, shares, 0.0)
        if number < len(lengths) - 1:
            # Half of its own bin is behind it.
            likely[number] = shares[number] / 2
            rest[number] = (lengths[number + 1] - lengths[number]) / 4
        if not likely.any():
            likely[-1] = 1.0
        counts.append(count)
        rests.append(rest)
        chances.append(likely / likely.sum())
    tokens = np.array([count * (rest @ chance) for count, rest, chance in zip(counts, rests, chances, strict=True)])
    # At a moment between two waves, few run.
    slots = max(running, outlook.engines * outlook.decoded / max(outlook.steps, 1), 1)
    # The last sequences: of each kind, the part that runs when no other waits.
    last = min(waiting, slots)
    parts = np.array([last / max(waiting, 1e-9)] + [(slots - last) / slots] * (len(counts) - 1))
    places = (np.arange(_PLACES) + 0.5) * longest / _PLACES
    none_longer = np.zeros(_PLACES)
    for count, rest, chance in zip(parts * counts, rests, chances, strict=True):
        longer = chance @ (rest[:, None] > places)
        none_longer += count * np.log(np.maximum(1.0 - longer, 1e-12))
    steps = (1.0 - np.exp(none_longer)).sum() * longest / _PLACES
    return float(tokens.sum()), float(steps + tokens @ (1.0 - parts) / slots)


def _lengths(outlook: Outlook, longest: float) -> tuple[_Numbers, _Numbers]:
    """Lengths that answers may have, and how likely each is.

    Up to the longest so far by the actuarial estimate: of those that came to a bin, the share that ended in it; those
    that are still in it, or ended because they had to, count half. Longer ones end at the rate of the last bins.
    """
    bins = bin_of(int(longest)) + 1
    begins = np.minimum([begin_of(number) for number in range(bins + 1)], longest)
    begins[0] = 0.0
    finished, stopped, begun = (_by_bin(each, bins) for each in (outlook.finished, outlook.stopped, outlook.begun))
    ended = finished + begun
    came = np.cumsum(ended[::-1])[::-1]
    widths = np.diff(begins)
    # Tokens in each bin, of those that ended in it and those that went on.
    tokens = (came - ended / 2) * widths
    known = int(np.flatnonzero(ended).max(initial=-1)) + 1
    first = max(0, known - _LAST_BINS)
    rate = stopped.sum() / max(tokens.sum(), 1.0)
    # As if one more had ended at the rate of all.
    rate = (stopped[first:].sum() + 1.0) / (tokens[first:].sum() + 1.0 / rate) if rate else 0.0
    ends = 1.0 - np.exp(-rate * widths)
    ends[:known] = (stopped / np.maximum(came - (ended - stopped) / 2, 1e-9))[:known]
    goes_on = np.append(1.0, np.cumprod(1.0 - np.minimum(ends, 1.0)))
    return np.append((begins[1:] + begins[:-1]) / 2, longest), np.append(-np.diff(goes_on), goes_on[-1])


def _by_bin(counted: Counter[int], bins: int) -> _Numbers:
    """Lengths beyond the last bin count there."""
    found = np.zeros(bins)
    for number, count in counted.items():
        found[min(number, bins - 1)] += count
    return found
