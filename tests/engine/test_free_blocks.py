"""The order in which free blocks are handed out, whichever are taken out meanwhile."""

import random
from collections import OrderedDict

from rosebatch.engine.scheduling import free_blocks
from rosebatch.engine.scheduling.free_blocks import FreeBlocks


def test_the_order_is_that_of_an_ordered_dictionary(monkeypatch):
    """A place that does not count any more, and is handed out, would give one block to two sequences."""
    monkeypatch.setattr(free_blocks, "_DROPPED", 6)
    rng = random.Random(0)
    blocks, expected, held = FreeBlocks(range(8)), OrderedDict.fromkeys(range(8)), []
    for _ in range(3000):
        kind, count = rng.randrange(3), rng.randrange(5)
        if kind == 0:
            given = [held.pop(rng.randrange(len(held))) for _ in range(min(count, len(held)))]
            blocks.extend(given)
            expected.update(dict.fromkeys(given))
        elif kind == 1:
            wanted = [expected.popitem(last=False)[0] for _ in range(min(count, len(expected)))]
            assert blocks.pop(len(wanted)) == wanted
            held += wanted
        else:
            taken = rng.sample(list(expected), min(count, len(expected)))
            blocks.remove(taken)
            for block in taken:
                del expected[block]
            held += taken
        assert (list(blocks), len(blocks)) == (list(expected), len(expected))
