"""What a plan brought, and how long the device took."""

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rosebatch.core.request import Logprobs
from rosebatch.engine.plan import StepResult
from rosebatch.engine.triton_runner.graphs import Ran
from rosebatch_kernels.common import host_waits
from rosebatch_kernels.common.tokens import NO_TOKEN


class DeviceClock:
    """Seconds that the device spends between the start and ``stop``."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._cuda = device.type == "cuda"
        self._started = self._stopped = time.perf_counter()
        self._mark()

    def stop(self) -> None:
        """The work that is measured is launched."""
        self._mark()
        self._stopped = time.perf_counter()

    def seconds(self) -> float:
        """Waits for the end of the work, unless a later result is there."""
        if not self._cuda:
            return self._stopped - self._started
        start, end = self._events
        if not end.query():
            host_waits.wait_for(end)
        milliseconds: float = start.elapsed_time(end)
        return milliseconds * 1e-3

    def _mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)


def to_result(
    ids: list[list[int]],
    logprobs: Sequence[Sequence[Logprobs]],
    clock: DeviceClock,
    ran: Ran,
    of_prompts: Mapping[int, Sequence[Logprobs]] | None = None,
    pooled: Mapping[int, np.ndarray] | None = None,
) -> StepResult:
    """What a plan brought; waits for the device."""
    return StepResult(
        ids,
        logprobs,
        of_prompts or {},
        pooled or {},
        seconds=clock.seconds(),
        graph_replays=ran.replays,
        graph_captures=ran.captures,
    )


def until_ended(tokens: list[int]) -> list[int]:
    """The tokens of a row of a window, up to the step in which its sequence was no longer decoded."""
    return tokens[: tokens.index(NO_TOKEN)] if NO_TOKEN in tokens else tokens
