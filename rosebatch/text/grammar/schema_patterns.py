"""Patterns of a JSON schema as llguidance can keep them: what it lets through, they match in ECMA-262 and in Python.

llguidance reads them as Rust does. There a class may hold classes, and white space and digits are others. Where a set
of characters holds all control characters, llguidance also lets an escaped quote and backslash through.
"""

import re

# What stands for a set of characters. A ``]`` at once belongs to its class.
_SETS = re.compile(r"\\[pP](?:\{[^}]*\}|[A-Z])|\\.|\[(\^?)(\]?(?:\\.|[^\]\\])*)\]|\.", re.DOTALL)
# In a class: escapes, and what begins a class or an operation for llguidance.
_ITEMS = re.compile(r"\\[pP](?:\{[^}]*\}|[A-Z])|\\.|\[|^\]|^-|(?<=&)&|(?<=~)~|(?<=.-)-", re.DOTALL)
# With this flag, a dot is any character in all languages.
_DOT_IS_ALL = re.compile(r"(?<!\\)(?:\\\\)*\(\?[a-zA-Z]*s")
# Exactly as in ECMA-262, and at most what both languages take. The last are in a class that holds all other characters.
_DOT = {".": r"[^\n\r\u2028\u2029]"}
_EXACT = {**_DOT, r"\s": r"[\s\ufeff--\x85]", r"\S": r"[\S\x85--\ufeff]"}
_BOTH = {**_DOT, r"\s": r"[\s--\x85]", r"\S": r"[^\s\x1c-\x1f\ufeff]", r"\D": r"\P{Nd}", r"\W": r"[^\p{L}\p{N}_]"}
_EITHER = {r"\s": r"\s\x1c-\x1f\ufeff", r"\S": r"\S\x85", r"\d": r"\p{Nd}", r"\w": r"\p{L}\p{N}_"}

_HEX = "[0-9a-fA-F]"
_NUMBERED = re.compile(rf"\\(?:[xuU]\{{({_HEX}+)|x({_HEX}{{2}})|u({_HEX}{{4}})|U({_HEX}{{8}}))")
# Control characters that JSON can write by their number only.
_SELDOM = frozenset(range(0x0E, 0x20))


def kept_pattern(given: str, *, exact: bool = False) -> str:
    """A pattern in Rust's syntax.

    Args:
        given: the pattern.
        exact: whether it has all matches that it has in ECMA-262, for what does not match falls under another rule.
            Else it has those alone that it has in Python, too. One control character that only its number can write
            is in no set of characters.

    Raises:
        ValueError: the pattern names all control characters.
    """
    named = {int("".join(number), 16) for number in _NUMBERED.findall(given)} | set(map(ord, given))
    if not (left := _SELDOM - named):
        raise ValueError("a pattern with all control characters cannot be kept")
    dot_is_all = _DOT_IS_ALL.search(given) is not None
    inside, outside = (_EXACT, _EXACT) if exact else (_BOTH, _EITHER)

    def kept(found: re.Match[str]) -> str:
        part, negation, items = found[0], *found.groups()
        if items is not None:
            part = f"[{negation}{_items(items, outside if negation else inside)}]"
            is_short = not negation and "\\" not in part and part.isprintable()
        else:
            is_short = part[:2].lower() != r"\p"
            part = part if part == "." and dot_is_all else inside.get(part, part)
        return part if is_short else rf"[{part}&&[^\x{min(left):02x}]]"

    return _SETS.sub(kept, given)


def _items(given: str, others: dict[str, str]) -> str:
    return _ITEMS.sub(lambda each: others.get(each[0], each[0]) if each[0][0] == "\\" else f"\\{each[0]}", given)
