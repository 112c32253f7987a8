"""What a plan brought."""

from collections.abc import Mapping, Sequence

import numpy as np

from rosebatch.core.request import Logprobs
from rosebatch.engine.device_clock import DeviceClock
from rosebatch.engine.images import NOTHING_ENCODED, Encoded
from rosebatch.engine.plan import StepResult
from rosebatch.engine.triton_runner.graphs import Ran
from rosebatch_kernels.common.tokens import NO_TOKEN, WRONG_DRAFT


def to_result(
    ids: list[list[int]],
    logprobs: Sequence[Sequence[Logprobs]],
    clock: DeviceClock,
    ran: Ran,
    of_prompts: Mapping[int, Sequence[Logprobs]] | None = None,
    pooled: Mapping[int, np.ndarray] | None = None,
    encoded: Encoded = NOTHING_ENCODED,
    *,
    drafted: int = 0,
    accepted: int = 0,
) -> StepResult:
    """What a plan brought; waits for the device."""
    return StepResult(
        ids,
        logprobs,
        of_prompts or {},
        pooled or {},
        seconds=clock.seconds(),
        images=encoded.images,
        image_seconds=encoded.seconds(),
        graph_replays=ran.replays,
        graph_captures=ran.captures,
        drafted=drafted,
        accepted=accepted,
    )


def until_ended(tokens: np.ndarray, lengths: Sequence[int]) -> list[list[int]]:
    """The tokens of a window's rows, up to their lengths, or to the step in which a sequence was no longer decoded.

    Args:
        tokens: ``[rows, steps]``.
        lengths: of each row, tokens at most.
    """
    rows: list[list[int]] = tokens.tolist()
    if min(lengths, default=0) == tokens.shape[1] and not (tokens == NO_TOKEN).any():
        # Mostly, and quicker to tell.
        return rows
    kept = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    return [row[: row.index(NO_TOKEN)] if NO_TOKEN in row else row for row in kept]


def verified(history: np.ndarray, lengths: Sequence[int]) -> tuple[list[list[int]], int, int]:
    """The tokens of the rows of a window with drafts; how many drafts there were, and how many were right.

    Args:
        history: ``[steps, rows, queries]``, see ``rosebatch_kernels.drafts``.
        lengths: of each row, tokens at most.
    """
    kept = (history != NO_TOKEN) & (history != WRONG_DRAFT)
    ids = [
        own[there].tolist()[:length]
        for own, there, length in zip(history.swapaxes(0, 1), kept.swapaxes(0, 1), lengths, strict=True)
    ]
    accepted = int(kept[..., 1:].sum())
    return ids, accepted + int((history == WRONG_DRAFT).sum()), accepted
