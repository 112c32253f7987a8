"""Formats of a JSON schema's strings: what their standards ask for beyond llguidance's regular expressions."""

from typing import Any

_LEAP_YEAR = "[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00"
# Years from 1, as in most programs, and 29 February in leap years. Seconds go up to 59: leap seconds are no rule.
_DATE = ({"pattern": "^0{0,3}[1-9]"}, {"pattern": f"^(?:(?:{_LEAP_YEAR})-|.{{5}}(?:0[^2]|1)|.{{8}}(?:[01]|2[0-8]))"})
_MORE: dict[str, tuple[dict[str, Any], ...]] = {
    "date": _DATE,
    "time": ({"pattern": "^.{6}[0-5]"},),
    "date-time": (*_DATE, {"pattern": "^.{17}[0-5]"}),
    # RFC 1123, RFC 5321.
    "hostname": ({"maxLength": 253},),
    "email": ({"maxLength": 254}, {"pattern": r"^[^@]{1,64}@(?:\[|(?:[^.]{1,63}\.)*[^.]{1,63}$)"}),
}


def with_kept_format(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose format is kept to the letter; none of ``time`` has a leap second."""
    name, parts = schema.get("format"), schema.get("allOf", [])
    if not isinstance(name, str) or name not in _MORE or not isinstance(parts, list):
        return schema
    return {**schema, "allOf": [*parts, *_MORE[name]]}
