"""How deep values are nested."""

from typing import Any

# Levels of lists and objects in a row. Python's own limit, near 1000, depends on where a row is read or written.
DEEPEST = 600


def is_deeper(value: Any, levels: int = DEEPEST) -> bool:
    """Whether lists and objects are nested more than ``levels`` deep, however deep that is, also one in itself."""
    layer = [value]
    for _ in range(levels + 1):
        # Each once: of a list that has itself twice there would be twice as many in each layer.
        nested = {id(each): each for each in layer if isinstance(each, list | tuple | dict)}
        if not nested:
            return False
        layer = [inner for each in nested.values() for inner in (each.values() if isinstance(each, dict) else each)]
    return True
