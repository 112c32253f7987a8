"""How many multiprocessors a device has."""

from functools import cache

import torch

# Few enough that tests have more tiles than programs.
_INTERPRETED = 4


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few where Triton interprets on a CPU."""
    if device.type != "cuda":
        return _INTERPRETED
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
