"""Which variants of a kernel's test run in Triton's interpreter, and which on a GPU."""

import os
from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest
import torch


def runs_kernel_on(item: pytest.Function) -> str:
    """``cuda`` or ``cpu`` for a variant of a test that tries a kernel on both, else empty. A CPU needs the interpreter.

    See ``device`` of ``tests/kernels``.
    """
    params = item.callspec.params if hasattr(item, "callspec") else {}
    place = str(params.get("device", ""))
    is_tried = place == "cuda" or (place == "cpu" and "TRITON_INTERPRET" in os.environ and not is_cut_off(params))
    return place if is_tried else ""


def is_cut_off(params: Mapping[str, object]) -> bool:
    """Whether the interpreter would cut bf16 numbers off instead of rounding them."""
    return params.get("implementation") != "reference" and torch.bfloat16 in params.values()


def with_all_pairs(variants: Sequence[Mapping[str, object]]) -> set[int]:
    """Choose few variants that have each pair of two parameters' values, the first and the last among them.

    Args:
        variants: for each, the parameters by name.

    Returns:
        the positions of those chosen.
    """
    numbers: dict[object, int] = {}
    masks = [
        sum(1 << numbers.setdefault(pair, len(numbers)) for pair in combinations(_values(variant), 2))
        for variant in variants
    ]
    chosen = {0, len(masks) - 1}
    missing = (1 << len(numbers)) - 1
    for position in chosen:
        missing &= ~masks[position]
    while missing:
        best = max(range(len(masks)), key=lambda position: (masks[position] & missing).bit_count())
        chosen.add(best)
        missing &= ~masks[best]
    return chosen


def _values(variant: Mapping[str, object]) -> list[tuple[str, str]]:
    """A parameter may be one value of many of a table, so values are compared and not their numbers."""
    return sorted((name, repr(value)) for name, value in variant.items())
