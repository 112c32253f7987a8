"""Completions that are followed together: their masks are begun on other threads before anybody asks for them."""

import random
import subprocess
import sys

import numpy as np
import pytest

from rosebatch.text.grammar.compiled import TokenConstraint
from rosebatch.text.grammar.grammars import Grammars
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import EOS, byte_backend
from tests.helpers.checkout import environment
from tests.helpers.grammars import EOS_IDS, PERSON, VOCAB_SIZE, allowed, spec, tokens_of
from tests.helpers.waiting import PATIENCE_SECONDS

SPECS = (
    spec("json_schema", PERSON),
    spec("regex", "[ab]+"),
    spec("choice", ["abc", "abd", "xyz"]),
    spec("json_object"),
)


def masks_of(constraints, vocab_size=VOCAB_SIZE):
    masks = np.full((len(constraints), -(-vocab_size // 32)), -1, np.int32)
    TokenConstraint.fill_all(constraints, masks)
    return [tokens_of(mask) for mask in masks]


def started(grammars, rows):
    return [grammars.compile(SPECS[row % len(SPECS)]).start() for row in range(rows)]


@pytest.mark.parametrize("rows", [31, 32, 90])
def test_together_as_alone(any_grammars, rows):
    """Masks, ends and errors are those of fresh matchers, one by one, also after wrong, unknown and end tokens."""
    grammars, _, size, eos = any_grammars
    rng, together, alone = random.Random(rows), started(grammars, rows), started(grammars, rows)
    for _ in range(25):
        masks = masks_of(together, size)
        assert masks == [allowed(each, size) for each in alone]
        chosen = [rng.choice(ids) if rng.random() < 0.98 else rng.choice([eos, size, 0, 97]) for ids in masks]
        ended = TokenConstraint.feed_all(together, chosen)
        assert ended == [each.feed(token_id) for each, token_id in zip(alone, chosen, strict=True)]
        assert [each.error for each in together] == [each.error for each in alone]
        if rng.random() < 0.5:
            # Plans need not have the rows in this order, or all of them.
            order = rng.sample(range(rows), rng.randrange(1, rows))
            assert masks_of([together[row] for row in order], size) == [allowed(alone[row], size) for row in order]


def test_what_changes_before_its_mask_is_asked_for(any_grammars):
    """A row that goes on alone had the mask of a token before."""
    grammars, _, size, eos = any_grammars
    rng, together, alone = random.Random(0), started(grammars, 64), started(grammars, 64)
    for _ in range(12):
        chosen = [rng.choice(ids) for ids in masks_of(together, size)]
        TokenConstraint.feed_all(together, chosen)
        for each, other, token_id in zip(together, alone, chosen, strict=True):
            other.feed(token_id)
            what, (token_id, *_) = rng.randrange(5), allowed(other, size)
            if what == 0 and token_id != eos:
                assert each.feed(token_id) == other.feed(token_id)
            elif what == 1 and token_id != eos and len(allowed(other, size)) == 1:
                run, ended = each.follow(token_id)
                assert [other.feed(each) for each in run][-1] == ended
            elif what == 2:
                assert each.rest() == other.rest()
            elif what == 3:
                drafts = [token_id, rng.randrange(size)]
                ahead = zip(each.ahead(drafts), other.ahead(drafts), strict=True)
                assert all(allowed(a, size) == allowed(b, size) for a, b in ahead)
        assert masks_of(together, size) == [allowed(each, size) for each in alone]


def test_near_the_limit_of_states(monkeypatch):
    """A mask that failed on another thread is made again with a new matcher, or its row ends with the reason."""
    monkeypatch.setattr("rosebatch.text.grammar.source.MAX_STATES", 300)
    grammar = Grammars(Tokenizer(byte_backend()), VOCAB_SIZE, (EOS,)).compile(spec("regex", "[ab]*a[ab]{30}!"))
    rng, rows = random.Random(0), [grammar.start() for _ in range(40)]
    going = rows
    for _ in range(400):
        for _ in range(2):
            for mask, each in zip(masks_of(rows), rows, strict=True):
                assert mask in ([*b"ab"], [*b"!ab"]) if each.error is None else mask == [EOS]
        going = [each for each in going if each.error is None]
        if len(going) < 32:
            break
        TokenConstraint.feed_all(going, rng.choices(b"ab", k=len(going)))
    assert len(going) < 32 and {each.error for each in rows} == {None, "lexer error: too many states: 300 >= 300"}


def test_new_matchers_between_a_token_and_its_mask(byte_grammars, monkeypatch):
    """Matchers are made anew where states take too much memory, also while the old ones make masks."""
    monkeypatch.setattr("rosebatch.text.grammar.compiled._peak_memory", lambda: peak[0])
    peak, grammars = [0], Grammars(Tokenizer(byte_backend()), VOCAB_SIZE, EOS_IDS)
    together, alone = started(grammars, 64), started(byte_grammars, 64)
    masks_of(together)
    chosen = [ord(b"{ax{"[row % 4 : row % 4 + 1]) for row in range(64)]
    old = [each._matcher for each in together]
    assert TokenConstraint.feed_all(together, chosen) == [each.feed(i) for each, i in zip(alone, chosen, strict=True)]
    peak[0] = 1 << 40
    assert masks_of(together) == [allowed(each) for each in alone]
    assert not {id(each._matcher) for each in together} & {id(each) for each in old}


_FORKS = """
import os, sys
from rosebatch.text.grammar.filling import Filling
try:
    Filling([], 1).begin()
finally:
    process = os.fork()
if process:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""


def test_a_forked_process_ends():
    """It waited for the thread that makes masks, which it does not have."""
    done = subprocess.run([sys.executable, "-c", _FORKS], env=environment(), timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0
