"""Numbers of schemas: kept to the digit, or refused."""

import json
import math
import random
from decimal import Decimal

import pytest

from rosebatch.core.errors import RowError
from tests.helpers.grammars import VOCAB_SIZE, allowed, spec

TYPES = ("number", "integer")


def takes(grammar, text):
    """Whether the grammar takes a text of single bytes as a whole answer."""
    constraint = grammar.start()
    for byte in text.encode():
        if byte not in allowed(constraint, VOCAB_SIZE):
            return False
        constraint.feed(byte)
    return 256 in allowed(constraint, VOCAB_SIZE)


def compiled(grammars, schema):
    return grammars.compile(spec("json_schema", schema))


KEPT = [0, -1, 1.5, 2**53, -(2**53), 2**60, 10**15, 0.1, -0.1, 0.30000000000000004, 1e22, 1e-7, 123456789.125]
LOST = [2**53 + 1, 1234567890123456789, -(2**53) - 1, 2**63 - 1, -(2**63), 2**64, 10**20 + 1, 3699.5516654807925]


@pytest.mark.parametrize("number", KEPT)
@pytest.mark.parametrize("form", ["const", "enum", "deep"])
def test_constants_that_are_kept(byte_grammars, number, form):
    """The answer is this number and no other one."""
    schema = {"const": {"const": number}, "enum": {"enum": [number]}, "deep": {"const": [{"a": number}]}}[form]
    grammar = compiled(byte_grammars, schema)
    text = format(Decimal(repr(number)), "f")
    assert takes(grammar, f'[{{"a":{text}}}]' if form == "deep" else text)


@pytest.mark.parametrize("number", LOST)
@pytest.mark.parametrize("name", ["const", "enum", "deep"])
def test_constants_that_are_refused(byte_grammars, number, name):
    """llguidance holds numbers as float64: 1234567890123456789 became 1234567890123456800."""
    schema = {"const": {"const": number}, "enum": {"enum": ["a", number]}, "deep": {"const": [{"a": number}]}}[name]
    with pytest.raises(RowError, match="cannot be kept to the digit; give it as a string") as caught:
        compiled(byte_grammars, {"type": "object", "properties": {"id": schema}, "required": ["id"]})
    assert caught.value.code == "invalid_grammar"


def test_numbers_that_say_nothing_of_the_answer(byte_grammars):
    """A default, an example, and a property that is called ``const``."""
    schema = {"default": 2**64 + 1, "examples": [2**64 + 1], "properties": {"const": {"type": "null"}}}
    assert takes(compiled(byte_grammars, schema), '{"const":null}')


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0.5 0.001 0.4999", "0 -0 0.0 0.51 -0.1"),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, "1.5 1.0001", "1 1.0 0.9 1.6"),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0.5 -0.001", "0 -0 -0.0 0.1"),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, "-1.5 -1.001", "-1 -1.0 -0.5"),
        ({"exclusiveMinimum": 0.25, "exclusiveMaximum": 0.5}, "0.26 0.251 0.4999", "0.25 0.250 0.5 0.50"),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, "0.5 0.1", "0"),
        ({"minimum": 0, "exclusiveMinimum": False, "maximum": 0.5}, "0 0.5", "0.6"),
        ({"minimum": 2, "exclusiveMinimum": 1, "maximum": 5}, "2 5 3", "1 6"),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, "0.5 0.1", "0 -0"),
        ({"exclusiveMinimum": 3, "exclusiveMaximum": 5}, "4 4.5 3.01 4.99", "3 5 3.0"),
        ({"exclusiveMinimum": 2**53 - 3, "maximum": 2**53}, f"{2**53 - 2} {2**53}", f"{2**53 - 3} {2**53 + 1}"),
        ({"minimum": 10**17, "maximum": 2 * 10**17}, f"{10**17} {2 * 10**17}", f"{10**17 - 1} {2 * 10**17 + 1}"),
        ({"minimum": 0, "multipleOf": 0.5, "exclusiveMaximum": 2}, "0 0.5 1.5", "2 0.25 2.0"),
    ],
)
def test_ranges(byte_grammars, kind, schema, inside, outside):
    """A bound that is excluded was taken where the other bound has the same integer part: 0 to 0.5 gave 0 and -0."""
    grammar = None
    wanted = [text for text in inside.split() if kind == "number" or "." not in text]
    if wanted:
        grammar = compiled(byte_grammars, {"type": kind, **schema})
        assert [text for text in wanted if not takes(grammar, text)] == []
        assert [text for text in outside.split() if takes(grammar, text)] == []
    else:
        with pytest.raises(RowError):
            compiled(byte_grammars, {"type": kind, **schema})


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("low", [2**53 + 1, 1234567890123456789, 2**64])
def test_a_range_that_cannot_be_kept(byte_grammars, kind, low):
    """Its bounds would round to numbers outside of it."""
    with pytest.raises(RowError, match=r"no number .*can be kept") as caught:
        compiled(byte_grammars, {"type": kind, "minimum": low, "maximum": low})
    assert caught.value.code == "invalid_grammar"


@pytest.mark.parametrize("ends", [(-(2**63), 2**63 - 1), (-(2**64), 2**64), (-1e308, 1e308), (1 - 2**63, 2**63)])
def test_the_range_of_64_bits(byte_grammars, ends):
    """Schemas that programs make say so of each integer. llguidance fails at -2**63 exactly."""
    grammar = compiled(byte_grammars, {"type": "integer", "minimum": ends[0], "maximum": ends[1]})
    assert takes(grammar, str(1024 - 2**63))
    assert takes(grammar, str(2**63 - 1024))
    assert not takes(grammar, str(-(2**63) - 1))
    assert not takes(grammar, str(2**63))
    numbers = compiled(byte_grammars, {"type": "number", "minimum": ends[0], "maximum": ends[1]})
    assert takes(numbers, "9223371999999999999.5")


@pytest.mark.parametrize("kind", [*TYPES, ["null", "integer"]])
def test_random_ranges_past_53_bits(byte_grammars, kind):
    """Both sides of float64's steps: what is taken is inside. Integers are at most a step away from a bound."""
    rng = random.Random(1)
    for _ in range(40):
        low = rng.choice([-1, 1]) * rng.randint(2**53, 2**63 - 10**13)
        high = low + rng.choice([3000, 10**6, 10**12])
        names = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
        try:
            grammar = compiled(byte_grammars, {"type": kind, names[0]: low, names[1]: high})
        except RowError:
            assert kind == "number"
            continue
        least, most = low + (names[0] != "minimum"), high - (names[1] != "maximum")
        for number in (low - 1, low, low + 1, high - 1, high, high + 1):
            assert least <= number <= most or not takes(grammar, str(number))
        if kind != "number":
            inside = {float(least), float(most), math.nextafter(least, math.inf), math.nextafter(most, -math.inf)}
            taken = sorted(int(number) for number in inside if takes(grammar, str(int(number))))
            assert taken[0] - least <= 1024 and most - taken[-1] <= 1024


def test_random_ranges(byte_grammars):
    """Numbers at the bounds and one digit beside them, on both sides of zero."""
    rng = random.Random(0)
    for _ in range(60):
        ends = sorted(Decimal(rng.randint(-999, 999)).scaleb(-rng.randint(0, 4)) for _ in range(2))
        names = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
        source = f'{{"type": "number", "{names[0]}": {ends[0]:f}, "{names[1]}": {ends[1]:f}}}'
        if ends[0] == ends[1]:
            continue
        grammar = compiled(byte_grammars, source)
        for end in ends:
            for number in (end + step * Decimal("0.00001") for step in (-1, 0, 1)):
                low = number >= ends[0] if names[0] == "minimum" else number > ends[0]
                high = number <= ends[1] if names[1] == "maximum" else number < ends[1]
                found = any(takes(grammar, form) for form in {f"{number:f}", f"{number.normalize():f}"})
                assert found == (low and high), (source, number)


@pytest.mark.parametrize("step", [0.07, 429_496_729, 0.999999999, 1e-30, 0.1 + 0.2, 10**30])
def test_multiples_that_are_refused(byte_grammars, step):
    """llguidance multiplies by ten until a float is integral, and ten times its digits have to fit 32 bits."""
    with pytest.raises(RowError, match="cannot be kept"):
        compiled(byte_grammars, {"type": "number", "multipleOf": step})


@pytest.mark.parametrize("step", [429_496_728, 42_949_672.8])
def test_the_largest_multiples(byte_grammars, step):
    """Ten times a remainder and a digit did not fit 32 bits: 6 was a multiple of 429496729, as was 9 of 2^32 - 1."""
    grammar = compiled(byte_grammars, {"type": "number", "multipleOf": step, "minimum": 0, "maximum": 30})
    texts = [f"{tenths / 10}" for tenths in range(300)] + [str(number) for number in range(31)]
    assert {Decimal(text) for text in texts if takes(grammar, text)} == {0}


def test_multiples_that_hold_together(byte_grammars):
    """The product of 70000 and 70000 does not fit 32 bits: multiples of 8643 came."""
    two = [{"multipleOf": 70000}, {"multipleOf": 70000.0}]
    with pytest.raises(RowError, match="in one schema cannot be kept"):
        compiled(byte_grammars, {"type": "integer", "allOf": two})
    apart = {"properties": {"a": two[0] | {"type": "integer"}, "b": two[1] | {"type": "integer"}}}
    assert takes(compiled(byte_grammars, apart), json.dumps({"a": 140000, "b": 70000}))
    many = [{"multipleOf": step} for step in range(1, 66)]
    with pytest.raises(RowError, match="more than 64 kinds"):
        compiled(byte_grammars, {"type": "integer", "anyOf": many})
    small = compiled(byte_grammars, {"type": "number", "allOf": [{"multipleOf": 0.3}, {"multipleOf": 0.2}]})
    assert [number for number in ("0", "0.6", "1.2", "0.3", "0.2") if takes(small, number)] == ["0", "0.6", "1.2"]


def test_schemas_of_a_lark_grammar(byte_grammars):
    """Their numbers were changed too; what looks like one in a text is text."""
    for number in LOST:
        with pytest.raises(RowError, match="cannot be kept to the digit"):
            byte_grammars.compile(spec("lark", f'start: "a" %json {{"const": {number}}}'))
    source = 'start: %json {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5} "%json {" %json {"maxItems": 0.0}'
    grammar = byte_grammars.compile(spec("lark", source))
    assert takes(grammar, "0.5%json {[]")
    assert not takes(grammar, "0%json {[]")
