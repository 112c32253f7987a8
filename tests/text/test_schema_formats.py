"""Formats of schemas: what they take."""

import pytest

from tests.helpers.grammars import spec
from tests.text.test_schema_numbers import takes

LONG = "a" * 63


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        (
            "date",
            "2024-02-29 2000-02-29 2023-02-28 2023-12-31 0001-01-01 1900-11-30 0004-02-29",
            "2023-02-29 1900-02-29",
        ),
        ("date", "2023-01-29 2023-10-31 2023-11-30", "0000-01-01 0000-02-29 2100-02-29 2023-02-30 2023-04-31"),
        ("time", "23:59:59Z 00:00:00.5+01:00 12:30:09z", "23:59:60Z 12:30:60.5+01:00"),
        ("date-time", "2024-02-29T23:59:59Z 2023-10-20t10:00:00.25-03:00", "2023-02-29T10:00:00Z 2016-12-31T23:59:60Z"),
        ("hostname", f"{LONG}.{LONG}.{LONG}.{LONG[:61]} a-b.c", f"{LONG}.{LONG}.{LONG}.{LONG[:62]} {LONG}a"),
        ("email", f"{LONG}a@{LONG}.{LONG}.{LONG[:60]} a@b x@[127.0.0.1]", f"{LONG}ab@c a@{LONG}a.b a@b.{LONG}a"),
        ("email", f"a@{LONG}.{LONG}.{LONG}.{LONG[:60]}", f"a@{LONG}.{LONG}.{LONG}.{LONG[:61]}"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"allOf": [{"minLength": 1}]}])
def test_formats(byte_grammars, name, inside, outside, more):
    """llguidance took 29 February of each year, second 60 of each minute, and names of any length."""
    grammar = byte_grammars.compile(spec("json_schema", {"type": "string", "format": name, **more}))
    assert [text for text in inside.split() if not takes(grammar, f'"{text}"')] == []
    assert [text for text in outside.split() if takes(grammar, f'"{text}"')] == []
