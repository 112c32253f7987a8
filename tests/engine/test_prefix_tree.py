"""The tree of prefixes against a plain table of them, where runs grow, are divided and lose their blocks."""

import random
from array import array

import pytest

from rosebatch.engine.plan import GONE
from rosebatch.engine.scheduling.prefix_tree import PrefixTree

SIZE = 2


def ids(*token_ids):
    return array("I", token_ids)


def found(tree, tokens, label=b""):
    return tree.find(label, tokens, len(tokens) // SIZE)


def test_prompts_that_go_on_otherwise_share_their_beginning():
    """A run of four blocks is divided: of each prompt, all blocks are found."""
    tree = PrefixTree(9, SIZE)
    tree.add(b"", ids(1, 1, 2, 2, 3, 3, 4, 4), 0, [0, 1, 2, 3])
    tree.add(b"", ids(1, 1, 2, 2, 5, 5, 6, 6), 2, [4, 5])
    tree.add(b"", ids(1, 1, 7, 7), 1, [6])
    tree.check_integrity()
    assert found(tree, ids(1, 1, 2, 2, 3, 3, 4, 4, 9, 9)) == [0, 1, 2, 3]
    assert found(tree, ids(1, 1, 2, 2, 5, 5, 6, 6)) == [0, 1, 4, 5]
    assert found(tree, ids(1, 1, 2, 2, 3, 3)) == [0, 1, 2]
    assert found(tree, ids(1, 1, 7, 7)) == [0, 6]
    assert found(tree, ids(1, 0, 2, 2)) == found(tree, ids(0, 0)) == []


def test_a_block_in_the_place_of_a_lost_one_makes_those_behind_it_useful_again():
    tree = PrefixTree(9, SIZE)
    tokens = ids(*range(8))
    tree.add(b"", tokens, 0, [0, 1, 2, 3])
    tree.remove([1])
    tree.check_integrity()
    assert found(tree, tokens) == [0, GONE, 2, 3]
    tree.add(b"", tokens, 0, [5, 6, 7])
    assert found(tree, tokens) == [0, 6, 2, 3]
    tree.remove([3, 2, 6, 0])
    tree.check_integrity()
    assert found(tree, tokens) == [] and not any(tree.runs)


def test_a_block_behind_another_one_needs_no_look():
    """Each block of a long answer compared all tokens before it; only a run that ends there, whole, may grow."""
    tree, tokens = PrefixTree(9, SIZE), ids(*range(8))
    tree.add(b"", tokens, 0, [0, 1])
    tree.add(b"", tokens, 2, [2], before=1)
    tree.add(b"", ids(0, 1, 2, 3, 9, 9), 2, [3], before=1)
    tree.add(b"", tokens, 3, [4], before=2)
    tree.check_integrity()
    assert found(tree, tokens) == [0, 1, 2, 4]
    assert found(tree, ids(0, 1, 2, 3, 9, 9)) == [0, 1, 3]


def test_rows_behind_an_instruction_do_not_look_for_it(monkeypatch):
    """Each row compared all of the instruction once more; one whose next block is there still has to."""
    tree = PrefixTree(9, SIZE)
    tree.add(b"a", ids(1, 1, 2, 2, 3, 3), 0, [0, 1, 2])
    tree.add(b"a", ids(1, 1, 2, 2, 4, 4), 2, [3], before=1)
    with monkeypatch.context() as patched:
        patched.setattr(PrefixTree, "_walk", None)
        tree.add(b"a", ids(1, 1, 2, 2, 5, 5, 6, 6), 2, [4, 5], before=1)
    tree.add(b"a", ids(1, 1, 2, 2, 4, 4, 7, 7), 2, [6, 7], before=1)
    tree.check_integrity()
    assert found(tree, ids(1, 1, 2, 2, 5, 5, 6, 6), b"a") == [0, 1, 4, 5]
    assert found(tree, ids(1, 1, 2, 2, 4, 4, 7, 7), b"a") == [0, 1, 3, 7]
    assert found(tree, ids(1, 1, 2, 2, 3, 3), b"a") == [0, 1, 2]


def test_zeros_are_tokens():
    """With them left out, a prompt would get the keys of a shorter one."""
    tree = PrefixTree(9, SIZE)
    tree.add(b"", ids(0, 0, 0, 0), 0, [0, 1])
    assert found(tree, ids(0, 0, 0, 0, 0, 0)) == [0, 1]
    assert found(tree, ids(1, 0)) == found(tree, ids(0, 256)) == []


def test_an_interrupted_change_is_mended():
    """Half of a division was made: a block that was then removed was looked for in the wrong run."""
    tree = PrefixTree(9, SIZE)
    tree.add(b"", ids(*range(8)), 0, [0, 1, 2, 3])
    tree.add(b"", ids(0, 1, 2, 3, 9, 9), 2, [4])
    tree.runs[0], tree.runs[4] = tree.runs[3], None
    with pytest.raises(AssertionError, match="stale"):
        tree.check_integrity()
    tree.mend()
    tree.check_integrity()
    tree.remove([0, 4])
    assert found(tree, ids(*range(8))) == [GONE, 1, 2, 3]


@pytest.mark.parametrize("seed", range(20))
def test_random_prefixes(seed):
    """Added a few blocks at a time, and removed one by one or many together, from the last on or in any order."""
    rng = random.Random(seed)
    tree, known = PrefixTree(40, SIZE), {}
    for _ in range(300):
        tokens = ids(*(rng.randrange(2) for _ in range(SIZE * rng.randint(1, 7))))
        label, count = rng.choice((b"", b"", b"salt")), len(tokens) // SIZE
        names = [(label, tuple(tokens[: end * SIZE])) for end in range(1, count + 1)]
        expected = [known.get(name, GONE) for name in names]
        own = found(tree, tokens, label)
        assert own + [GONE] * (count - len(own)) == expected
        free = [block for block, run in enumerate(tree.runs) if run is None]
        assert sorted(known.values()) == [block for block, run in enumerate(tree.runs) if run is not None]
        first = rng.randrange(count)
        if len(free) < count - first or rng.random() < 0.2:
            gone = rng.sample(sorted(known.values()), rng.randint(0, len(known)))
            if rng.random() < 0.5:
                gone = [block for block in reversed(expected) if block != GONE]
            tree.remove([*gone, *free[:1]])
            known = {name: block for name, block in known.items() if block not in gone}
        else:
            blocks = rng.sample(free, count - first)
            tree.add(label, tokens, first, blocks)
            known = dict(zip(names[first:], blocks, strict=True)) | known
        tree.check_integrity()
