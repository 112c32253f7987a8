"""PyTorch's own watch over calls that wait for the device; it does not watch events."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def sync_mode(mode: str) -> Iterator[None]:
    """Have such calls raise with ``error``, and warn with ``warn``."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # That it is a prototype, told after it is set: as an error, it would stay set.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
