"""Text that spells an added token of the tokenizer, in a grammar."""

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken

from rosebatch.text.grammar.compiled import TokenConstraint
from rosebatch.text.grammar.grammars import Grammars
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import EOS, byte_backend
from tests.helpers.grammars import allowed, spec, tokens_of, walk

SPECIAL, PLAIN = ["<|im_end|>", "<filename>"], ["<b>", "  ", "@@@"]
FIRST = EOS + 1
NUM_TOKENS = FIRST + len(SPECIAL) + len(PLAIN)


@pytest.fixture(scope="module")
def tokenizer():
    backend = byte_backend()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in PLAIN])
    return Tokenizer(backend)


@pytest.fixture(scope="module", params=[EOS, FIRST], ids=["mark", "end"])
def eos(request):
    """The first special token is one of many marks, or the one that ends answers."""
    return request.param


@pytest.fixture(scope="module")
def grammars(tokenizer, eos):
    return Grammars(tokenizer, NUM_TOKENS, [eos])


def json_of(text):
    key = {"type": "object", "properties": {text: {"const": 1}}, "required": [text], "additionalProperties": False}
    return [
        ("json_schema", {"const": text}, {json.dumps(text)}),
        ("json_schema", {"enum": [f"a {text} b"]}, {json.dumps(f"a {text} b")}),
        ("json_schema", key, {json.dumps({text: 1}), json.dumps({text: 1}, separators=(",", ":"))}),
    ]


FORMS = [
    *(form for text in SPECIAL + PLAIN for form in json_of(text)),
    *(("choice", [f"x{text}y"], {f"x{text}y"}) for text in SPECIAL + PLAIN),
    ("choice", ["<filename>", "<path>"], {"<filename>", "<path>"}),
    ("regex", "x(<)(b|b)>[yz]", {"x<b>y", "x<b>z"}),
    ("regex", "  <filename>  ", {"  <filename>  "}),
    ("lark", 'start: /[ab]/ "<b>" /[cd]/', {f"{x}<b>{y}" for x in "ab" for y in "cd"}),
    ("lark", 'start: %json {"const": "<filename>"}', {'"<filename>"'}),
]


@pytest.mark.parametrize(("kind", "source", "texts"), FORMS)
def test_it_is_made_of_ordinary_tokens(grammars, tokenizer, eos, kind, source, texts):
    """Encoding the text gives the added token, which the grammar does not take: each such row failed."""
    grammar = grammars.compile(spec(kind, source))
    assert {walk(grammar, tokenizer, NUM_TOKENS, eos, seed) for seed in range(12)} <= {(text, True) for text in texts}


def test_all_masks_at_once(grammars, tokenizer):
    """Masks that are made together have the same bits as those of one completion alone."""
    makers = [grammars.compile(spec(kind, source)) for kind, source, _ in FORMS]
    together, alone = [maker.start() for maker in makers], [maker.start() for maker in makers]
    masks, rng, live = (
        np.zeros((len(makers), -(-NUM_TOKENS // 32)), np.int32),
        random.Random(0),
        set(range(len(makers))),
    )
    while live:
        TokenConstraint.fill_all(together, masks)
        for row in list(live):
            token_ids = tokens_of(masks[row])
            assert token_ids == allowed(alone[row], NUM_TOKENS)
            token_id = rng.choice(token_ids)
            if together[row].feed(token_id) | alone[row].feed(token_id):
                live.remove(row)
    assert {constraint.error for constraint in (*together, *alone)} == {None}


@pytest.mark.parametrize("text", ["a  <filename>  b", "<b>a<b>"])
def test_drafts_leave_later_masks_as_they_are(grammars, tokenizer, text):
    """A copy spelled the name in any tokens; the completion, whose drafts were right, took those of encoding again."""
    maker = grammars.compile(spec("regex", "(?s)" + text))
    for seed in range(6):
        rng, alone, token_ids, masks, ended = random.Random(seed), maker.start(), [], [], False
        while not ended:
            masks.append(allowed(alone, NUM_TOKENS))
            token_ids.append(rng.choice(masks[-1]))
            ended = alone.feed(token_ids[-1])
        assert tokenizer.decode(token_ids) == text
        constraint, place = maker.start(), 0
        while place < len(token_ids):
            found = constraint.ahead(token_ids[place : place + 3])
            rows = [constraint, *found]
            assert [allowed(row, NUM_TOKENS) for row in rows][: len(masks) - place] == masks[place : place + len(rows)]
            for token_id in token_ids[place : place + len(rows)]:
                constraint.feed(token_id)
            place += len(rows)


def test_a_grammar_may_ask_for_the_token(grammars):
    """``<[258]>`` is the token itself: its text as ordinary tokens would be another answer."""
    constraint = grammars.compile(spec("lark", 'start: "a" <[258]> "<b>"')).start()
    for token_id in (ord("a"), FIRST + 1, *b"<b>"):
        assert allowed(constraint, NUM_TOKENS) == [token_id]
        ended = constraint.feed(token_id)
    assert ended
    assert constraint.error is None


def test_other_text_keeps_the_tokens_of_encoding():
    """What must come is made of the tokens that the model has seen for it; spelling it in bytes costs quality."""
    backend = byte_backend(b"ab")
    backend.add_tokens([AddedToken("<b>", normalized=False, special=False)])
    grammars = Grammars(Tokenizer(backend), FIRST + 2, [EOS])
    plain, other = (grammars.compile(spec("choice", [text])).start() for text in ("aba", "ab<b>"))
    assert allowed(plain, FIRST + 2) == allowed(other, FIRST + 2) == [ord("a")], "encoding never makes the token ab"
    for token_id in b"ab":
        other.feed(token_id)
    assert allowed(other, FIRST + 2) == [ord("<")]


def test_a_token_that_the_model_lacks(tokenizer):
    """A model may have fewer tokens than its tokenizer: the text of one of these can still come."""
    grammar = Grammars(tokenizer, FIRST + 1, [EOS]).compile(spec("choice", ["x@@@y"]))
    assert walk(grammar, tokenizer, FIRST + 1, EOS, 0) == ("x@@@y", True)
