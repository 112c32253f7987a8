"""What a plan brought."""

from collections.abc import Mapping, Sequence

import numpy as np

from rosebatch.core.request import Logprobs
from rosebatch.engine.device_clock import DeviceClock
from rosebatch.engine.images import NOTHING_ENCODED, Encoded
from rosebatch.engine.plan import StepResult
from rosebatch.engine.triton_runner.graphs import Ran
from rosebatch_kernels.common.tokens import NO_TOKEN


def to_result(
    ids: list[list[int]],
    logprobs: Sequence[Sequence[Logprobs]],
    clock: DeviceClock,
    ran: Ran,
    of_prompts: Mapping[int, Sequence[Logprobs]] | None = None,
    pooled: Mapping[int, np.ndarray] | None = None,
    encoded: Encoded = NOTHING_ENCODED,
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
    )


def until_ended(tokens: list[int]) -> list[int]:
    """The tokens of a row of a window, up to the step in which its sequence was no longer decoded."""
    return tokens[: tokens.index(NO_TOKEN)] if NO_TOKEN in tokens else tokens
