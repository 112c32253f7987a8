"""How long a job will still take, from what its engine has done and has before it."""

import math

from rosebatch.engine.metrics.outlook import Outlook

# Tokens of prompts that take as long as a generated one, until some were generated.
_PROMPT_TOKENS_A_TOKEN = 4


def seconds_left(elapsed: float, rows_left: int, outlook: Outlook) -> float | None:
    """An estimate; None before anything was computed.

    Sequences end early at a rate for each token that is the same all the time, or at their longest. Those that are not
    in the engine yet are like those that are.

    Args:
        elapsed: seconds since the counts began.
        rows_left: without a result.
        outlook: of the engine.
    """
    spent = outlook.prefill_seconds + outlook.decode_seconds
    if not spent:
        return None
    prompts, outputs = _tokens_left(rows_left, outlook)
    a_prompt_token = outlook.prefill_seconds / max(outlook.prompt_tokens, 1)
    # Each first token came with its prompt, but for prompts of one token, which count as decodes.
    decoded = outlook.output_tokens - (outlook.finished + outlook.begun if outlook.prompt_tokens else 0)
    a_token = outlook.decode_seconds / decoded if decoded > 0 else _PROMPT_TOKENS_A_TOKEN * a_prompt_token
    return elapsed * (prompts * a_prompt_token + outputs * a_token) / spent


def _tokens_left(rows_left: int, outlook: Outlook) -> tuple[float, float]:
    """Tokens of prompts, and generated ones."""
    sequences = outlook.sequences
    if not sequences:
        return 0.0, 0.0
    unread = max(0, rows_left - outlook.requests) * sequences / outlook.requests
    computed = outlook.finished + outlook.begun
    waiting = sequences - outlook.begun
    # Prompts may begin with blocks that are known.
    prompts = min(outlook.prompt_left, waiting * outlook.prompt_tokens / computed) if computed else outlook.prompt_left
    a_prompt = outlook.prompt_tokens / computed if computed else (outlook.prompt_tokens + prompts) / sequences
    rate = outlook.stopped / outlook.output_tokens if outlook.output_tokens else 0.0
    length = _expected((outlook.generated + outlook.room) / sequences, rate)
    return prompts + unread * a_prompt, sequences * _expected(outlook.room / sequences, rate) + unread * length


def _expected(longest: float, rate: float) -> float:
    """Mean tokens of a sequence that may get so many, if each of them ends it at this rate."""
    return longest if not rate else (1 - math.exp(-rate * longest)) / rate
