"""Messages are one line, safe to print, and without the secrets of URLs."""

import pytest

from rosebatch.core.errors import FlagError, InterruptionError, UserError, printable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://key:p@ss@bucket/a.jsonl: no", "s3://bucket/a.jsonl: no"),
        ("https://host/a.jsonl?Signature=a%2Fb/c+d=&Expires=1: no", "https://host/a.jsonl?…: no"),
        ("(403, url='https://u:p@host/a?sig=x')", "(403, url='https://host/a?…')"),
        ("from https://h/a?s=1 and to https://h/b?s=2.", "from https://h/a?… and to https://h/b?…."),
        ("data/what?.jsonl: no such file", "data/what?.jsonl: no such file"),
        ("two  spaces", "two  spaces"),
        ("one\n  two\r\nthree\n", "one two three"),
        ("red \x1b[31m bell \x07 nul \x00", "red \\x1b[31m bell \\x07 nul \\x00"),
        ("turned \u202e round", "turned \\u202e round"),
        ("no UTF-8 \udcff", "no UTF-8 \\udcff"),
        ("é 漢字 \U0001f600 µs", "é 漢字 \U0001f600 µs"),
    ],
)
def test_what_is_printed(text, expected):
    """Signatures, passwords and control characters reached terminals and logs."""
    assert printable(text) == expected
    assert str(UserError(text)) == str(FlagError(text)) == expected


def test_a_signal():
    """Its message has the name of a file too."""
    error = InterruptionError(2, ": 5 rows are saved in \x1b.part")
    assert str(error) == "ended by SIGINT: 5 rows are saved in \\x1b.part"


def test_long_texts():
    """Millions of spaces took minutes where a pattern went back and forth."""
    text = " " * 3_000_000 + "x" + "://" * 100_000
    assert printable(text) == text.strip()
    assert printable(f"{text}@{text}?" + "?" * 100_000).endswith("?…")
