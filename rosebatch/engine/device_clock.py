"""How long the device took."""

import time

import torch

from rosebatch_kernels.common import host_waits


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
