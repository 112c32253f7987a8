"""Random JSON schemas around what grammars have got wrong, and a validator that is exact to the digit."""

import json
import random
from decimal import Context, Decimal, setcontext
from typing import Any

import jsonschema

SPELLED = ["<|im_end|>", "<b>", "a <b> c", "<|im_end|><b>", '"<b>"']
CORNERS = [0, 1, -1, 10, 2**53, -(2**53), 2**63, -(2**63), 2**64, 10**17, 10**15, 5 * 10**11]
Schema = dict[str, Any]


def random_schema(seed: int) -> str:
    """A schema as JSON text."""
    rng = random.Random(seed)
    defs = {name: rng.choice([_object, _map, _array, _range, _number, _text])(rng, 3) for name in ("one", "<b>")}
    whole = {**_schema(rng, 0), "$defs": defs}
    return json.dumps(whole, ensure_ascii=rng.random() < 0.5)


def require_valid(text: str, schema: str) -> None:
    """Check an answer: numbers are compared as decimals.

    Raises:
        jsonschema.ValidationError: it does not match.
    """
    setcontext(Context(prec=2000))
    value, rules = (json.loads(each, parse_float=Decimal, parse_int=Decimal) for each in (text, schema))
    _VALIDATOR(rules).validate(value)


_TYPES = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
    {
        "integer": lambda _, value: isinstance(value, Decimal) and value == value.to_integral_value(),
        "number": lambda _, value: isinstance(value, Decimal),
    }
)
_VALIDATOR = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=_TYPES)


def _schema(rng: random.Random, level: int) -> Schema:
    kinds = [_number, _number, _range, _range, _text, _multiple, _pattern]
    if level < 3:
        kinds += [_object, _map, _array, _either, _both, _reference] * (2 if level == 0 else 1)
    return rng.choice(kinds)(rng, level)


def _any_number(rng: random.Random) -> int | float:
    match rng.randrange(8):
        case 0:
            return rng.choice(CORNERS) + rng.randint(-2, 2)
        case 1:
            return rng.randint(-20, 20)
        case 2:
            return rng.randint(-(2**63), 2**64)
        case 3:
            return rng.uniform(-2, 2)
        case 4:
            return round(rng.uniform(-2, 2), rng.randint(0, 4))
        case 5:
            return rng.uniform(-1, 1) * 10.0 ** rng.randint(-25, 25)
    return rng.choice([0, 1, -1, 0.5, 100, 12.75, 2**53, -0.001])


def _number(rng: random.Random, _: int) -> Schema:
    if rng.random() < 0.5:
        return {"const": _any_number(rng)}
    return {"enum": [_any_number(rng) for _ in range(rng.randint(1, 3))]}


def _range(rng: random.Random, _: int) -> Schema:
    low = _any_number(rng)
    high = low + rng.choice([1, 0.5, 0.25, 1e-3, 2**11, 2**40, abs(_any_number(rng))])
    if rng.random() < 0.2:
        low, high = int(low), int(low) + rng.choice([0, 2, 100])
    bounds = {rng.choice(["minimum", "exclusiveMinimum"]): low, rng.choice(["maximum", "exclusiveMaximum"]): high}
    if rng.random() < 0.3:
        bounds.pop(rng.choice(list(bounds)))
    kind = rng.choice(["number", "number", "integer", ["integer", "null"]])
    return {"type": kind, **bounds}


def _multiple(rng: random.Random, level: int) -> Schema:
    step = rng.choice([0.5, 0.1, 0.01, 0.25, 3, 7, 1000, 0.07, 1.1, 1e-7])
    return {**_range(rng, level), "multipleOf": step}


def _text(rng: random.Random, _: int) -> Schema:
    if rng.random() < 0.5:
        return {"const": rng.choice(SPELLED)}
    return {"enum": [rng.choice([*SPELLED, "x", "\\", "é"]) for _ in range(rng.randint(1, 3))]}


def _pattern(rng: random.Random, _: int) -> Schema:
    sets = ['[^"]', "[^<\\\\]", r"\S", r"\s", r"\W", r"[^\d]", ".", r"[\x00-\x1f]", r"[\w|<>]"]
    return {"type": "string", "pattern": f"^{rng.choice(sets)}{{1,3}}{rng.choice(['$', 'b?$', 'b'])}"}


def _object(rng: random.Random, level: int) -> Schema:
    names = rng.sample(["a", "b", "<b>", "<|im_end|>", 'q"', "é", "a/b"], rng.randint(1, 4))
    properties = {name: _schema(rng, level + 1) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    more = rng.choice([False, False, True, {"const": 2**53 + 2}, {"enum": ["<b>"]}])
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}


def _map(rng: random.Random, level: int) -> Schema:
    patterns = rng.sample(["^b$", "^[ab]$", "^<b>$", "^x[0-9]{1,2}$", '^[^"]$'], 1)
    found: Schema = {"type": "object", "patternProperties": {name: _schema(rng, level + 1) for name in patterns}}
    found["additionalProperties"] = rng.choice([False, False, {"type": "null"}])
    for name in ("minProperties", "maxProperties"):
        if rng.random() < 0.6:
            found[name] = rng.choice([0, 1, 1, 2, 3, 2.0])
    return found


def _array(rng: random.Random, level: int) -> Schema:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _schema(rng, level + 1), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _either(rng: random.Random, level: int) -> Schema:
    return {"anyOf": [_schema(rng, level + 1) for _ in range(2)]}


def _both(rng: random.Random, level: int) -> Schema:
    first = rng.choice([_range, _multiple])(rng, level)
    other = rng.choice([_range, _multiple, _number])(rng, level)
    if rng.random() < 0.5:
        return {**first, "allOf": [other]}
    return {"allOf": [first, other]}


def _reference(rng: random.Random, _: int) -> Schema:
    found = {"$ref": rng.choice(["#/$defs/one", "#/$defs/%3Cb%3E"])}
    return found if rng.random() < 0.7 else {**found, "maximum": 0.5, "exclusiveMinimum": 0}
