"""Numbers of a JSON schema, so that llguidance keeps them to the digit.

It holds numbers as float64, and reads decimals of more than 15 digits one unit off at times. Its ranges without an
end admit that end where both ends have the same integer part.
"""

import math
from collections import Counter
from decimal import ROUND_CEILING, Context, Decimal
from itertools import combinations_with_replacement
from typing import Any

# Integers up to here, multiples of this step, and fractions of at most so many places are kept.
_LARGEST_INT = 2**53
_STEP_BEYOND = 11
_MOST_PLACES = 18
_DIGITS = 15
# Ten times the remainder of one and a digit are 32 bits in llguidance.
_LARGEST_MULTIPLE = Decimal(429_496_729)
_MOST_MULTIPLES = 64
# Of bounds: llguidance makes ranges of 64-bit integers, and fails at -2**63.
_END = 2**63
_LARGEST_BOUND = Decimal(9_223_372 * 10**12)
_CONTEXT = Context(prec=400)
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def require_kept(value: Any) -> None:
    """Check a value of ``const`` or ``enum``, at every depth.

    Raises:
        ValueError: it has a number that llguidance would change.
    """
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            require_kept(each)
    elif isinstance(value, float):
        if _as_read(value) != value:
            raise _not_kept(value)
    elif isinstance(value, int) and not (abs(value) < 2**63 and float(value) == value):
        raise _not_kept(value)


def with_kept_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with bounds that llguidance keeps. They are as wide as the given ones, or narrower.

    Raises:
        ValueError: no number between the bounds can be kept, or one of them is infinite.
    """
    given = {name: schema[name] for name in _BOUNDS if name in schema}
    if not given or not all(_is_bound(name, value) for name, value in given.items()):
        return schema
    kept = {name: value for name, value in schema.items() if name not in given}
    types = schema.get("type")
    integers = types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types)
    for name, sign in (("inimum", 1), ("aximum", -1)):
        found = _lower(given.get(f"m{name}"), given.get(f"exclusiveM{name}"), sign, integers)
        if found is not None:
            bound, excluded = found
            kept[f"exclusiveM{name}" if excluded else f"m{name}"] = _plain(bound * sign)
    if _is_empty(kept) and not _is_empty(given):
        raise ValueError(f"no number with {', '.join(f'{name} {value}' for name, value in given.items())} can be kept")
    return kept


def _is_empty(bounds: dict[str, Any]) -> bool:
    least, most = bounds.get("minimum"), bounds.get("maximum")
    return least is not None and most is not None and least > most


def require_kept_multiple(value: int | float) -> Decimal:
    """Check a ``multipleOf``; returns it.

    Raises:
        ValueError: llguidance cannot keep it.
    """
    exact = _decimal(value).copy_abs()
    count, places = float(min(exact, _LARGEST_MULTIPLE)), 0
    while not count.is_integer():
        count, places = count * 10, places + 1
    if count >= _LARGEST_MULTIPLE or Decimal(int(count)).scaleb(-places, _CONTEXT) != exact:
        raise ValueError(f"multiples of {value} cannot be kept: it has too many digits")
    return exact


def require_kept_together(multiples: list[Decimal]) -> None:
    """Check several ``multipleOf`` that may hold for one number.

    Raises:
        ValueError: they are too many, or their common multiple is too large.
    """
    counts = Counter(multiples)
    if len(counts) > _MOST_MULTIPLES:
        raise ValueError(f"more than {_MOST_MULTIPLES} kinds of multipleOf in one schema cannot be kept")
    for one, other in combinations_with_replacement(counts, 2):
        places = max(_places(one), _places(other))
        if (one != other or counts[one] > 1) and one * other * Decimal(10) ** (2 * places) >= _LARGEST_MULTIPLE:
            raise ValueError(f"multiples of {one} and of {other} in one schema cannot be kept")


# A bound, and whether it is excluded.
_Bound = tuple[Decimal, bool]


def _lower(
    inclusive: bool | int | float | None, exclusive: bool | int | float | None, sign: int, integers: bool
) -> _Bound | None:
    """The lower bound for a sign of 1. For a sign of -1, the upper one with its sign reversed."""
    # Draft 4 has a boolean here.
    if isinstance(exclusive, bool):
        inclusive, exclusive = (None, inclusive) if exclusive else (inclusive, None)
    bounds = [(_decimal(each), each is exclusive) for each in (inclusive, exclusive) if each is not None]
    signed = [(each if sign > 0 else each.copy_negate(), excluded) for each, excluded in bounds]
    if any(bound >= _END for bound, _ in signed):
        raise ValueError("no number past 64 bits can be kept")
    found = [_integer_inside(*each) if integers and abs(each[0]) > _LARGEST_INT else _inside(*each) for each in signed]
    return max(found, default=None)


def _is_bound(name: str, value: object) -> bool:
    return isinstance(value, int | float) and not (isinstance(value, bool) and name in ("minimum", "maximum"))


def _integer_inside(bound: Decimal, excluded: bool) -> _Bound:
    """The same for integers past 2**53: the next one that is a float64."""
    least = max(int(bound.to_integral_value(ROUND_CEILING)) + (excluded and bound == int(bound)), 1 - _END)
    found = float(least)
    return Decimal(int(found if found >= least else math.nextafter(found, math.inf))), False


def _inside(bound: Decimal, excluded: bool) -> _Bound:
    """The least lower bound that is kept and not below the given one."""
    if bound < -_LARGEST_BOUND:
        return -_LARGEST_BOUND, False
    place = max(bound.adjusted() + 1 - _DIGITS if bound else -_DIGITS, -_MOST_PLACES)
    is_large, is_integer = abs(bound) > _LARGEST_INT, bound == int(bound)
    if is_large:
        place = max(place, _STEP_BEYOND)
    elif is_integer:
        place = min(place, 0)
    step = Decimal(1).scaleb(place)
    found = bound.quantize(step, ROUND_CEILING, _CONTEXT)
    if not excluded or found != bound:
        return found, False
    # Where llguidance would admit the end.
    if is_large or (is_integer and bound >= 0):
        above = found + step
        return _inside(above, False) if above > _LARGEST_INT >= found else (above, False)
    return found, True


def _as_read(value: float) -> float:
    """A number as llguidance reads it: the digits as an integer, times or by a power of ten."""
    sign, digits, exponent = _decimal(value).as_tuple()
    assert isinstance(exponent, int)
    count, power = float(int("".join(map(str, digits)))), float(f"1e{abs(exponent)}")
    found = count / power if exponent < 0 else count * power
    return -found if sign else found


def _decimal(value: int | float) -> Decimal:
    """The number as it is written.

    Raises:
        ValueError: it is infinite.
    """
    if isinstance(value, float) and math.isinf(value):
        raise ValueError("a number is past the range of a float64")
    return Decimal(repr(value))


def _plain(value: Decimal) -> int | float:
    return int(value) if value == int(value) else float(value)


def _places(value: Decimal) -> int:
    exponent = value.normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _not_kept(value: float) -> ValueError:
    return ValueError(f"the number {value} cannot be kept to the digit; give it as a string")
