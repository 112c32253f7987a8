"""Patterns of schemas: what they take."""

import json
import re
import warnings

import pytest

from rosebatch.core.errors import RowError
from rosebatch.text.grammar.schema_patterns import kept_pattern
from tests.helpers.grammars import spec
from tests.text.test_schema_numbers import takes

# White space, digits and letters that languages see differently, and all that JSON escapes.
CHARACTERS = [*'aZ09_ "\\/\n\r\t\b\f\x7f', *"\x85\xa0\u0660\u2028\u3000\ufeffé漢¾\u0301"]


def of_values(grammars, pattern):
    """The characters that are taken for a whole string."""
    grammar = grammars.compile(spec("json_schema", {"type": "string", "pattern": f"^(?:{pattern})$"}))
    return {each for each in CHARACTERS if takes(grammar, json.dumps(each, ensure_ascii=False))}


def of_keys(grammars, pattern, **more):
    """The same for a key, with 1 as its value."""
    found = {"type": "object", "patternProperties": {f"^(?:{pattern})$": {"const": 1}}, **more}
    grammar = grammars.compile(spec("json_schema", found))
    return {each for each in CHARACTERS if takes(grammar, json.dumps({each: 1}, ensure_ascii=False))}


@pytest.mark.parametrize(
    ("pattern", "never"),
    [
        *(
            ('[^"]', '"'),
            ("[^\\\\]", "\\"),
            ('[^"\\\\\\n]', '"\\\n'),
            ("[\\x00-\\x21]", '"\\'),
            ("[\\u0000-\\u001f]", '"\\'),
        ),
        *(
            ("[\\p{Cc}a]", '"\\'),
            ("\\p{Cc}", '"\\'),
            ("\\P{Po}", '"\\'),
            ('[^\\x0e"]|\\x0e', '"'),
            ("[\\x00-\\x12]|[\\x13-\\x1f]", '"'),
        ),
    ],
)
def test_sets_with_all_control_characters(byte_grammars, pattern, never):
    """llguidance lets an escaped quote and backslash through there: ``[^"]`` took a quote."""
    found = of_values(byte_grammars, pattern)
    assert found.isdisjoint(never)
    assert found & set("\r\t\b\f")
    assert of_keys(byte_grammars, pattern, additionalProperties=False) == found
    assert of_keys(byte_grammars, pattern, additionalProperties={"const": 2}) == found


def test_a_pattern_with_all_control_characters(byte_grammars):
    """No set without one of them is left."""
    with pytest.raises(RowError, match="all control characters cannot be kept"):
        of_values(byte_grammars, "|".join(f"\\x{number:02x}" for number in range(32)))


@pytest.mark.parametrize(
    ("pattern", "both", "ecma"),
    [
        (".", 'aZ09_ "\\/\t\b\f\xa0\u0660\u3000é漢¾\u0301\x85\ufeff', ""),
        ("\\s", " \n\r\t\f\xa0\u2028\u3000", "\ufeff"),
        ("\\S", 'aZ09_"\\/\b\u0660é漢¾\u0301', "\x85"),
        ("\\d", "09", ""),
        ("\\D", 'aZ_ "\\/\n\r\t\b\f\x85\xa0\u2028\u3000\ufeffé漢¾\u0301', "\u0660"),
        ("\\w", "aZ09_", ""),
        ("\\W", ' "\\/\n\r\t\b\f\x85\xa0\u2028\u3000\ufeff\u0301', "\u0660é漢¾"),
    ],
)
def test_what_languages_see_differently(byte_grammars, pattern, both, ecma):
    """A value, or a key where there are no others, matches in ECMA-262 and in Python: ``\\S`` took a BOM.

    Another rule holds for keys that do not match. So there all are taken that match in ECMA-262, and no others.
    """
    both, ecma = set(both), set(both + ecma)
    forms = [pattern] if pattern == "." else [pattern, f"[{pattern}]", f"[^{pattern.swapcase()}]"]
    for form in forms:
        assert of_values(byte_grammars, form) == both
        assert of_keys(byte_grammars, form, additionalProperties=False) == both
        assert of_keys(byte_grammars, form, additionalProperties={"const": 2}) == ecma
        assert of_keys(byte_grammars, form, properties={"b": True}, additionalProperties=False) == ecma


@pytest.mark.parametrize("pattern", ["\\pL", "[\\pL]", "\\p{L}", "[\\p{Letter}]", "[^\\PL]"])
def test_names_of_sets(byte_grammars, pattern):
    """With braces or, of one letter, without."""
    assert of_values(byte_grammars, pattern) == {"a", "Z", "é", "漢"}


def test_patterns_that_become_the_same(byte_grammars):
    """The schema of the first was dropped."""
    found = {"^[a[b]$": {"const": 1}, "^[a\\[b]$": {"const": 2}}
    with pytest.raises(RowError, match="two patternProperties are the same"):
        byte_grammars.compile(spec("json_schema", {"type": "object", "patternProperties": found}))


def test_a_dot_for_all_characters(byte_grammars):
    """As a flag says."""
    assert {"\n", "\r", "\u2028", "a"} <= of_values(byte_grammars, "(?s:.)")


@pytest.mark.parametrize(
    "pattern",
    [
        *("[[:alpha:]]", "[a-z&&[^b]]", "[a&&b]", "[a[b]", "[^[]", "[[{]", "[~~]", "[a~~b]", "[+--]", "[--/]", "[a-]"),
        *(
            "[\\d&&3]",
            "[\\[&&]",
            "\\[a&&b\\]",
            "[]&&]",
            "[^]&&]",
            "a[b[c]d]",
            "[a\\]&&b]",
            "[!@#$%^&*()_+\\-=\\[\\]{}|]",
        ),
    ],
)
def test_classes_of_characters(byte_grammars, pattern):
    """llguidance reads a class in a class, and ``&&``, as Rust does: ``[[:alpha:]]`` took b, and ``[a&&b]`` nothing."""
    whole = f"^(?:{pattern})$"
    value = byte_grammars.compile(spec("json_schema", {"type": "string", "pattern": whole}))
    keys = {"type": "object", "patternProperties": {whole: {"const": 1}}, "additionalProperties": False}
    key = byte_grammars.compile(spec("json_schema", keys))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        expected = re.compile(whole)
    texts = [*"abdl3[]&~-+.:{@", "a]", ":]", "acd]", "abd]"]
    found = [text for text in texts if expected.fullmatch(text)]
    assert [text for text in texts if takes(value, f'"{text}"')] == found
    assert [text for text in texts if takes(key, f'{{"{text}":1}}')] == found


def test_an_escaped_parenthesis_is_no_flag():
    r"""``\(?s`` is a parenthesis that may be missing: its dot let ``\r`` through."""
    assert kept_pattern(r"\(?see .\)?") == r"\(?see [^\n\r\u2028\u2029]\)?"
    assert kept_pattern(r"(?s).") == r"(?s)."


def test_numbers_of_characters_end_where_their_form_does():
    """``\\x0eA`` is two characters: a character that the pattern names was taken out of its sets."""
    assert r"\x0e" not in kept_pattern(r"[\x0eA]|[^a]").replace(r"[\x0eA]", "")
