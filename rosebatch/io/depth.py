"""How deep values are nested."""

from typing import Any


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than ``levels`` deep, however deep that is."""
    layer = [value]
    for _ in range(levels + 1):
        nested = [each for each in layer if isinstance(each, (list, dict))]
        if not nested:
            return False
        layer = [inner for each in nested for inner in (each.values() if isinstance(each, dict) else each)]
    return True
